"""Peers that speak torch: its own SDPA on three backends, FlashAttention-3 and -4. Tensors share CuPy's memory."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from cuflash.peers_base import Call, Contestant, Peer, refuse
from cuflash.presets import Shape

__all__ = ["FlashAttention", "TorchPeer", "TorchSDPA", "product"]


def product(size: int) -> Call:
    """A square bfloat16 matrix product of random numbers, ready to be timed.

    Raises:
        ImportError, RuntimeError: no torch, or none that sees a GPU.
    """
    import torch

    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    result = torch.empty_like(left)
    return partial(torch.matmul, left, right, out=result)


class TorchPeer(Peer):
    """What torch peers share: tensors on CuPy's memory, gradients by autograd."""

    module = "torch"

    def missing(self) -> str:
        if why := super().missing():
            return why
        import torch

        return "" if torch.cuda.is_available() else "torch sees no GPU"

    def poison(self, results: Sequence[Any]) -> None:
        import torch

        # The allocator hands out what was freed last, to requests of the same size.
        _ = [torch.full_like(torch.from_dlpack(result), torch.nan) for result in results]

    @abstractmethod
    def attend(self, q: Any, k: Any, v: Any, shape: Shape) -> Any:
        """out [batch, seqlen_q, num_q_heads, head_dim_v] from tensors in that layout."""

    def prepare(self, arrays: Mapping[str, Any], shape: Shape, mode: str) -> Contestant:
        import torch

        q, k, v, d_out = (torch.from_dlpack(arrays[name]) for name in ("q", "k", "v", "d_out"))
        if mode == "fwd":
            return Contestant(self.name, torch.no_grad()(partial(self.attend, q, k, v, shape)))
        leaves = tuple(tensor.detach().requires_grad_() for tensor in (q, k, v))
        if mode == "fwdbwd":
            return Contestant(
                self.name,
                lambda: torch.autograd.grad(self.attend(leaves[0], leaves[1], leaves[2], shape), leaves, d_out),
            )
        out = self.attend(leaves[0], leaves[1], leaves[2], shape)
        return Contestant(self.name, partial(torch.autograd.grad, out, leaves, d_out, retain_graph=True))


class TorchSDPA(TorchPeer):
    """torch.nn.functional.scaled_dot_product_attention with one backend forced."""

    def __init__(self, name: str, backend: str) -> None:
        self.name, self.backend = name, backend

    def version(self) -> str:
        import torch

        return f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"

    def attend(self, q: Any, k: Any, v: Any, shape: Shape) -> Any:
        import torch.nn.functional as functional
        from torch.nn.attention import SDPBackend, sdpa_kernel

        refuse(shape, window=True, softcap=True, alibi=True, rectangular_causal=True)
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        with sdpa_kernel(getattr(SDPBackend, self.backend)):
            out = functional.scaled_dot_product_attention(
                *heads_first,
                is_causal=shape.causal,
                scale=shape.scale,
                enable_gqa=shape.num_q_heads != shape.num_kv_heads,
            )
        return out.transpose(1, 2)


class FlashAttention(TorchPeer):
    """FlashAttention-3 (any package with `flash_attn_interface`) and FlashAttention-4 (compiled at first call)."""

    def __init__(self, name: str, module: str, open_bound: int | None) -> None:
        self.name, self.module, self.open_bound = name, module, open_bound

    def attend(self, q: Any, k: Any, v: Any, shape: Shape) -> Any:
        refuse(shape, alibi=True, top_left=True)
        window = tuple(self.open_bound if bound is None else bound for bound in shape.window or (None, None))
        words = {"softmax_scale": shape.scale, "causal": shape.causal, "window_size": window}
        out = importlib.import_module(self.module).flash_attn_func(q, k, v, softcap=shape.softcap or 0.0, **words)
        return out[0] if isinstance(out, tuple) else out
