"""The GPUs: compute capability to compiler target, shared-memory limit and kernel families, newest family first."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from cuflash.errors import ArgumentError, UnsupportedError

__all__ = ["ARCHITECTURES", "Architecture", "Device", "architecture_of", "capability_from_environment"]

KIB = 1024


@dataclass(frozen=True)
class Architecture:
    """One row: what a compute capability means for the tables."""

    capability: tuple[int, int]
    target: str  # what NVRTC is told; the "a" of sm_90a unlocks wgmma and setmaxnreg
    shared_limit: int  # bytes of dynamic shared memory one block may ask for
    shared_per_sm: int  # bytes shared by the blocks of one multiprocessor
    reduce_width: int  # floats that one reduction into global memory adds: vectors of four exist since 9.0
    families: tuple[str, ...]


ARCHITECTURES = {
    row.capability: row
    for row in (
        Architecture((8, 0), "sm_80", 163 * KIB, 164 * KIB, 1, ("sm80",)),
        Architecture((8, 6), "sm_86", 99 * KIB, 100 * KIB, 1, ("sm80",)),
        Architecture((8, 7), "sm_87", 163 * KIB, 164 * KIB, 1, ("sm80",)),
        Architecture((8, 9), "sm_89", 99 * KIB, 100 * KIB, 1, ("sm80",)),
        Architecture((9, 0), "sm_90a", 227 * KIB, 228 * KIB, 4, ("sm90", "sm80")),
        Architecture((10, 0), "sm_100", 227 * KIB, 228 * KIB, 4, ("sm80",)),
        Architecture((10, 3), "sm_103", 227 * KIB, 228 * KIB, 4, ("sm80",)),
        Architecture((12, 0), "sm_120", 99 * KIB, 100 * KIB, 4, ("sm80",)),
        Architecture((12, 1), "sm_121", 99 * KIB, 100 * KIB, 4, ("sm80",)),
    )
}


@dataclass(frozen=True)
class Device:
    """A GPU, or what the emulator pretends to be, as plain data."""

    name: str
    capability: tuple[int, int]
    sm_count: int
    shared_limit: int  # bytes, read off the device itself where there is one
    families: tuple[str, ...]

    @classmethod
    def emulated(cls, capability: tuple[int, int] = (8, 0), sm_count: int = 4) -> Device:
        """The emulator dressed as a GPU of the given capability."""
        row = architecture_of(capability)
        return cls("emulator", capability, sm_count, row.shared_limit, row.families)

    def restricted(self, family: str) -> Device:
        """The same device with one kernel family only, for comparisons."""
        if family not in self.families:
            raise UnsupportedError("family", family, f"does not run on {self.name}", f"it runs {self.families}")
        return Device(self.name, self.capability, self.sm_count, self.shared_limit, (family,))


def architecture_of(capability: tuple[int, int]) -> Architecture:
    """The row of a capability; an unknown newer GPU gets the generic family with a 99 KiB budget.

    Raises:
        UnsupportedError: older than Ampere.
    """
    if capability in ARCHITECTURES:
        return ARCHITECTURES[capability]
    major, minor = capability
    if major < 8:
        rule = "is older than 8.0, the first with the instructions that the kernels use"
        raise UnsupportedError("compute capability", f"{major}.{minor}", rule, "run on the emulator instead")
    return Architecture(capability, f"sm_{major}{minor}", 99 * KIB, 100 * KIB, 1, ("sm80",))


def capability_from_environment(variable: str, default: str) -> tuple[int, int]:
    """The compute capability that a variable such as ``CUFLASH_EMULATOR_CAPABILITY=9.0`` names.

    Raises:
        ArgumentError: it is no capability.
    """
    text = os.environ.get(variable) or default
    found = re.fullmatch(r"(\d+)(?:\.(\d))?a?", text.strip())
    if found is None:
        raise ArgumentError(variable, text, "must be a compute capability", "for instance 8.0, 9.0 or 12.0")
    return int(found[1]), int(found[2] or 0)
