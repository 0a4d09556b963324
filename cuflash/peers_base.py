"""What a peer is: a name, the module it needs, and a way to make it ready for one shape and mode."""

from __future__ import annotations

import importlib
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from cuflash.presets import Shape
from cuflash.timing import event_times

__all__ = ["Call", "Contestant", "Peer", "refuse"]

Call = Callable[[], Any]


@dataclass
class Contestant:
    """One library ready to run one shape in one mode, with the clock that suits its stream."""

    name: str
    call: Call
    clock: Callable[[Call, float], list[float]] = event_times
    samples: list[float] = field(default_factory=list)

    def measure(self, budget_ms: float) -> None:
        self.samples += self.clock(self.call, budget_ms)

    @property
    def milliseconds(self) -> float:
        """Median of all that was measured."""
        return statistics.median(self.samples)


class Peer(ABC):
    """A library: its name, the module it needs, and how it is prepared; ``prepare`` raises for what it cannot serve."""

    name = ""
    module = ""

    def missing(self) -> str:
        """Why it cannot take part; empty when it can."""
        try:
            importlib.import_module(self.module)
        except Exception as error:  # a peer built for another GPU or torch fails in many ways at import
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return ""

    def version(self) -> str:
        """The packages that the module comes from, with their versions; what it says of itself where pip knows none."""
        top = self.module.partition(".")[0]
        packages = sorted(set(metadata.packages_distributions().get(top, ())))
        stated = getattr(importlib.import_module(top), "__version__", "unknown")
        return ", ".join(f"{name} {metadata.version(name)}" for name in packages) or str(stated)

    def poison(self, results: Sequence[Any]) -> None:
        """Leaves NaN in free memory of the size of results: a peer that writes less than all of them must not find the
        rest there, left by another one. Nothing here: who has an allocator of its own says how."""
        return

    @abstractmethod
    def prepare(self, arrays: Mapping[str, Any], shape: Shape, mode: str) -> Contestant:
        """The peer's call on these very arrays."""


def refuse(shape: Shape, **absent: bool) -> None:
    """Raises when the shape asks for something that the peer does not have or means differently."""
    rectangular = shape.seqlen_q != shape.seqlen_k
    asked = {
        "window": shape.window is not None,
        "softcap": shape.softcap is not None,
        "alibi": shape.alibi,
        "rectangular_causal": shape.causal and rectangular,
        "top_left": shape.align == "top-left" and rectangular,
    }
    if refused := [name for name in absent if asked[name]]:
        raise ValueError(f"has no {', '.join(refused)}")
