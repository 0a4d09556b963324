"""Reported faults: strides derived instead of read, vector loads on odd addresses, strides of size-1 axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import Layout, case, dense, nans, normal, restrided, stored
from oracle import assert_equal_bits, assert_right, equal_bits
from places import Place

from cuflash.errors import ArgumentError
from cuflash.problem import Keywords

D_OUT = {"heads before rows": "BHSD", "row step 2": "row step 2", "rows before batch": "SBHD"}


@pytest.mark.parametrize("layout", D_OUT.values(), ids=D_OUT)
def test_output_gradient_need_not_be_contiguous(device: Place, layout: str) -> None:
    arrays = case(dense(2, 4, 1, 32, 32, 128, dtype="float16"), 1)
    arrays |= device.forward(arrays)
    plain = device.backward(arrays, deterministic=True)
    assert_right(plain, arrays)
    arrays["d_out"] = stored(arrays["d_out"], layout)
    assert not arrays["d_out"].flags.c_contiguous
    assert_equal_bits(device.backward(arrays, deterministic=True), plain)


def test_last_stride_of_33(device: Place) -> None:
    """Forward and backward take the same inputs; gradients have the shape of the inputs."""
    plain = case(dense(1, 2, 2, 33, 33, 64, dtype="float16"), 2)
    arrays = {name: stored(plain[name], "transposed") if name in "qkv" else plain[name] for name in plain}
    assert all(arrays[name].strides[-1] == 33 * 2 for name in "qkv")
    found = device.both(arrays)
    assert_right(found, plain)
    assert all(found[f"d{name}"].shape == arrays[name].shape for name in "qkv")


def test_heads_before_rows_do_not_all_read_head_zero(device: Place) -> None:
    """v[b, h] = h + 10 b: every head and batch returns its own constant, twenty times."""
    constants = np.arange(3)[None, None, :, None] + 10 * np.arange(2)[:, None, None, None]
    arrays = {
        "q": stored(normal((2, 17, 3, 32), "float16", 1), "BHSD"),
        "k": stored(normal((2, 17, 3, 32), "float16", 2), "BHSD"),
        "v": stored(np.broadcast_to(constants, (2, 17, 3, 32)).astype(np.float16), "BHSD"),
    }
    first = device.forward(arrays)
    assert np.abs(first["out"].astype(np.float64) - constants).max() <= 0.02
    for _ in range(19):
        assert_equal_bits(device.forward(arrays), first)


ODD = [Layout(offset=offset) for offset in (1, 2, 3, 5)]
ODD += [Layout(order=(0, 2, 1, 3), pad=(0, 0, 0, pad)) for pad in (1, 3)]  # row strides of 65 and 67
ODD += [Layout(pad=(0, 0, 0, 1), offset=offset) for offset in (0, 1)]  # head stride of 65
NAMES = [f"offset {x.offset} pad {x.pad[3]} {'rows' if x.order[1] == 2 else 'heads'}" for x in ODD]


@pytest.mark.parametrize("which", ["q", "k", "v", "d_out"])
@pytest.mark.parametrize("layout", ODD, ids=NAMES)
def test_odd_addresses(device: Place, layout: Layout, which: str) -> None:
    plain = case(dense(1, 2, 2, 64, 64, 64, dtype="float16"), 3)
    arrays = {name: stored(array, layout) if name == which else array for name, array in plain.items()}
    assert_right(device.both(arrays), plain)


def test_three_storages_give_the_same_bits(device: Place) -> None:
    plain = case(dense(1, 3, 3, 29, 29, 64, dtype="float16"), 4)
    found = []
    for layout in ("BSHD", "BHSD", "SBHD"):
        arrays = {name: stored(array, layout) for name, array in plain.items()}
        found.append(device.both(arrays, deterministic=True))
    assert_equal_bits(found[0], found[1])
    assert_equal_bits(found[0], found[2])
    assert_right(found[0], plain)


LONE = {"one query and one head": (1, 1, 1, 1, 77), "one query, one key, grouped": (1, 4, 1, 1, 1)}


@pytest.mark.parametrize("stride", [0, 1, 12345, -7])
@pytest.mark.parametrize("extents", LONE.values(), ids=LONE)
def test_strides_of_lone_positions_mean_nothing(device: Place, extents: tuple[int, ...], stride: int) -> None:
    plain = case(dense(*extents, 64), 5)  # type: ignore[arg-type]
    right = device.both(plain, deterministic=True)
    assert_right(right, plain)
    arrays = {}
    for name, array in plain.items():
        strides = [stride * 2 if n == 1 else s for n, s in zip(array.shape, array.strides, strict=True)]
        arrays[name] = restrided(stored(array), strides)
    placed: list[Any] = [{name: device.put(x[name]) for name in "qkv"} for x in (plain, arrays)]
    variants = [device.eager.plan("forward", x, Keywords()).launches[0].variant for x in placed]
    assert variants[0] == variants[1], "a lone position cost the vector loads"
    assert_equal_bits(device.both(arrays, deterministic=True), right)


def test_inputs_stay_and_outputs_are_new_memory(device: Place) -> None:
    """Bytes of every input before and after, with k and v one array; out= on top of an input is refused."""
    arrays = case(dense(1, 2, 2, 32, 32, 64), 6)
    placed = {name: device.put(array) for name, array in arrays.items()}
    placed["v"] = placed["k"]
    before = {name: device.get(array).copy() for name, array in placed.items()}
    inputs = {name: placed[name] for name in "qkv"}
    out, lse = device.eager.forward(inputs, Keywords())
    gradients = device.eager.backward({"d_out": placed["d_out"], **inputs, "out": out, "lse": lse}, Keywords())
    assert all(equal_bits(device.get(placed[name]), before[name]) for name in placed)
    addresses = [address(array) for array in (*placed.values(), out, lse, *gradients)]
    assert len(set(addresses)) == len(addresses) - 1  # k is v, and nothing else coincides
    for name in "qkv":
        with pytest.raises(ArgumentError, match="out"):
            device.eager.forward(inputs, Keywords(), placed[name])


def address(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


@pytest.mark.parametrize(("head_dim", "q_heads", "kv_heads"), [(256, 2, 2), (64, 4, 1)])
def test_slices_of_one_projection(device: Place, head_dim: int, q_heads: int, kv_heads: int) -> None:
    """q, k and v beside each other in the rows of one array: no stride is what the shape suggests."""
    packed = normal((2, 40, q_heads + 2 * kv_heads, head_dim), "bfloat16", 7)
    q, k, v = np.split(packed, [q_heads, q_heads + kv_heads], axis=2)
    d_out = normal((2, q_heads, 40, head_dim), "bfloat16", 8).transpose(0, 2, 1, 3)
    arrays = {"q": q, "k": k, "v": v, "d_out": d_out}
    assert_right(device.both(arrays, causal=True), arrays, causal=True)


def test_q_k_and_v_element_by_element(device: Place) -> None:
    """A projection whose last axis tells q, k and v apart: neighbours lie three elements from each other."""
    packed = normal((1, 40, 2, 64, 3), "float16", 9)
    arrays = {name: packed[..., i] for i, name in enumerate("qkv")} | {"d_out": normal((1, 40, 2, 64), "float16", 10)}
    assert_right(device.both(arrays, causal=True), arrays, causal=True)


def test_values_are_a_slice_of_the_keys(device: Place) -> None:
    """Latent attention: one key head of 192, whose first 128 elements are the values."""
    k = normal((1, 40, 1, 192), "bfloat16", 11)
    arrays = {"q": normal((1, 40, 4, 192), "bfloat16", 12), "k": k, "v": k[..., :128]}
    arrays["d_out"] = normal((1, 40, 4, 128), "bfloat16", 13)
    assert_right(device.both(arrays, causal=True), arrays, causal=True)


def test_a_cache_that_fills_up(device: Place) -> None:
    """The written part of a longer cache, heads before rows, with NaN where nothing has been written yet."""
    cache = {name: nans((2, 2, 96, 64), normal((1,), "bfloat16", 0).dtype) for name in "kv"}
    for length in range(62, 68):
        for seed, rows in enumerate(cache.values()):
            rows[:, :, :length] = normal((2, 2, length, 64), "bfloat16", length + 100 * seed)
        arrays = {name: rows[:, :, :length].transpose(0, 2, 1, 3) for name, rows in cache.items()}
        arrays["q"] = normal((2, 1, 4, 64), "bfloat16", length)
        assert_right(device.forward(arrays, causal=True), arrays, causal=True)
