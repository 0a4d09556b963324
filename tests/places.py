"""The two places that every test runs on: the CPU emulator and a GPU, with the same NumPy arrays in and out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from arrays import GUARD, distance, storage_of

from cuflash.architectures import Device
from cuflash.backends import eager_on
from cuflash.dtypes import DTYPES
from cuflash.eager import Eager
from cuflash.emulator import EmulatorOptions, Statistics, execute
from cuflash.plan import Plan
from cuflash.problem import Keywords

Array = np.ndarray[Any, Any]


class Place:
    """One device. Arrays keep their strides and alignment on the way in; results come back as NumPy arrays.

    Whatever cuflash allocates here (out, lse, gradients, workspace) is filled with NaN before the kernels run and lies
    between NaN guards that are checked afterwards.
    """

    def __init__(self, name: str, family: str = "auto", device: Device | None = None) -> None:
        self.name = name
        self.eager = _guarded(name, family, device)

    @property
    def is_gpu(self) -> bool:
        return self.name == "gpu"

    @contextmanager
    def schedule(self, **options: Any) -> Iterator[list[Statistics]]:
        """The emulator under these options; collects what each launch did. On a GPU the hardware schedules."""
        backend: Any = self.eager.backend
        before = backend.options
        backend.options, backend.statistics = replace(before, **options), []
        try:
            yield backend.statistics
        finally:
            backend.options = before

    def put(self, array: Array) -> Any:
        """The array on this device, with the strides and the address's last bits that it has in NumPy."""
        if not self.is_gpu:
            return array
        import cupy

        storage = storage_of(array)
        if not np.may_share_memory(storage, array):  # an owner in an order of its own, which nobody asked for
            array = np.ascontiguousarray(array)
            storage = storage_of(array)
        memory = cupy.asarray(storage) if storage.size else cupy.empty(1, np.uint8)
        return cupy.ndarray(array.shape, array.dtype, memory.data + distance(storage, array), array.strides)

    def get(self, array: Any) -> Array:
        """The array as NumPy has it."""
        return array.get() if self.is_gpu else np.asarray(array)

    def forward(self, arrays: dict[str, Array], out: Any = None, **words: Any) -> dict[str, Array]:
        """out and lse."""
        inputs = {name: self.put(arrays[name]) for name in ("q", "k", "v", "alibi_slopes") if name in arrays}
        found = self.eager.forward(inputs, Keywords(**words), out)
        self.check_guards()
        return {name: self.get(array) for name, array in zip(("out", "lse"), found, strict=True)}

    def backward(self, arrays: dict[str, Array], **words: Any) -> dict[str, Array]:
        """dq, dk and dv, from arrays that hold d_out, out and lse too."""
        inputs = {name: self.put(array) for name, array in arrays.items()}
        found = self.eager.backward(inputs, Keywords(**words))
        self.check_guards()
        return {name: self.get(array) for name, array in found._asdict().items()}

    def both(self, arrays: dict[str, Array], **words: Any) -> dict[str, Array]:
        """out, lse, dq, dk and dv."""
        found = self.forward(arrays, **words)
        return {**found, **self.backward({**arrays, **found}, **words)}

    def same_kernels(self, one: dict[str, Array], other: dict[str, Array], **words: Any) -> bool:
        """Whether two calls run the same kernels: only then are the same bits promised. On the emulator they must."""
        kind = "backward" if "out" in one else "forward"
        names = ("d_out", "q", "k", "v", "out", "lse") if kind == "backward" else ("q", "k", "v")
        placed = [{name: self.put(arrays[name]) for name in names} for arrays in (one, other)]
        plans = [self.eager.plan(kind, arrays, Keywords(**words)) for arrays in placed]
        variants = [[launch.variant for launch in plan.launches] for plan in plans]
        assert self.is_gpu or plans[0].device.families[0] != "sm80" or variants[0] == variants[1]
        return variants[0] == variants[1]

    def check_guards(self) -> None:
        """Fails if a kernel wrote before or behind an array of ours."""
        guarded, self.eager.backend.guarded = self.eager.backend.guarded, []  # type: ignore[attr-defined]
        for storage, count in guarded:
            for side in (storage[:GUARD], storage[GUARD + count :]):
                assert (self.get(side).view(np.uint8) == 0xFF).all(), "a kernel wrote outside its output"


def _guarded(name: str, family: str, device: Device | None) -> Eager:
    kind: Any = type(eager_on(name, family).backend)

    class Guarded(kind):  # type: ignore[misc]
        """The device's own backend, with guards of NaN around everything it allocates."""

        def __init__(self) -> None:
            super().__init__(*([device] if device else []))
            self.guarded: list[tuple[Any, int]] = []
            self.options = EmulatorOptions.from_environment()
            self.statistics: list[Statistics] = []

        def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
            count, itemsize = int(np.prod(shape)), DTYPES[dtype].itemsize
            storage = super().empty((2 * GUARD + count,), dtype, like)
            storage.view(np.uint8).fill(0xFF)
            self.guarded.append((storage, count))
            assert GUARD * itemsize % 16 == 0
            return storage[GUARD : GUARD + count].reshape(shape)

        def run(self, plan: Plan, operands: dict[str, Any]) -> None:
            assert all(launch.grid > 0 for launch in plan.launches), "a launch with an empty grid"
            if name == "gpu":
                super().run(plan, operands)
            else:
                self.statistics.extend(execute(plan, operands, options=self.options))

    return Eager(Guarded())
