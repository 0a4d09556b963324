"""The two operators torch knows: cuflash::forward and cuflash::backward, with fakes, autograd and batching rules.

Defined through ``torch.library.Library``, which costs a third of the ``custom_op`` decorator on every call. Options
travel as text, for an operator's schema takes no Python objects and a compiled graph may outlive the process.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from cuflash import masks, scores
from cuflash.eager import Gradients
from cuflash.errors import ArgumentError, UnsupportedError
from cuflash.interop.torch_backend import as_numpy, as_torch, cuda_eager, host_eager, needs_no_operator
from cuflash.specs import Keywords, settled

__all__ = [
    "backward_kernels",
    "differentiate",
    "fold",
    "forward_into",
    "forward_kernels",
    "options_of",
    "refuse_second_order",
    "remember",
    "unfold",
    "words_of",
]

_library = torch.library.Library("cuflash", "DEF")
_library.define("forward(Tensor q, Tensor k, Tensor v, Tensor? alibi_slopes, str options) -> (Tensor, Tensor)")
_library.define(
    "backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? d_lse, "
    "Tensor? alibi_slopes, str options) -> (Tensor, Tensor, Tensor)"
)
_CLASSES: tuple[type, ...] = (Keywords, *masks.MASKS, *scores.SCORES)
_NAMES: dict[str, Any] = {cls.__name__: cls for cls in _CLASSES} | {"__builtins__": {}}
_texts: dict[tuple[Any, ...], str] = {}
_BACKWARD = ("d_out", "q", "k", "v", "out", "lse", "d_lse", "alibi_slopes")


def options_of(words: Keywords) -> str:
    """Keywords as text that says everything."""
    return _text_of(*words)


@torch.compiler.assume_constant_result  # options are static in a compiled graph
def _text_of(*words: Any) -> str:
    key = (*words, *map(type, words))  # True equals 1, and their texts differ
    try:
        text = _texts.get(key)
    except TypeError:  # an option that cannot be hashed, such as an array
        text, key = None, ()
    if text is None:
        text = repr(settled(Keywords(*words)))
        words_of(text)
        if key:
            _texts[key] = text
    return text


@lru_cache(maxsize=1024)
def words_of(text: str) -> Keywords:
    """The inverse of ``options_of``; only cuflash's own class names mean something in the text.

    Raises:
        UnsupportedError: a mask or score class of the caller's own.
    """
    try:
        words: Keywords = eval(text, dict(_NAMES))
    except NameError as error:
        raise UnsupportedError("options", text, f"names a class that torch operators do not carry ({error})") from error
    return words


def forward_into(out: Any, q: Any, k: Any, v: Any, slopes: Any, words: Keywords) -> tuple[Any, Any]:
    """``(out, lse)`` written into ``out``; outside autograd, as torch's own ``out=`` arguments are."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (out, q, k, v)):
        raise ArgumentError("out", "a tensor", "cannot be written under autograd", "call it inside torch.no_grad()")
    inputs = {"q": q, "k": k, "v": v} | ({} if slopes is None else {"alibi_slopes": slopes})
    if q.device.type == "cuda":
        return cuda_eager.forward(inputs, words, out)
    eager = host_eager()
    _, lse = eager.forward({name: as_numpy(x, name) for name, x in inputs.items()}, words, as_numpy(out))
    return out, as_torch(lse)


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _forward_cuda(q: Any, k: Any, v: Any, slopes: Any, options: str) -> tuple[Any, Any]:
    inputs = {"q": q, "k": k, "v": v}
    if slopes is not None:
        inputs["alibi_slopes"] = slopes
    return cuda_eager.forward(inputs, words_of(options))


def _backward_cuda(*arguments: Any) -> Gradients:
    *arrays, options = arguments
    return cuda_eager.backward(_given(arrays), words_of(options))


def _forward_cpu(q: Any, k: Any, v: Any, slopes: Any, options: str) -> tuple[Any, Any]:
    inputs = {"q": q, "k": k, "v": v} | ({} if slopes is None else {"alibi_slopes": slopes})
    out, lse = host_eager().forward({name: as_numpy(x, name) for name, x in inputs.items()}, words_of(options))
    return as_torch(out), as_torch(lse)


def _backward_cpu(*arguments: Any) -> tuple[Any, Any, Any]:
    *arrays, options = arguments
    inputs = {name: as_numpy(x, name) for name, x in _given(arrays).items()}
    dq, dk, dv = host_eager().backward(inputs, words_of(options))
    return as_torch(dq), as_torch(dk), as_torch(dv)


def forward_kernels(*arguments: Any) -> tuple[Any, Any]:
    """What the operator does, without the way through the dispatcher."""
    return (_forward_cuda if arguments[0].is_cuda else _forward_cpu)(*arguments)


def _given(arrays: Any) -> dict[str, Any]:
    return {name: x for name, x in zip(_BACKWARD, arrays, strict=True) if x is not None}


for _name, _cuda, _cpu in (("forward", _forward_cuda, _forward_cpu), ("backward", _backward_cuda, _backward_cpu)):
    _library.impl(_name, _cuda, "CUDA")
    _library.impl(_name, _cpu, "CPU")


# ---- fakes: fresh contiguous results, whatever the strides of the inputs ---------------------------------------------


def _forward_fake(q: Any, k: Any, v: Any, slopes: Any, options: str) -> tuple[Any, Any]:
    batch, seqlen_q, num_q_heads, _ = q.shape
    out = q.new_empty((batch, seqlen_q, num_q_heads, v.shape[3]))
    return out, q.new_empty((batch, num_q_heads, seqlen_q), dtype=torch.float32)


def _backward_fake(d_out: Any, q: Any, k: Any, v: Any, *_: Any) -> tuple[Any, Any, Any]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# ---- derivative ------------------------------------------------------------------------------------------------------


def remember(ctx: Any, inputs: Any, output: Any) -> None:
    """What the derivative needs of a forward call."""
    q, k, v, slopes, options = inputs
    if slopes is not None and slopes.requires_grad:
        remedy = "pass alibi_slopes.detach(), or take the gradient in JAX"
        raise UnsupportedError("alibi_slopes", "a tensor that requires grad", "has no gradient in torch yet", remedy)
    ctx.options = options
    ctx.save_for_backward(q, k, v, slopes, *output)
    ctx.set_materialize_grads(False)


def differentiate(operator: Any, ctx: Any, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
    """The cotangents of ``forward``'s inputs; either result may have none."""
    q, k, v, slopes, out, lse = ctx.saved_tensors
    if d_out is None and d_lse is None:
        return None, None, None, None, None
    if d_out is None:
        d_out = torch.zeros_like(out)
    return (*operator(d_out, q, k, v, out, lse, d_lse, slopes, ctx.options), None, None)


def _differentiate(ctx: Any, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
    return differentiate(backward_kernels, ctx, d_out, d_lse)


def backward_kernels(*arguments: Any) -> Any:
    """The gradient, by the shortest way that is right where it is called."""
    *arrays, options = arguments
    given = _given(arrays)
    if needs_no_operator(given.values()):
        return cuda_eager.backward(given, words_of(options))
    return torch.ops.cuflash.backward(*arguments)


def refuse_second_order(*_: Any) -> Any:
    """The gradient's own derivative."""
    remedy = "JAX's door has second derivatives; in torch use the math backend of scaled_dot_product_attention"
    raise UnsupportedError("create_graph", True, "asks for a second derivative, which torch's door lacks", remedy)


# ---- batching --------------------------------------------------------------------------------------------------------


def fold(info: Any, dims: Any, arguments: Any) -> tuple[list[Any], int]:
    """[size, batch, ...] -> [size * batch, ...] for every tensor, and batch.

    A tensor without the mapped axis is repeated; slopes [heads] are not.
    """
    moved = [x if d is None else x.movedim(d, 0) for x, d in zip(arguments, dims, strict=True)]
    batch = moved[0].shape[0 if dims[0] is None else 1]  # the first argument is q or d_out
    folded = []
    for x, dim in zip(moved, dims, strict=True):
        if not isinstance(x, torch.Tensor) or (dim is None and x.dim() == 1):
            folded.append(x)
            continue
        rows = x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x
        if rows.dim() == 2:  # slopes [heads], one set an example
            rows = rows.unsqueeze(1).expand(-1, batch, -1)
        folded.append(rows.reshape(info.batch_size * batch, *rows.shape[2:]))
    return folded, batch


def unfold(info: Any, batch: int, results: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """[size * batch, ...] -> [size, batch, ...], and where the mapped axis lies."""
    found = tuple(x.reshape(info.batch_size, batch, *x.shape[1:]) for x in results)
    return found, (0,) * len(found)


def _forward_vmap(info: Any, dims: Any, *arguments: Any) -> Any:
    folded, batch = fold(info, dims, arguments)
    return unfold(info, batch, torch.ops.cuflash.forward(*folded))


def _backward_vmap(info: Any, dims: Any, *arguments: Any) -> Any:
    folded, batch = fold(info, dims, arguments)
    return unfold(info, batch, torch.ops.cuflash.backward(*folded))


torch.library.register_fake("cuflash::forward", _forward_fake, lib=_library)
torch.library.register_fake("cuflash::backward", _backward_fake, lib=_library)
torch.library.register_autograd("cuflash::forward", _differentiate, setup_context=remember, lib=_library)
torch.library.register_autograd("cuflash::backward", refuse_second_order, lib=_library)
torch.library.register_vmap("cuflash::forward", _forward_vmap, lib=_library)
torch.library.register_vmap("cuflash::backward", _backward_vmap, lib=_library)
