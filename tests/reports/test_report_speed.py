"""Reported faults: a cliff between neighbouring head dimensions, and times taken without waiting for the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from places import Place

from cuflash.problem import Keywords

DIMS = (64, 72, 80, 96, 128, 160, 256)


def timed(gpu: Place, head_dim: int, backward: bool) -> tuple[float, float]:
    """TFLOP/s by events after warm-up, and by a wall clock around many calls and one wait."""
    import time

    import cupy
    from ml_dtypes import bfloat16

    shape = (4, 4096, 16, head_dim)
    rng = cupy.random.default_rng(0)
    names = ("q", "k", "v", "d_out")
    arrays = {name: rng.standard_normal(shape, dtype=cupy.float32).astype(bfloat16) for name in names}
    inputs: dict[str, Any] = {name: arrays[name] for name in "qkv"}
    out, lse = gpu.eager.forward(inputs, Keywords())
    inputs_backward = {**arrays, "out": out, "lse": lse}

    def call() -> None:
        if backward:
            gpu.eager.backward(inputs_backward, Keywords())
        else:
            gpu.eager.forward(inputs, Keywords(), out)
        gpu.eager.backend.guarded.clear()  # type: ignore[attr-defined]

    times = []
    for _ in range(20):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end) / 1e3)
    begin = time.perf_counter()
    for _ in range(20):
        call()
    cupy.cuda.Device().synchronize()
    wall = (time.perf_counter() - begin) / 20
    flops = 4 * shape[0] * shape[2] * shape[1] ** 2 * head_dim * (2.5 if backward else 1)
    return flops / float(np.median(times[5:])) / 1e12, flops / wall / 1e12


@pytest.mark.exhaustive
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_no_head_dim_falls_off_a_cliff(gpu: Place, backward: bool) -> None:
    speeds = [timed(gpu, dim, backward)[0] for dim in DIMS]
    for index, speed in enumerate(speeds):
        neighbours = speeds[max(index - 1, 0) : index] + speeds[index + 1 : index + 2]
        assert speed > 0.5 * min(neighbours), dict(zip(DIMS, speeds, strict=True))


@pytest.mark.exhaustive
def test_reported_speed_is_possible(gpu: Place) -> None:
    """Events and a wall clock agree, and both stay below what the matrix units can do in the same process."""
    from cuflash.timing import matmul_peak, product

    by_events, by_wall = timed(gpu, 128, False)
    peak = matmul_peak((product,))
    assert peak is None or by_events < 1.05 * peak
    assert 0.7 < by_events / by_wall < 1.4
