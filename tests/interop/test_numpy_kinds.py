"""NumPy arrays that mean more than their bytes, or lie where no element can: refused by name, never misread."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from samples import sample

import cuflash
from cuflash.errors import ArgumentError, ArgumentTypeError

NAMES = ("q", "k", "v", "d_out", "out", "lse", "d_lse", "alibi_slopes")


def everything(dtype: str = "float16") -> dict[str, Any]:
    """What a backward call takes, out and lse included."""
    arrays = {
        name: np.ascontiguousarray(x) for name, x in sample(dtype=dtype).items() if name in ("q", "k", "v", "d_out")
    }
    heads = arrays["q"].shape[2]
    arrays["alibi_slopes"] = np.linspace(0, 0.5, heads, dtype=np.float32)
    out, lse = forward(arrays)
    return {**arrays, "out": out, "lse": lse, "d_lse": np.ones_like(lse)}


def forward(arrays: dict[str, Any], **words: Any) -> Any:
    given = (arrays[name] for name in "qkv")
    return cuflash.flash_attention(*given, alibi_slopes=arrays["alibi_slopes"], return_lse=True, **words)


def backward(arrays: dict[str, Any]) -> Any:
    given = (arrays[name] for name in ("d_out", "q", "k", "v", "out", "lse"))
    return cuflash.flash_attention_backward(*given, d_lse=arrays["d_lse"], alibi_slopes=arrays["alibi_slopes"])


def other_bytes(array: Any) -> Any:
    return array.astype(array.dtype.newbyteorder())


def hidden(array: Any) -> Any:
    return np.ma.masked_array(array, mask=array > 0)


def odd_address(array: Any) -> Any:
    storage = np.zeros(array.nbytes + 32, np.uint8)
    start = -storage.ctypes.data % 16 + 1
    view: Any = np.ndarray(array.shape, array.dtype, storage.data, start)
    view[...] = array
    return view


def between_elements(array: Any) -> Any:
    packed = np.zeros(array.shape, np.dtype([("tag", "u1"), ("value", array.dtype)], align=False))
    packed["value"] = array
    return packed["value"]


def scalar(array: Any) -> Any:
    return array.dtype.type(1)


KINDS = (other_bytes, hidden, odd_address, between_elements, scalar)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_arrays_that_kernels_would_misread_are_refused(name: str, kind: Any) -> None:
    arrays = everything()
    if kind is between_elements and name in ("lse", "d_lse", "alibi_slopes"):
        backward({**arrays, name: kind(arrays[name])})  # copied before a kernel sees them
        return
    changed = {**arrays, name: kind(arrays[name])}
    with pytest.raises((ArgumentError, ArgumentTypeError), match=name):
        backward(changed)
    if name in ("q", "k", "v", "alibi_slopes"):
        with pytest.raises((ArgumentError, ArgumentTypeError), match=name):
            forward(changed)
    if name == "out":
        with pytest.raises((ArgumentError, ArgumentTypeError), match="out"):
            forward(arrays, out=changed["out"])


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("rank", [1, 2])
def test_slopes_of_any_strides(rank: int) -> None:
    """They are small: one copy, where their heads do not lie side by side."""
    arrays = everything()
    batch, heads = arrays["q"].shape[0], arrays["q"].shape[2]
    values = np.linspace(0.1, 0.5, batch * heads, dtype=np.float32).reshape(batch, heads)[: batch if rank == 2 else 1]
    values = values if rank == 2 else values[0]
    wanted = forward({**arrays, "alibi_slopes": values})
    wide = np.repeat(values, 2, axis=-1)[..., ::2]
    for view in (values[..., ::-1].copy()[..., ::-1], wide, np.asfortranarray(values)):
        found = forward({**arrays, "alibi_slopes": view})
        assert all(x.tobytes() == y.tobytes() for x, y in zip(found, wanted, strict=True))
        cuflash.explain(arrays["q"], arrays["k"], arrays["v"], alibi_slopes=view)
    same = np.full(values.shape, 0.25, np.float32)
    found = forward({**arrays, "alibi_slopes": np.broadcast_to(np.float32(0.25), values.shape)})
    assert found[0].tobytes() == forward({**arrays, "alibi_slopes": same})[0].tobytes()


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("empty", ["batch", "q", "k"])
def test_slopes_beside_empty_arrays(empty: str) -> None:
    q, k = np.ones((2, 3, 4, 8), np.float16), np.ones((2, 5, 2, 8), np.float16)
    q = q[:0] if empty == "batch" else q[:, :0] if empty == "q" else q
    k = k[:0] if empty == "batch" else k[:, :0] if empty == "k" else k
    for slopes in (np.ones(4, np.float32), np.ones((q.shape[0], 4), np.float32)):
        (out, lse), pullback = cuflash.flash_attention_vjp(q, k, k, alibi_slopes=slopes)
        assert out.shape == q.shape
        assert lse.shape == (q.shape[0], 4, q.shape[1])
        assert not any(x.any() for x in pullback(np.ones_like(out)))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("empty", [False, True])
def test_nothing_keeps_the_inputs_alive(empty: bool) -> None:
    """Plans are cached by what they depend on, never with an array; what a pullback holds goes with it."""

    class Watched(np.ndarray[Any, Any]):
        """An array that can be watched."""

    q, k, v, d_out = (sample()[name][: 0 if empty else None].view(Watched) for name in ("q", "k", "v", "d_out"))
    watched = [weakref.ref(x) for x in (q, k, v, d_out)]
    result, pullback = cuflash.flash_attention_vjp(q, k, v)
    gradients = pullback(d_out)
    del q, k, v, d_out, result, pullback
    gc.collect()
    assert [reference() for reference in watched] == [None] * 4
    assert len(gradients) == 3
