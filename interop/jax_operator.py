"""Attention as JAX sees it, from the outside in: derivative, batching rule, partitioning rule, platform, foreign call.

custom_vjp      (out, lse) are both differentiable; the gradient is itself a custom_vjp whose derivative goes through
                the jax.numpy reference, so second derivatives exist
custom_vmap     a mapped axis is folded into the batch and the call is planned again: shapes are baked into a plan
custom_partitioning   batch and heads split over a mesh (jax_sharding.py)
platform_dependent    kernels on CUDA; elsewhere the reference, or the emulator on request
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from cuflash.interop import jax_ffi, jax_reference
from cuflash.interop.jax_axes import Axis, automatic, vary, varying_axes
from cuflash.interop.jax_sharding import Heads, partitioned
from cuflash.problem import ArraySpec, Keywords, Problem, spec_of_contiguous

__all__ = ["Question", "attend", "gradients", "problem_of", "spec_of"]

_DIFFERENTIABLE = ("d_out", "d_lse", "q", "k", "v", "alibi_slopes")


class Question(NamedTuple):
    """What is static in a call: part of every cache key here and in JAX."""

    words: Keywords
    cpu: str = "reference"  # what JAX's CPU backend runs


def spec_of(array: Any) -> ArraySpec:
    """XLA hands arrays over C-contiguous and aligned, whatever they were."""
    return spec_of_contiguous(tuple(array.shape), array.dtype.name)


def problem_of(kind: str, words: Keywords, arrays: dict[str, Any]) -> Problem:
    """The checked problem of these arrays or tracers.

    Raises:
        ArgumentError, ArgumentTypeError, UnsupportedError: as ``cuflash.flash_attention``.
    """
    specs = {name: spec_of(array) for name, array in arrays.items()}
    check = Problem.forward if kind == "forward" else Problem.backward
    return check(keywords=words, **specs)


# ---- derivative ------------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(question: Question, q: Any, k: Any, v: Any, slopes: Any) -> tuple[Any, Any]:
    """``(out, lse)``; slopes may be None."""
    return _forward(question, q, k, v, slopes)


def _attend_forward(question: Question, *primals: Any) -> tuple[Any, Any]:
    q, k, v, slopes = (None if x is None else x.value for x in primals)
    wants_slopes = slopes is not None and bool(primals[3].perturbed)
    # attend and not _forward: under a second derivative this line is itself differentiated
    out, lse = attend(question, q, k, v, slopes)
    marker = jnp.zeros((int(wants_slopes), 0))  # static knowledge that must travel as an array
    return (out, lse), (q, k, v, slopes, out, lse, marker)


def _attend_backward(question: Question, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    q, k, v, slopes, out, lse, marker = residuals
    d_out, d_lse = (None if isinstance(c, jax.custom_derivatives.SymbolicZero) else c for c in cotangents)
    if d_out is None and d_lse is None:
        zeros = tuple(jnp.zeros_like(x) for x in (q, k, v))
        return (*zeros, None if slopes is None else jnp.zeros_like(slopes))
    d_out = jnp.zeros_like(out) if d_out is None else d_out
    axes = varying_axes((out,))
    d_out = vary(d_out, axes)
    dq, dk, dv = gradients(question, d_out, d_lse, q, k, v, slopes, out, lse)
    return dq, dk, dv, _slope_gradient(question, marker, d_out, d_lse, q, k, v, slopes)


def _slope_gradient(question: Question, marker: Any, d_out: Any, d_lse: Any, *primals: Any) -> Any:
    """Through the reference, and only if somebody asks; under jit an unused result costs nothing."""
    q, k, v, slopes = primals
    if slopes is None or marker.shape[0] == 0:
        return None if slopes is None else jnp.zeros_like(slopes)
    problem = problem_of("forward", question.words, {"q": q, "k": k, "v": v, "alibi_slopes": slopes})
    axes = tuple((slopes, axis) for axis in range(slopes.ndim))
    d_lse = jnp.zeros(problem.lse_shape, jnp.float32) if d_lse is None else d_lse

    def through_reference(*arrays: Any) -> tuple[Any, ...]:
        return (jax_reference.attention_backward(problem, *arrays)[3],)

    return automatic(through_reference, (d_out, d_lse, *primals), [axes])[0]


attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gradients(
    question: Question, d_out: Any, d_lse: Any, q: Any, k: Any, v: Any, slopes: Any, out: Any, lse: Any
) -> tuple[Any, Any, Any]:
    """``(dq, dk, dv)``; d_lse and slopes may be None."""
    return _backward(question, d_out, d_lse, q, k, v, slopes, out, lse)


def _gradients_forward(question: Question, *primals: Any) -> tuple[Any, Any]:
    return gradients(question, *primals), primals


def _gradients_backward(question: Question, primals: Any, cotangents: Any) -> tuple[Any, ...]:
    _, _, q, k, v, slopes, out, lse = primals
    arrays = {"q": q, "k": k, "v": v} | ({} if slopes is None else {"alibi_slopes": slopes})
    problem = problem_of("forward", question.words, arrays)

    inputs = {name: x for name, x in zip(_DIFFERENTIABLE, primals[:6], strict=True) if x is not None}

    def through_reference(*arrays: Any) -> tuple[Any, ...]:
        pullback = jax.vjp(lambda *xs: _reference_gradients(problem, inputs, xs), *arrays[3:])[1]
        found: tuple[Any, ...] = pullback(arrays[:3])
        return found

    axes = [tuple((x, axis) for axis in range(x.ndim)) for x in inputs.values()]
    found = dict(zip(inputs, automatic(through_reference, (*cotangents, *inputs.values()), axes), strict=True))
    # out and lse are functions of q, k, v and the slopes, whose derivatives are whole already
    return (*map(found.get, _DIFFERENTIABLE), jnp.zeros_like(out), jnp.zeros_like(lse))


def _reference_gradients(problem: Problem, names: Iterable[str], arrays: Sequence[Any]) -> tuple[Any, ...]:
    named = dict.fromkeys(_DIFFERENTIABLE) | dict(zip(names, arrays, strict=True))
    return jax_reference.attention_backward(problem, *(named[name] for name in _DIFFERENTIABLE))[:3]


gradients.defvjp(_gradients_forward, _gradients_backward)


# ---- batching --------------------------------------------------------------------------------------------------------


def _forward(question: Question, q: Any, k: Any, v: Any, slopes: Any) -> tuple[Any, Any]:
    arrays = {"q": q, "k": k, "v": v, "alibi_slopes": slopes}
    out, lse = _run("forward", question, arrays)
    return out, lse


def _backward(question: Question, d_out: Any, d_lse: Any, *rest: Any) -> tuple[Any, Any, Any]:
    q, k, v, slopes, out, lse = rest
    arrays = {"d_out": d_out, "q": q, "k": k, "v": v, "out": out, "lse": lse, "d_lse": d_lse, "alibi_slopes": slopes}
    dq, dk, dv = _run("backward", question, arrays)
    return dq, dk, dv


def _run(kind: str, question: Question, arrays: dict[str, Any]) -> tuple[Any, ...]:
    given = {name: x for name, x in arrays.items() if x is not None}
    problem_of(kind, question.words, given)
    operator = _foldable(kind, question, tuple(given))
    found: tuple[Any, ...] = automatic(operator, tuple(given.values()), _axes(kind, given))
    return found


def _axes(kind: str, given: dict[str, Any]) -> list[tuple[Axis | None, ...]]:
    """Whose sharding each axis of each result takes on a mesh with explicit axes."""
    q, k, v = (given[name] for name in "qkv")
    if kind == "forward":
        return [((q, 0), (q, 1), (q, 2), None), ((q, 0), (q, 2), (q, 1))]
    return [tuple((x, axis) for axis in range(4)) for x in (q, k, v)]


@cache
def _foldable(kind: str, question: Question, names: tuple[str, ...]) -> Callable[..., tuple[Any, ...]]:
    """The operator on these operands, with its batching rule. Jitted, so that an eager call is one dispatch."""

    @custom_vmap
    def operator(*arrays: Any) -> tuple[Any, ...]:
        return _splittable(kind, question, names, arrays)(*arrays)

    @operator.def_vmap
    def rule(size: int, mapped: Sequence[bool], *arrays: Any) -> tuple[Any, Any]:
        batch = arrays[names.index("q")].shape[1 if mapped[names.index("q")] else 0]
        folded = [_fold(x, size, on, batch, n) for x, on, n in zip(arrays, mapped, names, strict=True)]
        results = operator(*folded)
        return tuple(x.reshape(size, batch, *x.shape[1:]) for x in results), (True,) * len(results)

    return jax.jit(operator)


def _fold(array: Any, size: int, mapped: bool, batch: int, name: str) -> Any:
    """[size, batch, ...] -> [size * batch, ...]; what lacks the mapped axis is repeated, slopes [heads] are kept."""
    rank = array.ndim - mapped
    if name == "alibi_slopes" and rank == 1:
        if not mapped:
            return array
        array = jnp.broadcast_to(array[:, None], (size, batch, array.shape[1]))
    elif not mapped:
        array = jnp.broadcast_to(array[None], (size, *array.shape))
    return array.reshape(size * batch, *array.shape[2:])


# ---- partitioning and platform ---------------------------------------------------------------------------------------


def _splittable(
    kind: str, question: Question, names: tuple[str, ...], arrays: Sequence[Any]
) -> Callable[..., tuple[Any, ...]]:
    shapes = dict(zip(names, (array.shape for array in arrays), strict=True))
    heads = Heads(shapes["q"][2], shapes["k"][2])
    return _partitioned(kind, question, names, heads, len(shapes.get("alibi_slopes", (0,))))


@cache
def _partitioned(
    kind: str, question: Question, names: tuple[str, ...], heads: Heads, slopes_rank: int
) -> Callable[..., tuple[Any, ...]]:
    function = partial(_on_platform, kind, question, names)
    return partitioned(function, names, jax_ffi.RESULTS[kind], heads, slopes_rank)


def _on_platform(kind: str, question: Question, names: tuple[str, ...], *arrays: Any) -> tuple[Any, ...]:
    axes = varying_axes(arrays)
    arrays = tuple(vary(array, axes) for array in arrays)
    named = dict(zip(names, arrays, strict=True))
    problem = problem_of(kind, question.words, named)

    def kernels(*arrays: Any, platform: str = "cuda") -> tuple[Any, ...]:
        return jax_ffi.call(kind, problem, dict(zip(names, arrays, strict=True)), platform)

    branches: dict[str, Any] = {"cuda": kernels, "default": partial(_fallback, kind, question, names)}
    if question.cpu == "emulator":
        branches["cpu"] = partial(kernels, platform="cpu")
    found: tuple[Any, ...] = lax.platform_dependent(*arrays, **branches)
    return found


def _fallback(kind: str, question: Question, names: tuple[str, ...], *arrays: Any) -> tuple[Any, ...]:
    named = dict(zip(names, arrays, strict=True))
    slopes = named.get("alibi_slopes")
    inputs = {"q": named["q"], "k": named["k"], "v": named["v"]}
    problem = problem_of("forward", question.words, inputs if slopes is None else {**inputs, "alibi_slopes": slopes})
    if kind == "forward":
        return jax_reference.attention(problem, *inputs.values(), slopes)
    return jax_reference.attention_backward(problem, named["d_out"], named.get("d_lse"), *inputs.values(), slopes)[:3]
