"""NumPy arrays, other DLPack producers, and chunks of a longer sequence in every library."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from samples import assert_close, exact, sample

import cuflash
from cuflash.errors import ArgumentError, ArgumentTypeError
from cuflash.interop import numpy as numpy_door
from cuflash.interop.chunk import attention_chunk
from cuflash.interop.dlpack import from_dlpack, to_like

WORDS = {"causal": True}


@pytest.mark.works("NumPy", "forward and backward, on the GPU or else on the emulator")
@pytest.mark.usefixtures("emulated")
def test_numpy_in_numpy_out() -> None:
    arrays = sample()
    q, k, v = (arrays[name] for name in "qkv")
    (out, lse), pullback = cuflash.flash_attention_vjp(q, k, v, **WORDS)
    found = (out, lse, *pullback(arrays["d_out"]))
    for got, wanted in zip(found, exact(arrays, **WORDS), strict=True):
        assert isinstance(got, np.ndarray)
        assert got.flags.writeable
        assert_close(got, wanted, scale=4)


@pytest.mark.usefixtures("emulated")
def test_read_only_inputs_and_outputs() -> None:
    q, k, v = (sample()[name] for name in "qkv")
    for x in (q, k, v):
        x.flags.writeable = False
    out = np.zeros_like(q)
    assert cuflash.flash_attention(q, k, v, out=out, **WORDS) is out
    assert out.any()
    out.flags.writeable = False
    with pytest.raises(ArgumentError, match="writable"):
        cuflash.flash_attention(q, k, v, out=out)


def test_the_emulator_is_announced_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(numpy_door, "why_no_gpu", lambda: "none here")
    monkeypatch.delenv("CUFLASH_NUMPY", raising=False)
    numpy_door._place.cache_clear()
    with caplog.at_level(logging.WARNING, "cuflash"):
        assert [numpy_door._place() for _ in range(3)] == ["emulator"] * 3
    assert len(caplog.messages) == 1
    assert "emulator" in caplog.messages[0]


def test_an_unknown_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_NUMPY", "tpu")
    numpy_door._place.cache_clear()
    with pytest.raises(ArgumentError, match="CUFLASH_NUMPY='tpu'"):
        cuflash.flash_attention(*(sample()[name] for name in "qkv"))


class Exchangeable:
    """An array of a library that cuflash has never heard of."""

    def __init__(self, array: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.array, self.place = array, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place

    def __dlpack__(self, **words: Any) -> Any:
        return self.array.__dlpack__(**words)


@pytest.mark.works("DLPack", "any producer: forward, result in its own library where that imports DLPack")
@pytest.mark.usefixtures("emulated")
def test_unknown_libraries_come_in_by_dlpack(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = sample()
    given = [Exchangeable(arrays[name]) for name in "qkv"]
    out = cuflash.flash_attention(*given, **WORDS)
    assert isinstance(out, np.ndarray)
    assert_close(out, exact(arrays, **WORDS)[0])
    monkeypatch.setattr(sys.modules[__name__], "from_dlpack", lambda x: Exchangeable(np.from_dlpack(x)))
    wrapped = to_like(given[0], out)
    assert isinstance(wrapped, Exchangeable)


@pytest.mark.works("DLPack", "warp's arrays, and results in warp")
@pytest.mark.usefixtures("emulated")
def test_arrays_of_warp() -> None:
    warp = pytest.importorskip("warp")
    arrays = sample("float32")
    given = [warp.from_numpy(arrays[name], dtype=warp.float32, device="cpu") for name in "qkv"]
    (out, lse), pullback = cuflash.flash_attention_vjp(*given, **WORDS)
    gradients = pullback(warp.from_numpy(arrays["d_out"], dtype=warp.float32, device="cpu"))
    for got, wanted in zip((out, lse, *gradients), exact(arrays, **WORDS), strict=True):
        assert type(got) is type(given[0])
        assert_close(got.numpy(), wanted, "float32", scale=4)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("wrap", [True, False])
def test_gradients_for_a_library_that_imports_no_dlpack(wrap: bool) -> None:
    """Its results are NumPy's arrays: the pullback takes those back, beside inputs of the library's own."""
    arrays = sample()
    q, k, v = (Exchangeable(arrays[name]) for name in "qkv")
    (out, lse), pullback = cuflash.flash_attention_vjp(q, k, v, **WORDS)
    d_out = Exchangeable(arrays["d_out"]) if wrap else arrays["d_out"]
    for got, wanted in zip((out, lse, *pullback(d_out, np.zeros_like(lse))), exact(arrays, **WORDS), strict=True):
        assert_close(got, wanted, scale=4)
    with pytest.raises(ArgumentTypeError, match="same array library"):
        cuflash.flash_attention(q, arrays["k"], v)


def test_devices_without_a_door_are_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="DLPack device type 10"):
        from_dlpack("q", Exchangeable(np.zeros(3, np.float32), (10, 0)))


@pytest.mark.parametrize(
    "error", [BufferError, ValueError, AttributeError, NotImplementedError], ids=lambda x: x.__name__
)
def test_a_producer_that_refuses_is_named(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries differ in what they raise, for a tensor with a gradient for instance; the error names the argument."""

    def refuse(_: Any, **words: Any) -> Any:
        raise error("not this one")

    monkeypatch.setattr(Exchangeable, "__dlpack__", refuse)
    with pytest.raises(ArgumentTypeError, match=r"k='Exchangeable' cannot be exchanged .*not this one"):
        from_dlpack("k", Exchangeable(np.zeros(3, np.float32)))


def test_gpu_arrays_without_cupy_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    older = type("Older", (), {"__cuda_array_interface__": {}})()
    for array in (Exchangeable(np.zeros(3, np.float32), (2, 0)), older):
        with pytest.raises(ArgumentTypeError, match=r"v='.*' cannot be exchanged .*cupy"):
            from_dlpack("v", array)


@pytest.mark.usefixtures("emulated")
def test_producers_of_empty_and_strided_arrays() -> None:
    """No keys (an empty cache), and rows that run backwards, two apart."""
    arrays = sample()
    for cut in (slice(0, 0), slice(None, None, -2)):
        k, v = (arrays[name][:, cut] for name in "kv")
        out = cuflash.flash_attention(*map(Exchangeable, (arrays["q"], k, v)), **WORDS)
        assert_close(out, exact({**arrays, "k": k, "v": v}, **WORDS)[0])


def test_things_that_are_no_arrays_are_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="must be an array"):
        cuflash.flash_attention([1.0], [1.0], [1.0])


def test_no_framework_is_imported_unasked() -> None:
    code = (
        "import sys, numpy as np, os; os.environ['CUFLASH_NUMPY'] = 'emulator'; import cuflash\n"
        "try: cuflash.flash_attention(np.zeros(3), np.zeros(3), np.zeros(3))\n"
        "except Exception: pass\n"
        "assert not {'jax', 'torch', 'cupy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def pieces(library: str) -> tuple[Any, list[Any], Any]:
    arrays = sample()
    if library == "jax":
        make = pytest.importorskip("jax.numpy").asarray
    elif library == "torch":
        make = pytest.importorskip("torch").from_numpy
    else:
        make = np.asarray
    return arrays, [make(arrays[name]) for name in "qkv"], np.asarray


@pytest.mark.works("JAX", "attention_chunk and merge_states")
@pytest.mark.works("torch", "attention_chunk and merge_states")
@pytest.mark.works("NumPy", "attention_chunk and merge_states")
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("library", ["numpy", "jax", "torch"])
def test_chunks_of_keys_join_to_the_whole(library: str) -> None:
    arrays, (q, k, v), host = pieces(library)
    words = {"causal": True, "q_offset": 7}  # bottom-right for 33 queries and 40 keys
    first = attention_chunk(q, k[:, :24], v[:, :24], **words)
    second = attention_chunk(q, k[:, 24:], v[:, 24:], **words, k_offset=24)
    out, lse = cuflash.merge_states(*first, *second)
    assert np.isneginf(host(second[1])[..., :17]).all()  # these rows see nothing of the second chunk
    for got, wanted in zip((out, lse), exact(arrays, causal=True), strict=False):
        assert_close(host(got), wanted)


def test_jax_chunks_are_differentiable() -> None:
    jax = pytest.importorskip("jax")
    arrays, (q, k, v), _ = pieces("jax")

    def scalar(q: Any, k: Any, v: Any) -> Any:
        words = {"causal": True, "q_offset": 7}
        first = attention_chunk(q, k[:, :24], v[:, :24], **words)
        second = attention_chunk(q, k[:, 24:], v[:, 24:], **words, k_offset=24)
        return (cuflash.merge_states(*first, *second)[0] * arrays["d_out"]).sum()

    for got, wanted in zip(jax.jit(jax.grad(scalar, (0, 1, 2)))(q, k, v), exact(arrays, causal=True)[2:], strict=True):
        assert_close(got, wanted, scale=4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_the_chunks_dtype_is_chosen(dtype: str) -> None:
    jnp = pytest.importorskip("jax.numpy")
    _, (q, k, v), _ = pieces("jax")
    out, lse = attention_chunk(*(x.astype(jnp.bfloat16) for x in (q, k, v)), out_dtype=getattr(jnp, dtype))
    assert out.dtype == dtype
    assert lse.dtype == jnp.float32


def test_traced_offsets_are_refused() -> None:
    jax = pytest.importorskip("jax")
    _, (q, k, v), _ = pieces("jax")
    with pytest.raises(ArgumentTypeError, match=r"q_offset=.*must be a Python int"):
        jax.jit(lambda n: attention_chunk(q, k, v, q_offset=n))(3)
