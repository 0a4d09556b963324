"""How long a call takes on a GPU, what it computes, and what the card itself can do: one clock for everybody."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

from cuflash.prediction import TENSOR_FLOPS
from cuflash.presets import Shape

__all__ = ["copy_bandwidth", "event_times", "flops", "matmul_peak", "min_bytes", "product", "tensor_peak", "wall_times"]

Call = Callable[[], Any]

_MIN_CALLS, _MAX_CALLS = 3, 200


def flops(shape: Shape, mode: str) -> float:
    """Floating-point operations of ``mode`` (fwd, bwd, fwdbwd): 2 products forward, 5 backward, visible pairs."""
    pairs = shape.batch * shape.num_q_heads * shape.visible_pairs()
    forward = 2.0 * pairs * (shape.head_dim + shape.head_dim_v)
    backward = 2.0 * pairs * (3 * shape.head_dim + 2 * shape.head_dim_v)
    return {"fwd": forward, "bwd": backward, "fwdbwd": forward + backward}[mode]


def min_bytes(shape: Shape, mode: str) -> float:
    """Bytes that must cross the memory bus at least: every operand read once, every result written once."""
    size = 4 if shape.dtype == "float32" else 2
    q_rows, k_rows = shape.batch * shape.seqlen_q * shape.num_q_heads, shape.batch * shape.seqlen_k * shape.num_kv_heads
    q_bytes, out_bytes = q_rows * shape.head_dim * size, q_rows * shape.head_dim_v * size
    kv_bytes = k_rows * (shape.head_dim + shape.head_dim_v) * size
    forward = q_bytes + kv_bytes + out_bytes + 4 * q_rows
    backward = 2 * q_bytes + 2 * kv_bytes + 2 * out_bytes + 4 * q_rows
    return float({"fwd": forward, "bwd": backward, "fwdbwd": forward + backward}[mode])


def event_times(call: Call, budget_ms: float) -> list[float]:
    """Milliseconds of each call between two events on the current stream; as many calls as fit the budget.

    Calls are queued without waiting, so the host's share shows only where a call is shorter than its own launch.
    """
    import cupy

    def timed(count: int) -> list[float]:
        events = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(count)]
        for start, stop in events:
            start.record()
            call()
            stop.record()
        events[-1][1].synchronize()
        return [float(cupy.cuda.get_elapsed_time(start, stop)) for start, stop in events]

    first = min(timed(2))  # the round's warm-up, and the size of its step
    return timed(_calls_within(budget_ms, first))


def wall_times(call: Call, wait: Callable[[Any], Any], budget_ms: float) -> list[float]:
    """Milliseconds a call by the host's clock over queued calls, for libraries on streams of their own."""

    def average(count: int) -> float:
        begin = time.perf_counter()
        result = None
        for _ in range(count):
            result = call()
        wait(result)
        return (time.perf_counter() - begin) / count * 1e3

    first = average(2)
    return [average(_calls_within(budget_ms, first))]


def _calls_within(budget_ms: float, one_ms: float) -> int:
    return max(_MIN_CALLS, min(_MAX_CALLS, int(budget_ms / max(one_ms, 1e-3))))


def matmul_peak(makers: Iterable[Callable[[int], Call]], size: int = 8192, budget_ms: float = 60.0) -> float | None:
    """TFLOP/s of a square matrix product; ``makers`` are tried in turn, None where no library has one."""
    for make in makers:
        try:
            call = make(size)
            call()
            return 2.0 * size**3 / statistics.median(event_times(call, budget_ms)) / 1e9
        except Exception:  # a missing cuBLAS, torch or dtype: the next one may have it
            continue
    return None


def tensor_peak() -> float | None:
    """TFLOP/s of this GPU's tensor cores on 16-bit inputs at the highest clock; None where their rate is not known."""
    import cupy

    device = cupy.cuda.Device()
    if device.compute_capability != "90":
        return None
    hertz = 1e3 * device.attributes["ClockRate"]
    return float(TENSOR_FLOPS * device.attributes["MultiProcessorCount"] * hertz / 1e12)


def copy_bandwidth(gibibytes: float = 1.0, budget_ms: float = 30.0) -> float | None:
    """GB/s, read plus written, of a device-to-device copy."""
    import cupy

    count = int(gibibytes * 2**30)
    try:
        source, target = cupy.cuda.alloc(count), cupy.cuda.alloc(count)
    except cupy.cuda.memory.OutOfMemoryError:
        return None
    stream = cupy.cuda.get_current_stream()
    times = event_times(lambda: target.copy_from_device_async(source, count, stream), budget_ms)
    return 2.0 * count / statistics.median(times) / 1e6


def product(size: int) -> Call:
    """A square float16 matrix product by CuPy's cuBLAS, ready to be timed; for where torch is not."""
    import cupy
    import numpy as np

    values = np.random.default_rng(0).standard_normal((size, size), dtype=np.float32)
    left = cupy.asarray(values.astype(np.float16))
    result = cupy.empty_like(left)
    return lambda: cupy.matmul(left, left, out=result)
