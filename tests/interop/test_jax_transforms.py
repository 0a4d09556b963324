"""Every transformation of JAX over the door, against the same transformation of the reference."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import assert_close, sample

jax = pytest.importorskip("jax")
jnp = jax.numpy

import cuflash  # noqa: E402
from cuflash.interop.jax import flash_attention  # noqa: E402

attend = partial(cuflash.flash_attention, causal=True)
reference = partial(flash_attention, causal=True, reference=True)
SHAPE = (2, 17, 23, 4, 2, 8)


def put() -> list[Any]:
    arrays = sample(shape=SHAPE)
    return [jnp.asarray(arrays[name]) for name in "qkv"]


def squared(function: Any) -> Any:
    return lambda *xs: (function(*xs) ** 2).sum()


def assert_same(found: Any, wanted: Any, scale: float = 16) -> None:
    jax.tree.map(lambda one, other: assert_close(one, other, scale=scale), found, wanted)


@pytest.mark.works("JAX", "vmap over any arguments, nested")
@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, 0), (2, 0, None), (0, 0, 0)], ids=str)
def test_vmap(axes: tuple[int | None, ...]) -> None:
    arrays = [x if a is None else jnp.stack([x, 2 * x, 3 * x], a) for x, a in zip(put(), axes, strict=True)]
    assert_same(jax.vmap(attend, axes)(*arrays), jax.jit(jax.vmap(reference, axes))(*arrays))


@pytest.mark.works("JAX", "vmap of grad, grad of vmap, jacobian")
def test_vmap_of_grad_nested() -> None:
    q, k, v = put()
    stack = jnp.stack([jnp.stack([q, 2 * q, 3 * q])] * 2, 1)
    outer = [
        jax.jit(jax.vmap(jax.vmap(jax.grad(squared(f), (0, 1, 2)), (0, None, None)), (1, None, None)))
        for f in (attend, reference)
    ]
    assert_same(*(f(stack, k, v) for f in outer))


def test_grad_of_vmap_along_another_axis() -> None:
    q, k, v = put()
    stack = jnp.stack([q, 2 * q], 2)

    def scalar(f: Any) -> Any:
        return lambda q: (jax.vmap(f, (2, None, None), 2)(q, k, v) ** 2).sum()

    assert_same(jax.jit(jax.grad(scalar(attend)))(stack), jax.jit(jax.grad(scalar(reference)))(stack))


def test_jacobian() -> None:
    q, k, v = (x[:1, :3, :2] for x in put())
    assert_same(jax.jit(jax.jacrev(attend))(q, k, v), jax.jit(jax.jacrev(reference))(q, k, v))


def test_vmap_over_nothing() -> None:
    q, k, v = put()
    assert jax.vmap(attend, (0, None, None))(jnp.zeros((0, *q.shape)), k, v).shape == (0, *q.shape)


@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
@pytest.mark.parametrize("mapped", [True, False])
def test_vmap_with_slopes(shape: tuple[int, ...], mapped: bool) -> None:
    q, k, v = put()
    slopes = jnp.linspace(0.1, 0.8, int(np.prod(shape))).reshape(shape)
    given = jnp.stack([slopes, 2 * slopes]) if mapped else slopes
    axes = (0, 0 if mapped else None)
    found = [
        jax.jit(jax.vmap(lambda q, s, f=f: f(q, k, v, alibi_slopes=s), axes))(jnp.stack([q, 2 * q]), given)
        for f in (attend, reference)
    ]
    assert_same(*found)


@pytest.mark.works("JAX", "scan with rematerialisation")
def test_scan_and_checkpoint() -> None:
    q, k, _ = put()

    def scalar(f: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            return jax.checkpoint(f)(carry, k, k), None

        return lambda q: (jax.lax.scan(step, q, None, length=3)[0] ** 2).sum()

    assert_same(jax.jit(jax.grad(scalar(attend)))(q), jax.jit(jax.grad(scalar(reference)))(q))


@pytest.mark.works("JAX", "second derivatives (through the reference)")
def test_double_backward() -> None:
    def scalar(f: Any) -> Any:
        return lambda q, k, v: (jax.grad(squared(f))(q, k, v) ** 2).sum()

    found = jax.jit(jax.grad(scalar(attend), (0, 1, 2)))(*put())
    assert_same(found, jax.jit(jax.grad(scalar(reference), (0, 1, 2)))(*put()), scale=64)


@pytest.mark.works("JAX", "jvp, hessian: with reference=True")
def test_forward_mode_goes_through_the_reference() -> None:
    q, k, v = put()
    _, tangent = jax.jvp(lambda q: reference(q, k, v), (q,), (jnp.ones_like(q),))
    small = 1e-3
    difference = (reference(q + small, k, v) - reference(q - small, k, v)) / (2 * small)
    assert_close(tangent, difference, scale=1e4)
    with pytest.raises(TypeError, match="jvp"):
        jax.jvp(lambda q: attend(q, k, v), (q,), (q,))


@pytest.mark.works("JAX", "custom lowering for a GPU from a machine without one")
def test_the_same_program_lowers_for_cuda() -> None:
    text = jax.jit(attend).trace(*put()).lower(lowering_platforms=("cuda",)).as_text()
    assert "cuflash_plan" in text
    assert "cuflash_plan" not in jax.jit(attend).lower(*put()).as_text()


@pytest.mark.works("JAX", "AOT compilation and jax.export")
def test_export_round_trip() -> None:
    export = pytest.importorskip("jax.export")
    pytest.importorskip("flatbuffers")
    allowed = [export.DisabledSafetyCheck.custom_call("cuflash_plan")]
    exported = export.export(jax.jit(attend), disabled_checks=allowed, platforms=("cpu", "cuda"))(*put())
    again = export.deserialize(exported.serialize())
    assert_same(again.call(*put()), reference(*put()))
    compiled = jax.jit(attend).lower(*put()).compile()
    assert_same(compiled(*put()), reference(*put()))


@pytest.mark.works("JAX", "persistent compilation cache")
@pytest.mark.usefixtures("emulated")
def test_the_persistent_cache_keeps_programs_with_our_call(tmp_path: Path) -> None:
    from jax.experimental.compilation_cache import compilation_cache

    settings = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in settings}
    compilation_cache.reset_cache()
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        arrays = [jnp.asarray(x) for x in (sample()[n] for n in "qkv")]
        jax.jit(lambda *xs: 3 * attend(*xs))(*arrays).block_until_ready()
        assert any("lambda" in entry.name for entry in tmp_path.iterdir())
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_an_eager_call_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside every transformation a second call is one dispatch: a trace takes half a millisecond."""
    from cuflash.interop import jax_operator

    traced: list[str] = []
    original = jax_operator.problem_of
    monkeypatch.setattr(jax_operator, "problem_of", lambda kind, *rest: traced.append(kind) or original(kind, *rest))
    arrays = [x[:, :13] for x in put()]
    first = attend(*arrays)
    assert traced
    traced.clear()
    assert np.array_equal(attend(*arrays), first)
    assert not traced


@pytest.mark.works("JAX", "donated inputs")
def test_donation() -> None:
    q, k, v = put()
    wanted = reference(q, k, v)
    assert_same(jax.jit(attend, donate_argnums=0)(q + 0, k, v), wanted)


@pytest.mark.usefixtures("emulated")
def test_inputs_are_never_written() -> None:
    arrays = [jnp.asarray(sample()[name]) for name in "qkv"]
    before = [np.array(x) for x in arrays]
    out, pullback = jax.vjp(attend, *arrays)
    pullback(jnp.ones_like(out))
    jax.block_until_ready(out)
    assert all((np.asarray(x) == y).all() for x, y in zip(arrays, before, strict=True))


def test_unused_gradients_cost_nothing() -> None:
    q, k, v = put()
    slopes = jnp.asarray([0.1, 0.2, 0.3, 0.4])
    text = jax.jit(jax.grad(lambda q: attend(q, k, v, alibi_slopes=slopes).sum())).trace(q)
    lowered = text.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("stablehlo.exponential") == 0, "the slopes' gradient was computed though nobody asked"
