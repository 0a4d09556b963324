"""One small kernel with its inputs, in a form that the emulator and a GPU both run. NumPy only: it also runs alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
KERNELS = Path(__file__).resolve().parent.parent / "emulator" / "kernels"
PARAM_BYTES = 512  # struct TestParams of kernels/parameters.cuh
MAPS_OFFSET, INPUTS_OFFSET, OUTPUT_OFFSET, NUMBERS_OFFSET = 0, 384, 408, 416


class Map(NamedTuple):
    """A tensor map: arguments of cuTensorMapEncodeTiled over one operand, innermost dimension first."""

    operand: str  # "in0", "in1", "in2" or "out"
    dtype: str
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0  # bytes
    byte_offset: int = 0


@dataclass(frozen=True)
class Case:
    """``entry`` of ``kernels/<file>.cuh`` over ``inputs``; the kernel's answer is in ``out``, which begins as given."""

    name: str
    file: str
    entry: str
    inputs: tuple[Array, ...]
    out: Array
    numbers: tuple[int, ...] = ()
    maps: tuple[Map, ...] = ()
    threads: int = 32
    grid: int = 1
    shared_bytes: int = 0
    exact: bool = True  # whether a GPU's answer must be met bit by bit
    tags: frozenset[str] = field(default=frozenset())

    @property
    def symbol(self) -> str:
        """The kernel's name."""
        return "test_kernel"

    def source(self) -> str:
        """The translation unit: parameters, the file's text, one kernel."""
        text = (KERNELS / "parameters.cuh").read_text() + (KERNELS / f"{self.file}.cuh").read_text()
        kernel = f"CUFLASH_KERNEL({self.symbol}, {self.threads}, 1, TestParams, params) {{ {self.entry}(params); }}\n"
        return f'#include "ptx/platform.cuh"\n{text}{kernel}'

    def operands(self) -> dict[str, Array]:
        """The arrays by operand name; ``out`` is a fresh copy."""
        named = {f"in{i}": array for i, array in enumerate(self.inputs)}
        return {**named, "out": self.out.copy()}

    def params(self, address_of: Callable[[str], int], encode: Callable[[Map], bytes]) -> bytes:
        """The parameter struct as bytes."""
        raw = bytearray(PARAM_BYTES)
        for place, one in enumerate(self.maps):
            raw[MAPS_OFFSET + 128 * place : MAPS_OFFSET + 128 * (place + 1)] = encode(one)
        for place in range(len(self.inputs)):
            start = INPUTS_OFFSET + 8 * place
            raw[start : start + 8] = address_of(f"in{place}").to_bytes(8, "little")
        raw[OUTPUT_OFFSET : OUTPUT_OFFSET + 8] = address_of("out").to_bytes(8, "little")
        for place, number in enumerate(self.numbers):
            start = NUMBERS_OFFSET + 8 * place
            raw[start : start + 8] = int(number).to_bytes(8, "little", signed=True)
        return bytes(raw)
