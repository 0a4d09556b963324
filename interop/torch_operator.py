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
from cuflash.interop.torch_backend import as_numpy, as_torch, cuda_eager, host_eager
from cuflash.problem import Keywords

__all__ = ["backward", "forward", "forward_into", "options_of", "words_of"]

_library = torch.library.Library("cuflash", "DEF")
_library.define("forward(Tensor q, Tensor k, Tensor v, Tensor? alibi_slopes, str options) -> (Tensor, Tensor)")
_library.define(
    "backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? d_lse, "
    "Tensor? alibi_slopes, str options) -> (Tensor, Tensor, Tensor)"
)
_NAMES = {cls.__name__: cls for cls in (Keywords, *masks.MASKS, *scores.SCORES)} | {"__builtins__": {}}
_BACKWARD = ("d_out", "q", "k", "v", "out", "lse", "d_lse", "alibi_slopes")


@lru_cache(maxsize=1024)
def options_of(words: Keywords) -> str:
    """Keywords as text that says everything.

    Raises:
        UnsupportedError: a mask or score class of the caller's own, which the text could not bring back.
    """
    text = repr(words)
    if words_of(text) != words:
        raise UnsupportedError("score", words.score, "cannot be carried by a torch operator")
    return text


@lru_cache(maxsize=1024)
def words_of(text: str) -> Keywords:
    """The inverse of ``options_of``; only cuflash's own class names mean something in the text."""
    try:
        words: Keywords = eval(text, dict(_NAMES))
    except NameError as error:
        raise UnsupportedError("options", text, f"names a class that torch operators do not carry ({error})") from error
    return words


def forward(q: Any, k: Any, v: Any, slopes: Any, options: str) -> tuple[Any, Any]:
    """``(out, lse)`` through the operator."""
    found: tuple[Any, Any] = torch.ops.cuflash.forward(q, k, v, slopes, options)
    return found


def backward(*arrays: Any) -> tuple[Any, Any, Any]:
    """``(dq, dk, dv)`` through the operator."""
    found: tuple[Any, Any, Any] = torch.ops.cuflash.backward(*arrays)
    return found


def forward_into(out: Any, q: Any, k: Any, v: Any, slopes: Any, words: Keywords) -> tuple[Any, Any]:
    """``(out, lse)`` written into ``out``; outside autograd, as torch's own ``out=`` arguments are."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (out, q, k, v)):
        raise ArgumentError("out", "a tensor", "cannot be written under autograd", "call it inside torch.no_grad()")
    inputs = {"q": q, "k": k, "v": v} | ({} if slopes is None else {"alibi_slopes": slopes})
    if q.device.type == "cuda":
        return cuda_eager.forward(inputs, words, out)
    eager = host_eager()
    _, lse = eager.forward({name: as_numpy(x) for name, x in inputs.items()}, words, as_numpy(out))
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
    out, lse = host_eager().forward({name: as_numpy(x) for name, x in inputs.items()}, words_of(options))
    return as_torch(out), as_torch(lse)


def _backward_cpu(*arguments: Any) -> tuple[Any, Any, Any]:
    *arrays, options = arguments
    inputs = {name: as_numpy(x) for name, x in _given(arrays).items()}
    dq, dk, dv = host_eager().backward(inputs, words_of(options))
    return as_torch(dq), as_torch(dk), as_torch(dv)


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


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, slopes, options = inputs
    if slopes is not None and slopes.requires_grad:
        remedy = "pass alibi_slopes.detach(), or take the gradient in JAX"
        raise UnsupportedError("alibi_slopes", "a tensor that requires grad", "has no gradient in torch yet", remedy)
    ctx.options = options
    ctx.save_for_backward(q, k, v, slopes, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
    q, k, v, slopes, out, lse = ctx.saved_tensors
    if d_out is None and d_lse is None:
        return None, None, None, None, None
    if d_out is None:
        d_out = torch.zeros_like(out)
    return (*torch.ops.cuflash.backward(d_out, q, k, v, out, lse, d_lse, slopes, ctx.options), None, None)


def _refuse_second_order(*_: Any) -> Any:
    remedy = "cuflash.interop.jax.flash_attention has second derivatives; in torch use scaled_dot_product_attention's math"
    raise UnsupportedError("create_graph", True, "asks for a second derivative, which torch's door lacks", remedy)


# ---- batching --------------------------------------------------------------------------------------------------------


def _fold(info: Any, dims: Any, tensors: Any, batch: int) -> list[Any]:
    """[size, batch, ...] -> [size * batch, ...]; a tensor without the mapped axis is repeated, slopes [heads] are not."""
    folded = []
    for tensor, dim in zip(tensors, dims, strict=True):
        if tensor is None or (dim is None and tensor.dim() == 1):
            folded.append(tensor)
            continue
        rows = tensor.unsqueeze(0).expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        if rows.dim() == 2:  # slopes [heads], one set an example
            rows = rows.unsqueeze(1).expand(-1, batch, -1)
        folded.append(rows.reshape(info.batch_size * batch, *rows.shape[2:]))
    return folded


def _batch_of(tensor: Any, dim: int | None) -> int:
    return int(tensor.shape[0] if dim is None else tensor.movedim(dim, 0).shape[1])


def _forward_vmap(info: Any, dims: Any, *arguments: Any) -> Any:
    batch = _batch_of(arguments[0], dims[0])
    found = torch.ops.cuflash.forward(*_fold(info, dims[:4], arguments[:4], batch), arguments[4])
    return tuple(x.reshape(info.batch_size, batch, *x.shape[1:]) for x in found), (0, 0)


def _backward_vmap(info: Any, dims: Any, *arguments: Any) -> Any:
    batch = _batch_of(arguments[1], dims[1])
    found = torch.ops.cuflash.backward(*_fold(info, dims[:8], arguments[:8], batch), arguments[8])
    return tuple(x.reshape(info.batch_size, batch, *x.shape[1:]) for x in found), (0, 0, 0)


torch.library.register_fake("cuflash::forward", _forward_fake, lib=_library)
torch.library.register_fake("cuflash::backward", _backward_fake, lib=_library)
torch.library.register_autograd("cuflash::forward", _differentiate, setup_context=_remember, lib=_library)
torch.library.register_autograd("cuflash::backward", _refuse_second_order, lib=_library)
torch.library.register_vmap("cuflash::forward", _forward_vmap, lib=_library)
torch.library.register_vmap("cuflash::backward", _backward_vmap, lib=_library)
