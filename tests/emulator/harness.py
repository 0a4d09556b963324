"""Runs one test kernel on the emulator, as a plan of one launch."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from primitive_case import INPUTS_OFFSET, MAPS_OFFSET, OUTPUT_OFFSET, Case

from cuflash import emulator
from cuflash.emulator import EmulatorOptions
from cuflash.plan import Launch, Output, Plan, Pointer, TensorMapSlot


@dataclass(frozen=True)
class TestVariant:
    """Stands in for a Variant: a name and a text."""

    __test__ = False
    symbol: str
    text: str

    def source(self) -> str:
        return self.text


def plan_of(case: Case) -> Plan:
    """The case as data for an executor."""
    pointers = [Pointer(INPUTS_OFFSET + 8 * i, f"in{i}") for i in range(len(case.inputs))]
    pointers.append(Pointer(OUTPUT_OFFSET, "out"))
    slots = tuple(
        TensorMapSlot(
            MAPS_OFFSET + 128 * i, m.operand, m.dtype, m.dims, m.strides_bytes, m.box, m.swizzle, m.byte_offset
        )
        for i, m in enumerate(case.maps)
    )
    params = case.params(lambda name: 0, lambda one: bytes(128))
    variant: Any = TestVariant(case.symbol, case.source())
    launch = Launch(variant, case.grid, case.threads, case.shared_bytes, params, tuple(pointers), slots)
    outputs = (Output("out", case.out.shape, str(case.out.dtype)),)
    fields: dict[str, Any] = {"kind": "test", "problem": None, "device": None, "launches": (launch,)}
    inputs = tuple(f"in{i}" for i in range(len(case.inputs)))
    return Plan(**fields, inputs=inputs, outputs=outputs)


def run(case: Case, **options: Any) -> np.ndarray[Any, Any]:
    """What the kernel leaves in ``out``."""
    return traced(case, **options).out


def traced(case: Case, **options: Any) -> SimpleNamespace:
    """``out`` and the launch's statistics."""
    operands = case.operands()
    options.setdefault("race", True)
    options.setdefault("options", EmulatorOptions(watchdog=10.0))
    statistics = emulator.execute(plan_of(case), operands, **options)
    return SimpleNamespace(out=operands["out"], statistics=statistics[0])
