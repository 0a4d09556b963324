"""The two operators as autograd functions.

For torch.func's grad, vjp and jacrev, under which an operator's registered derivative does not work and a function
whose context is set apart does. And for plain autograd, where a function that calls the kernels itself takes half the
time of the operator's way through the dispatcher.
"""

from __future__ import annotations

from typing import Any

import torch

from cuflash.interop.torch_backend import is_plain, transforms_are_active
from cuflash.interop.torch_operator import (
    backward_kernels,
    differentiate,
    fold,
    forward_kernels,
    refuse_second_order,
    remember,
    unfold,
)

__all__ = ["attention", "gradients"]


class Direct(torch.autograd.Function):
    """cuflash::forward on plain tensors, of which one at least has a gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        results = forward_kernels(*arguments)
        remember(ctx, arguments, results)
        return results

    @staticmethod
    def backward(ctx: Any, d_out: Any, d_lse: Any) -> Any:
        return differentiate(backward_kernels, ctx, d_out, d_lse)


class Attention(torch.autograd.Function):
    """cuflash::forward."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.cuflash.forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        remember(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, d_out: Any, d_lse: Any) -> Any:
        return differentiate(Gradient.apply, ctx, d_out, d_lse)

    @staticmethod
    def vmap(info: Any, dims: Any, *arguments: Any) -> Any:
        folded, batch = fold(info, dims, arguments)
        return unfold(info, batch, Attention.apply(*folded))


class Gradient(torch.autograd.Function):
    """cuflash::backward."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.cuflash.backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: there is no second derivative."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return refuse_second_order()

    @staticmethod
    def vmap(info: Any, dims: Any, *arguments: Any) -> Any:
        folded, batch = fold(info, dims, arguments)
        return unfold(info, batch, Gradient.apply(*folded))


def attention(*arguments: Any) -> tuple[Any, Any]:
    """``(out, lse)`` from q, k, v, slopes, options; differentiable."""
    if transforms_are_active():
        return Attention.apply(*arguments)  # type: ignore[no-any-return]
    tensors = [x for x in arguments[:4] if x is not None]
    if torch.is_grad_enabled() and is_plain(tensors) and any(x.requires_grad for x in tensors):
        return Direct.apply(*arguments)  # type: ignore[no-any-return]
    return torch.ops.cuflash.forward(*arguments)  # type: ignore[no-any-return]


def gradients(*arguments: Any) -> tuple[Any, Any, Any]:
    """``(dq, dk, dv)`` from d_out, q, k, v, out, lse, d_lse, slopes, options."""
    if transforms_are_active():
        return Gradient.apply(*arguments)  # type: ignore[no-any-return]
    return torch.ops.cuflash.backward(*arguments)  # type: ignore[no-any-return]
