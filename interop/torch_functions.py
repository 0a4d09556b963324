"""The two operators as autograd functions, for torch.func's grad, vjp and jacrev.

An operator's registered derivative does not work under those transforms; a function whose context is set apart does. It
costs five times as much a call, so it is used only while a transform is active.
"""

from __future__ import annotations

from typing import Any

import torch

from cuflash.interop.torch_backend import transforms_are_active
from cuflash.interop.torch_operator import differentiate, fold, refuse_second_order, remember, unfold

__all__ = ["attention", "gradients"]


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
    return torch.ops.cuflash.forward(*arguments)  # type: ignore[no-any-return]


def gradients(*arguments: Any) -> tuple[Any, Any, Any]:
    """``(dq, dk, dv)`` from d_out, q, k, v, out, lse, d_lse, slopes, options."""
    if transforms_are_active():
        return Gradient.apply(*arguments)  # type: ignore[no-any-return]
    return torch.ops.cuflash.backward(*arguments)  # type: ignore[no-any-return]
