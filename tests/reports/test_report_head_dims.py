"""Reported faults: odd head dimensions, two different ones, and tiles that a device's shared memory cannot hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from arrays import case, dense
from oracle import assert_right
from places import Place

import cuflash
from cuflash.architectures import Device
from cuflash.errors import UnsupportedError
from cuflash.plan import Plan, backward_plan, forward_plan
from cuflash.problem import Keywords, Problem, spec_of_contiguous

FEW = (1, 33, 100, 128)
ALL = (1, 3, 8, 24, 33, 40, 65, 72, 80, 88, 96, 100, 113, 128, 160, 192, 224, 256)
DIMS = [dim if dim in FEW else pytest.param(dim, marks=pytest.mark.exhaustive) for dim in ALL]


@pytest.mark.parametrize("head_dim", DIMS)
def test_any_head_dim_at_every_entry_point(device: Place, head_dim: int) -> None:
    """The scale is 1/sqrt of the caller's head_dim, never of a padded one."""
    arrays = case(dense(1, 2, 1, 65, 65, head_dim, dtype="float16"), head_dim)
    found = device.both(arrays)
    assert found["out"].shape[-1] == head_dim
    assert_right(found, arrays)
    assert_right(public(device, arrays), arrays)


def public(device: Place, arrays: dict[str, Any]) -> dict[str, Any]:
    """The same results through the public functions."""
    if not device.is_gpu:
        pytest.importorskip("cuflash.interop.numpy", reason="the door for NumPy arrays")
    q, k, v, d_out = (device.put(arrays[name]) for name in ("q", "k", "v", "d_out"))
    plain, lse = cuflash.flash_attention(q, k, v, return_lse=True)
    (out, _), pullback = cuflash.flash_attention_vjp(q, k, v)
    gradients = pullback(d_out)
    again = cuflash.flash_attention_backward(d_out, q, k, v, out, lse)
    assert type(plain) is type(q) and plain.dtype == q.dtype
    for name in ("dq", "dk", "dv"):  # the fast form's order of sums is free, on a GPU
        one, other = (device.get(getattr(x, name)).astype(np.float64) for x in (gradients, again))
        np.testing.assert_allclose(one, other, atol=2e-2)
    return {"out": device.get(plain), "lse": device.get(lse)}


UNEQUAL = [
    pytest.param(8, 2, 2, 640, 128, 64, marks=pytest.mark.exhaustive),
    (1, 2, 2, 130, 128, 64),
    (1, 2, 1, 65, 192, 128),
    pytest.param(1, 2, 1, 65, 64, 128, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("batch", "q_heads", "kv_heads", "seqlen", "head_dim", "head_dim_v"), UNEQUAL)
def test_two_head_dims(
    device: Place, batch: int, q_heads: int, kv_heads: int, seqlen: int, head_dim: int, head_dim_v: int
) -> None:
    arrays = case(dense(batch, q_heads, kv_heads, seqlen, seqlen, head_dim, head_dim_v), 1)
    found = device.both(arrays)
    assert found["out"].shape[-1] == head_dim_v and found["dv"].shape[-1] == head_dim_v
    assert_right(found, arrays)


def problems(head_dim: int, seqlen: int = 256) -> tuple[Problem, Problem]:
    """Forward and backward of a causal problem of two heads."""
    spec = spec_of_contiguous((1, seqlen, 2, head_dim), "bfloat16")
    lse = spec_of_contiguous((1, 2, seqlen), "float32")
    words = Keywords(causal=True)
    return Problem.forward(spec, spec, spec, words), Problem.backward(spec, spec, spec, spec, spec, lse, words)


def device_with(shared_kib: int) -> Device:
    return replace(Device.emulated((8, 6)), name=f"a GPU of {shared_kib} KiB", shared_limit=shared_kib * 1024)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("shared_kib", [48, 64, 99, 163, 227])
def test_tiles_fit_the_shared_memory_of_the_device(shared_kib: int, head_dim: int) -> None:
    """A tile that fits, or a refusal with the head dimension, the bytes needed and the bytes there are."""
    for make, problem in zip((forward_plan, backward_plan), problems(head_dim), strict=True):
        try:
            plan: Plan = make(problem, device_with(shared_kib))
        except UnsupportedError as error:
            assert shared_kib < 99, "every GPU since Ampere has 99 KiB and every head_dim must run there"
            assert str(head_dim) in str(error) and str(shared_kib * 1024) in str(error)
            continue
        assert all(launch.shared_bytes <= shared_kib * 1024 for launch in plan.launches)


def test_head_dim_256_runs(device: Place) -> None:
    arrays = case(dense(1, 2, 2, 256 if device.is_gpu else 70, 256 if device.is_gpu else 70, 256), 2)
    assert_right(device.both(arrays, causal=True), arrays, causal=True)


def test_a_refused_head_dim_says_what_to_do() -> None:
    """Operation, head dimension, device, its capability, the limit and a way out, all in one message."""
    tiny = replace(Device.emulated((8, 6)), name="Tiny GPU", shared_limit=8 * 1024)
    for make, problem in zip((forward_plan, backward_plan), problems(256), strict=True):
        operation = make.__name__.removesuffix("_plan")
        with pytest.raises(UnsupportedError) as caught:
            make(problem, tiny)
        text = str(caught.value)
        for part in (operation, "256", "Tiny GPU", "8.6", "8192"):
            assert part in text, text
        assert caught.value.remedy
    with pytest.raises(UnsupportedError, match="head_dim") as caught:
        Problem.forward(*(spec_of_contiguous((1, 4, 1, 300), "float16"),) * 3)
    assert "256" in str(caught.value) and caught.value.remedy
