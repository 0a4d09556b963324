"""JAX's door on the CPU: the kernels on the emulator through the foreign call, and the jax.numpy reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from samples import assert_close, exact, sample

jax = pytest.importorskip("jax")
jnp = jax.numpy

import cuflash  # noqa: E402
from cuflash.interop import jax_reference  # noqa: E402
from cuflash.interop.jax import flash_attention  # noqa: E402

WORDS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "align": "top-left"},
    {"window": (5, 3)},
    {"window": (None, 2), "softcap": 3.0},
    {"causal": True, "align": -9},
    {"scale": -0.3},
    {"window": (2**40, 5)},
]


def put(arrays: dict[str, Any]) -> list[Any]:
    return [jnp.asarray(arrays[name]) for name in "qkv"]


def loss(function: Any, d_out: Any, d_lse: Any) -> Any:
    def scalar(*arrays: Any) -> Any:
        out, lse = function(*arrays)
        return (out.astype(jnp.float32) * d_out).sum() + jnp.where(jnp.isfinite(lse), lse * d_lse, 0).sum()

    return scalar


def check(dtype: str = "float32", **words: Any) -> None:
    """out, lse and the gradients through both, jitted."""
    arrays = sample(dtype)
    out, lse, *_ = exact(arrays, **words)
    d_lse = np.where(np.isfinite(lse), np.random.default_rng(1).standard_normal(lse.shape), 0)
    *_, dq, dk, dv = exact(arrays, d_lse=d_lse, **words)

    def attend(*xs: Any) -> Any:
        return cuflash.flash_attention(*xs, return_lse=True, **words)

    for got, wanted, kind in zip(jax.jit(attend)(*put(arrays)), (out, lse), (dtype, "float32"), strict=True):
        assert_close(got, wanted, kind)
    scalar = loss(attend, jnp.asarray(arrays["d_out"], jnp.float32), jnp.asarray(d_lse, jnp.float32))
    gradients = jax.jit(jax.grad(scalar, (0, 1, 2)))(*put(arrays))
    for got, wanted, name in zip(gradients, (dq, dk, dv), "qkv", strict=True):
        assert got.dtype == arrays[name].dtype
        assert_close(got, wanted, dtype, scale=4)


@pytest.mark.works("JAX", "jit and grad, through out and lse, kernels on the emulator")
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_kernels_on_the_emulator(dtype: str) -> None:
    check(dtype, causal=True)


@pytest.mark.works("JAX", "jit and grad on a machine without a GPU (jax.numpy reference)")
@pytest.mark.parametrize("words", WORDS, ids=str)
def test_reference_without_a_gpu(words: dict[str, Any]) -> None:
    check(**words)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_reference_keeps_the_dtype(dtype: str) -> None:
    check(dtype, causal=True)


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cuflash.flash_attention(*put(sample()), causal=True, return_lse=True)
    monkeypatch.setattr(jax_reference, "_BLOCK_BYTES", 1)
    blocked = jax.jit(partial(flash_attention, causal=True, return_lse=True, reference=True))(*put(sample()))
    for one, other in zip(whole, blocked, strict=True):
        assert_close(one, other)

    def scalar(*xs: Any) -> Any:
        return (flash_attention(*xs, causal=True, reference=True) ** 2).sum()

    blocked_gradients = jax.jit(jax.grad(scalar, (0, 1, 2)))(*put(sample()))
    monkeypatch.undo()
    jax.clear_caches()
    for one, other in zip(jax.jit(jax.grad(scalar, (0, 1, 2)))(*put(sample())), blocked_gradients, strict=True):
        assert_close(one, other)


def test_the_reference_never_holds_all_scores() -> None:
    long = jax.ShapeDtypeStruct((1, 65536, 2, 16), jnp.bfloat16)

    def scalar(q: Any, k: Any, v: Any) -> Any:
        return cuflash.flash_attention(q, k, v, causal=True).astype(jnp.float32).sum()

    compiled = jax.jit(jax.grad(scalar, (0, 1, 2))).lower(long, long, long).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 30  # all scores would take 34 GB


def test_rows_and_keys_nobody_sees() -> None:
    q, k, v = put(sample(shape=(1, 40, 24, 2, 2, 16)))
    k = k.at[:, 20:].set(jnp.nan)
    v = v.at[:, 20:].set(jnp.inf)
    words = {"mask": cuflash.SlidingWindow(None, 3), "align": -20}  # row i sees j <= i - 17: keys up to 22

    def scalar(q: Any, k: Any, v: Any) -> Any:
        out, lse = cuflash.flash_attention(q, k, v, return_lse=True, **words)
        return out.sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    out, lse = cuflash.flash_attention(q[:, :36], k, v, return_lse=True, **words)
    assert not np.asarray(out[:, :17]).any()
    assert np.isneginf(np.asarray(lse[..., :17])).all()
    assert np.isfinite(np.asarray(out)).all()
    for gradient in jax.jit(jax.grad(scalar, (0, 1, 2)))(q[:, :36], k, v):
        assert np.isfinite(np.asarray(gradient)).all()


@pytest.mark.parametrize("shape", [(0, 5, 5, 2, 2, 8), (1, 0, 5, 2, 2, 8), (1, 5, 0, 2, 2, 8), (1, 5, 5, 0, 0, 8)])
def test_empty_axes(shape: tuple[int, ...]) -> None:
    arrays = put(sample(shape=shape))
    out, lse = jax.jit(lambda *xs: cuflash.flash_attention(*xs, causal=True, return_lse=True))(*arrays)
    assert out.shape == arrays[0].shape
    assert not np.asarray(out).any()
    assert np.isneginf(np.asarray(lse)).all()
    jax.grad(lambda *xs: cuflash.flash_attention(*xs).sum(), (0, 1, 2))(*arrays)


@pytest.mark.works("JAX", "gradient of the ALiBi slopes")
def test_slopes_have_a_gradient() -> None:
    q, k, v = put(sample())
    slopes = jnp.asarray([0.1, 0.2, 0.3, 0.4])

    def scalar(function: Any) -> Any:
        return lambda s: (function(q, k, v, alibi_slopes=s, softcap=4.0, causal=True) ** 2).sum()

    got = jax.jit(jax.grad(scalar(cuflash.flash_attention)))(slopes)
    wanted = jax.jit(jax.grad(scalar(partial(flash_attention, reference=True))))(slopes)
    assert_close(got, wanted)
    per_batch = jnp.stack([slopes, 2 * slopes])
    assert jax.eval_shape(jax.grad(scalar(cuflash.flash_attention)), per_batch).shape == (2, 4)


def test_float64_is_refused_under_x64() -> None:
    with jax.enable_x64(True), pytest.raises(TypeError, match=r"q.dtype='float64' must be one of"):
        cuflash.flash_attention(*(jnp.zeros((1, 4, 2, 8), jnp.float64) for _ in "qkv"))


def test_float32_is_exact_under_x64() -> None:
    with jax.enable_x64(True):
        check(causal=True)


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_traced_options_are_refused_by_name(name: str) -> None:
    q, k, v = put(sample())
    with pytest.raises(TypeError, match=f"{name}=.*must be a Python value"):
        jax.jit(lambda x: cuflash.flash_attention(q, k, v, **{name: x}))(1.0)


def test_mistakes_are_named_before_anything_runs() -> None:
    q, k, v = put(sample())
    with pytest.raises(TypeError, match="same array library"):
        cuflash.flash_attention(q, np.asarray(k), v)
    with pytest.raises(TypeError, match=r"k.dtype='float16' must equal q.dtype=float32"):
        cuflash.flash_attention(q, k.astype(jnp.float16), v)
    with pytest.raises(TypeError, match=r"q.dtype='float8_e4m3fn' must be one of float16, bfloat16, float32"):
        cuflash.flash_attention(*(x.astype(jnp.float8_e4m3fn) for x in (q, k, v)))
    with pytest.raises(ValueError, match="immutable"):
        cuflash.flash_attention(q, k, v, out=q)
    with pytest.raises(ValueError, match="num_q_heads=4 must be a multiple of num_kv_heads=3"):
        cuflash.flash_attention(q, jnp.zeros((2, 40, 3, 16)), jnp.zeros((2, 40, 3, 16)))


def test_a_deleted_array_is_refused() -> None:
    q, k, v = put(sample())
    q.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        cuflash.flash_attention(q, k, v)


def test_explain_needs_no_gpu() -> None:
    plan = cuflash.explain(*put(sample("bfloat16")), causal=True)
    assert plan.kind == "forward"
    assert plan.launches


def with_empty_rows() -> tuple[Any, Any, Any]:
    """More queries than keys: under a causal mask the first see none."""
    q, k, v = put(sample())
    return jnp.concatenate([q, q], axis=1), k, v


@pytest.mark.parametrize("cpu", ["reference", "emulator"])
def test_a_program_that_is_debugged(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """debug_nans finds no NaN of ours, not even where rows have no key; without jit the gradients are the same."""
    monkeypatch.setenv("CUFLASH_JAX_CPU", cpu)
    q, k, v = with_empty_rows()

    def scalar(*xs: Any) -> Any:
        out, lse = cuflash.flash_attention(*xs, causal=True, return_lse=True)
        return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    with jax.debug_nans(True):
        wanted = jax.grad(scalar, (0, 1, 2))(q, k, v)
    with jax.disable_jit():
        found = jax.grad(scalar, (0, 1, 2))(q, k, v)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, scale=4)


@pytest.mark.parametrize("cpu", ["reference", "emulator"])
def test_an_empty_rows_lse_has_no_gradient_whatever_comes_back(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """log(exp(lse)) sends 1 / 0 back to rows without keys: q, k and v hear nothing of it."""
    monkeypatch.setenv("CUFLASH_JAX_CPU", cpu)
    q, k, v = with_empty_rows()

    def scalar(*xs: Any) -> Any:
        _, lse = cuflash.flash_attention(*xs, causal=True, return_lse=True)
        return jnp.log(jnp.exp(lse)).sum()

    assert all(jnp.isfinite(x).all() for x in jax.grad(scalar, (0, 1, 2))(q, k, v))
