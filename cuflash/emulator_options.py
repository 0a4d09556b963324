"""How the emulator runs a kernel, and what it counts."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from cuflash.errors import EmulatorError

__all__ = ["EmulatorOptions", "Statistics"]


@dataclass(frozen=True)
class EmulatorOptions:
    """How hard the emulator tries to break a kernel; each field is also CUFLASH_EMULATOR_<FIELD> in the environment."""

    seed: int = 0
    random_order: bool = True  # of threads and blocks
    timing: str = "random"  # when asynchronous copies happen: eager, late or random
    poison: bool = True  # NaN in fresh shared memory and in destinations of pending copies
    race: bool = False  # check that shared-memory accesses are ordered; 1.5 to 2.5 times slower
    instrument: bool = False  # check every load and store, also through raw pointers
    preempt: int = 16  # instrumented kernels: lose the turn at one access in this many; 0 never
    workers: int = 1  # operating-system threads over blocks
    watchdog: float = 120.0  # seconds a launch may take; 0 for ever

    @classmethod
    def from_environment(cls) -> EmulatorOptions:
        """Defaults, overridden by the environment."""
        found: dict[str, Any] = {}
        for row in fields(cls):
            text = os.environ.get(f"CUFLASH_EMULATOR_{row.name.upper()}")
            if text is not None:
                found[row.name] = _parse(row.name, text, type(row.default))
        return cls(**found)


def _parse(name: str, text: str, kind: type) -> Any:
    try:
        if kind is bool:
            return {"0": False, "1": True, "false": False, "true": True}[text.lower()]
        return kind(text)
    except (KeyError, ValueError) as error:
        raise EmulatorError(f"CUFLASH_EMULATOR_{name.upper()}={text!r} is not a {kind.__name__}") from error


class Statistics(NamedTuple):
    """What one launch did."""

    blocks: int
    switches: int
    collectives: int
    barriers: int
    mma: int
    wgmma: int
    cp_async_bytes: int
    bulk_bytes: int
    matrix_phases: int  # eight-row phases of ldmatrix and stmatrix
    matrix_conflicts: int  # extra phases by bank conflicts
