"""CuPy's door: the eager path of cuflash/launch.py, with plans queued by the compiled launcher where there is one.

One call into C queues all kernels of a plan; Python's own way costs a call, a lock and some packing for each.
"""

from __future__ import annotations

from typing import Any

import cupy

from cuflash import jit
from cuflash.architectures import architecture_of
from cuflash.eager import Eager
from cuflash.interop.launcher import CLauncher, Launcher, Run, launcher
from cuflash.interop.words import encode, kernel_key, operand_names
from cuflash.launch import CupyBackend
from cuflash.plan import Plan

__all__ = ["LaunchedBackend", "eager", "prepared"]

_LIMIT = 8192  # plans; a full table starts afresh
Prepared = tuple[Plan, Run, tuple[str, ...], Any]  # the operands' names in the launcher's order; kernels kept alive


class LaunchedBackend(CupyBackend):
    """CuPy arrays on the device that holds them."""

    def __init__(self) -> None:
        self._prepared: dict[tuple[int, int], Prepared] = {}

    def run(self, plan: Plan, operands: dict[str, Any]) -> None:
        home = operands["q"].data.device_id
        entry = self._prepared.get((id(plan), home))
        if entry is None or entry[0] is not plan:
            chosen = launcher()
            if not isinstance(chosen, CLauncher):
                super().run(plan, operands)
                return
            entry = self._prepare(chosen, plan, home)
        _, run, names, _ = entry
        addresses = [operands[name].data.ptr for name in names]
        if home == cupy.cuda.runtime.getDevice():
            run(addresses, cupy.cuda.get_current_stream().ptr, home)
            return
        with cupy.cuda.Device(home):
            run(addresses, cupy.cuda.get_current_stream().ptr, home)

    def _prepare(self, chosen: Launcher, plan: Plan, home: int) -> Prepared:
        if len(self._prepared) >= _LIMIT:
            self._prepared.clear()
        entry = self._prepared[id(plan), home] = prepared(chosen, plan, home)
        return entry


def prepared(chosen: Launcher, plan: Plan, device: int) -> Prepared:
    """The plan ready to run, its kernels loaded on the device; not possible while a graph is being captured."""
    target = architecture_of(plan.device.capability).target
    with cupy.cuda.Device(device):
        kernels = jit.load_all((launch.variant, launch.shared_bytes) for launch in plan.launches)
        for launch, kernel in zip(plan.launches, kernels, strict=True):
            chosen.register(kernel_key(launch.variant, target), device, kernel.kernel.ptr)
    return plan, chosen.prepare(encode(plan, target, clears=False)), operand_names(plan), kernels


eager = Eager(LaunchedBackend())
