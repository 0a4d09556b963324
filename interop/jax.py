"""JAX's door: the same functions on jax arrays, under jit, grad, vmap, scan, remat, shard_map and plain sharded jit.

On CUDA the kernels run through one foreign call; on other backends the same program runs a memory-linear reference in
jax.numpy (or, with CUFLASH_JAX_CPU=emulator, the kernels on the emulator). ``reference=True`` asks for the reference
everywhere: it can be differentiated in either mode any number of times.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from cuflash.eager import Gradients
from cuflash.errors import ArgumentError, ArgumentTypeError
from cuflash.interop import jax_ffi
from cuflash.interop.chunk import attention_chunk
from cuflash.interop.jax_axes import vary_alike
from cuflash.interop.jax_dot_product import dot_product_attention
from cuflash.interop.jax_operator import Question, attend, gradients, problem_of
from cuflash.merge import merge_states
from cuflash.plan import Plan
from cuflash.specs import Keywords, settled

__all__ = ["attention_chunk", "door", "dot_product_attention", "flash_attention", "merge_states"]


class JaxDoor:
    """What ``cuflash.flash_attention`` opens for jax arrays and tracers."""

    def forward(self, inputs: dict[str, Any], words: Keywords, out: Any = None) -> tuple[Any, Any]:
        """``(out, lse)``."""
        if out is not None:
            raise ArgumentError("out", "a jax.Array", "cannot be written: jax arrays are immutable", "use the result")
        return run_forward(inputs, words)

    def backward(self, inputs: dict[str, Any], words: Keywords) -> Gradients:
        """The gradients, for code that differentiates by hand; ``jax.grad`` needs no call of this."""
        words = check_static(words)
        problem_of("backward", words, inputs)
        names = ("d_out", "d_lse", "q", "k", "v", "alibi_slopes", "out", "lse")
        arrays = vary_alike([inputs.get(name) for name in names])
        return Gradients(*gradients(Question(words, jax_ffi.cpu_mode()), *arrays))

    def explain(self, inputs: dict[str, Any], words: Keywords, backward: bool) -> Plan:
        """The plan for JAX's first GPU, or for the one that CUFLASH_JAX_CAPABILITY names."""
        words = check_static(words)
        problem = problem_of("forward", words, inputs)
        if backward:
            likes = {"d_out": problem.out_shape, "out": problem.out_shape}
            extra = {n: jax.ShapeDtypeStruct(shape, problem.dtype.numpy) for n, shape in likes.items()}
            extra["lse"] = jax.ShapeDtypeStruct(problem.lse_shape, jnp.float32)
            problem = problem_of("backward", words, {**inputs, **extra})
        return jax_ffi.make_plan("backward" if backward else "forward", problem, jax_ffi.gpu_device())[0]


door = JaxDoor()
_jitted = jax.jit(attend, static_argnums=0)  # outside every transformation: one dispatch instead of a trace a call


def run_forward(inputs: dict[str, Any], words: Keywords, reference: bool = False) -> tuple[Any, Any]:
    """``(out, lse)`` of checked inputs q, k, v and perhaps alibi_slopes."""
    words = check_static(words)
    arrays = (*(inputs[name] for name in "qkv"), inputs.get("alibi_slopes"))
    if not reference and not any(isinstance(x, jax.core.Tracer) for x in arrays):
        out, lse = _jitted(Question(words, jax_ffi.cpu_mode()), *arrays)
        return out, lse
    problem = problem_of("forward", words, inputs)
    if reference:  # without custom_vjp, which has no forward mode
        from cuflash.interop.jax_reference import attention

        return attention(problem, *arrays)
    arrays = vary_alike(arrays)
    out, lse = attend(Question(words, jax_ffi.cpu_mode()), *arrays)
    return out, lse


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    mask: Any = None,
    score: Any = None,
    align: str = "bottom-right",
    deterministic: bool = False,
    return_lse: bool = False,
    reference: bool = False,
) -> Any:
    """``cuflash.flash_attention`` on jax arrays; anything ``jax.numpy.asarray`` takes.

    Args:
        q, k, v: [batch, seqlen, heads, head_dim] as in ``cuflash.flash_attention``.
        reference: True runs the jax.numpy reference, which also has jvp and derivatives of any order.

    Returns:
        out, or (out, lse); both differentiable.

    Raises:
        As ``cuflash.flash_attention``; a traced scale, window or softcap is refused by name.
    """
    words = Keywords(scale, causal, window, softcap, mask, score, align, deterministic)
    inputs = {"q": jnp.asarray(q), "k": jnp.asarray(k), "v": jnp.asarray(v)}
    if alibi_slopes is not None:
        inputs["alibi_slopes"] = jnp.asarray(alibi_slopes)
    out, lse = run_forward(inputs, words, reference)
    return (out, lse) if return_lse else out


def check_static(words: Keywords) -> Keywords:
    """The options as plain values; refuses traced ones, as a plan is made of their values.

    Raises:
        ArgumentError, ArgumentTypeError: names the option.
    """
    try:
        return _check_static(*words)
    except TypeError:  # unhashable, as traced values are
        return _check_static.__wrapped__(*words)


@lru_cache(maxsize=1024, typed=True)  # True equals 1, and is another option
def _check_static(*options: Any) -> Keywords:
    words = Keywords(*options)
    for name, value in words._asdict().items():
        parts = value if isinstance(value, (tuple, list)) else (value,)
        if any(isinstance(part, jax.Array) for part in parts) or any(isinstance(p, jax.core.Tracer) for p in parts):
            remedy = "multiply q by it and pass scale=1.0" if name == "scale" else "mark it static (static_argnames)"
            raise ArgumentTypeError(name, "a jax array", "must be a Python value: it is part of the plan", remedy)
    return settled(words)
