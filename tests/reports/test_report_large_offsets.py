"""Reported faults: 32-bit offsets and grid limits. True sizes need a GPU; sparse twins exercise the same arithmetic.

A sparse twin is a small problem in huge strides over untouched pages, so that every offset is computed at full size.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from arrays import case, dense, normal, sparse
from oracle import assert_equal_bits, assert_right
from places import Place

from cuflash.architectures import Device
from cuflash.plan import Plan, backward_plan, forward_plan
from cuflash.problem import ArraySpec, Keywords, Problem, spec_of_contiguous


@pytest.mark.exhaustive
def test_tensors_beyond_two_to_the_31_bytes(gpu: Place) -> None:
    """1.34e9 elements, 2.69e9 bytes: batches 0, 800 and 1599 equal the calls that hold them alone."""
    import cupy

    shape = (1600, 729, 16, 72)
    q, k, v = (device_normal(shape, seed) for seed in (1, 2, 3))
    out, lse = gpu.eager.forward({"q": q, "k": k, "v": v}, Keywords())
    for batch in (0, 800, 1599):
        alone = {name: array[batch : batch + 1] for name, array in zip("qkv", (q, k, v), strict=True)}
        single = gpu.eager.forward(alone, Keywords())
        assert cupy.array_equal(single[0].view(cupy.uint16)[0], out.view(cupy.uint16)[batch])
        assert cupy.array_equal(single[1][0], lse[batch])


def device_normal(shape: tuple[int, ...], seed: int) -> Any:
    """bfloat16 normal values, a slice of batches at a time so that float32 copies stay small."""
    import cupy
    from ml_dtypes import bfloat16

    rng = cupy.random.default_rng(seed)
    array = cupy.empty(shape, bfloat16)
    for begin in range(0, shape[0], 64):
        part = array[begin : begin + 64]
        part[...] = rng.standard_normal(part.shape, dtype=cupy.float32).astype(bfloat16)
    return array


def test_byte_offsets_beyond_32_bits(emulator: Place) -> None:
    """The last two of 1600 batches at their true distance: bitwise the batch alone."""
    batch_stride = 729 * 16 * 72
    distance = 1599 * batch_stride
    assert 2 * distance > 2**31
    arrays = {name: sparse((2, 65, 2, 72), (distance, 16 * 72, 72, 1), np.float16) for name in "qkv"}
    for seed, array in enumerate(arrays.values()):
        array[...] = normal(array.shape, "float16", seed)
    found = emulator.forward(arrays)
    for batch in range(2):
        alone = {name: array[batch : batch + 1].copy() for name, array in arrays.items()}
        single = emulator.forward(alone)
        assert_equal_bits(single, {name: x[batch : batch + 1] for name, x in found.items()})


def test_output_gradient_with_a_large_row_stride(emulator: Place) -> None:
    """Rows 9728 elements apart, 411 thousand of them in all: the last rows lie beyond 2^31 elements."""
    row_stride, far = 9728, 410_923 - 64
    assert row_stride * far > 2**31
    arrays = case(dense(2, 2, 2, 40, 40, 96), 1)
    words: dict[str, Any] = {"window": (128, 0), "causal": True}
    arrays |= emulator.forward(arrays, **words)
    d_out = sparse(arrays["d_out"].shape, (row_stride * far, row_stride, 96, 1), arrays["d_out"].dtype)
    d_out[...] = arrays["d_out"]
    found = emulator.backward({**arrays, "d_out": d_out}, deterministic=True, **words)
    assert_right(found, arrays, **words)
    assert_equal_bits(found, emulator.backward(arrays, deterministic=True, **words))


def test_batches_two_to_the_30_elements_apart(emulator: Place) -> None:
    """Keys and values as a view of a far larger cache: five batches, 10 GiB of addresses each."""
    shape, strides = (5, 3, 2, 64), (2**30, 2 * 64, 64, 1)
    plain = {name: normal(shape, "float16", seed) for seed, name in enumerate("qkv")}
    arrays = {"q": plain["q"], **{name: sparse(shape, strides, np.float16) for name in "kv"}}
    for name in "kv":
        arrays[name][...] = plain[name]
    assert_equal_bits(emulator.forward(arrays, causal=True), emulator.forward(plain, causal=True))


def grid_of(plan: Plan) -> list[int]:
    return [launch.grid for launch in plan.launches]


@pytest.mark.parametrize(("batch", "heads"), [(1, 65535), (1, 65536), (1, 70001), (65536, 1), (300, 1000)])
@pytest.mark.parametrize("kv_heads", ["as many", "one"])
def test_grids_fold_batch_and_heads_into_one_axis(batch: int, heads: int, kv_heads: str) -> None:
    """No axis of 65535 blocks anywhere: the plan's grids are one-dimensional and hold every head of every batch."""
    spec = spec_of_contiguous((batch, 10, heads, 16), "float32")
    kv = spec if kv_heads == "as many" else spec_of_contiguous((batch, 10, 1, 16), "float32")
    lse = spec_of_contiguous((batch, heads, 10), "float32")
    for device in (Device.emulated((8, 0)), Device.emulated((9, 0), 132)):
        plan = forward_plan(Problem.forward(spec, kv, kv), device)
        assert all(0 < grid < 2**31 for grid in grid_of(plan))
        for deterministic in (False, True):
            words = Keywords(deterministic=deterministic)
            plan = backward_plan(Problem.backward(spec, spec, kv, kv, spec, lse, words), device)
            assert all(0 < grid < 2**31 for grid in grid_of(plan))


@pytest.mark.exhaustive
@pytest.mark.parametrize("heads", [65535, 65536, 70001])
@pytest.mark.parametrize("kv_heads", ["as many", "one"])
def test_many_heads(gpu: Place, heads: int, kv_heads: str) -> None:
    check_many(gpu, heads, heads if kv_heads == "as many" else 1)


@pytest.mark.parametrize("kv_heads", ["as many", "one"])
def test_some_heads(device: Place, kv_heads: str) -> None:
    check_many(device, 300, 300 if kv_heads == "as many" else 1)


def check_many(device: Place, heads: int, kv_heads: int) -> None:
    """First, middle and last heads against calls of their own."""
    arrays = case(dense(1, heads, kv_heads, 10, 10, 16, dtype="float32"), 2)
    found = device.both(arrays)
    for head in (0, heads // 2, heads - 1):
        chosen = {name: x[:, :, head : head + 1] for name, x in arrays.items() if name in ("q", "d_out")}
        kv = head if kv_heads > 1 else 0
        chosen |= {name: arrays[name][:, :, kv : kv + 1] for name in "kv"}
        one = {"out": found["out"][:, :, head : head + 1], "lse": found["lse"][:, head : head + 1]}
        one["dq"] = found["dq"][:, :, head : head + 1]
        if kv_heads > 1:
            one |= {name: found[name][:, :, head : head + 1] for name in ("dk", "dv")}
        assert_right(one, chosen)


@pytest.mark.exhaustive
def test_many_batches(gpu: Place) -> None:
    """Zeros in, zeros out, and the context still works."""
    import cupy

    zeros = cupy.zeros((65536, 16, 1, 80), cupy.float16)
    out, _ = gpu.eager.forward({"q": zeros, "k": zeros, "v": zeros}, Keywords())
    assert not out.any() and int(cupy.arange(10).sum()) == 45


def test_extra_memory_is_linear_in_the_length() -> None:
    """96000 tokens, causal with a window: the plan's workspace, and time to plan, know nothing of length squared."""
    words = Keywords(causal=True, window=(4096, 0))
    begin = time.perf_counter()
    workspaces = []
    for seqlen in (48000, 96000):
        spec = spec_of_contiguous((1, seqlen, 1, 64), "bfloat16")
        lse = spec_of_contiguous((1, 1, seqlen), "float32")
        forward = forward_plan(Problem.forward(spec, spec, spec, words), Device.emulated())
        backward = backward_plan(Problem.backward(spec, spec, spec, spec, spec, lse, words), Device.emulated())
        assert forward.workspace_bytes < 100e6 and backward.workspace_bytes < 100e6
        workspaces.append(backward.workspace_bytes)
    assert workspaces[1] <= 2 * workspaces[0] + 2**20
    assert time.perf_counter() - begin < 5


@pytest.mark.exhaustive
def test_peak_memory_of_a_long_window(gpu: Place) -> None:
    import cupy

    shape = (1, 96000, 1, 64)
    arrays = {name: device_normal(shape, seed) for seed, name in enumerate("qkv")}
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    gpu.eager.forward(arrays, Keywords(causal=True, window=(4096, 0)))
    assert pool.total_bytes() - before < 100e6


def test_specs_count_bytes_without_wrapping() -> None:
    spec = ArraySpec((1600, 729, 16, 72), (839808, 1152, 72, 1), "bfloat16")
    assert spec.nbytes == 1600 * 729 * 16 * 72 * 2 > 2**31
