"""torch's door: the same functions on torch tensors, with autograd, vmap, torch.compile and CUDA graphs.

CUDA tensors run on torch's current stream, out of torch's own allocator, without any exchange of capsules. CPU tensors
run on the emulator when CUFLASH_TORCH_CPU=emulator says so and are refused otherwise: the emulator is for tests.
"""

from __future__ import annotations

from typing import Any

import torch

from cuflash.eager import Gradients
from cuflash.interop.chunk import attention_chunk
from cuflash.interop.torch_backend import as_numpy, check_devices, cuda_eager, host_eager, needs_no_operator
from cuflash.interop.torch_functions import attention, gradients
from cuflash.interop.torch_hf import register_hf
from cuflash.interop.torch_operator import forward_into, options_of
from cuflash.interop.torch_sdpa import scaled_dot_product_attention
from cuflash.merge import merge_states
from cuflash.plan import Plan
from cuflash.problem import Keywords

__all__ = ["attention_chunk", "door", "merge_states", "register_hf", "scaled_dot_product_attention"]


class TorchDoor:
    """What ``cuflash.flash_attention`` opens for torch tensors."""

    def forward(self, inputs: dict[str, Any], words: Keywords, out: Any = None) -> tuple[Any, Any]:
        """``(out, lse)``, both differentiable; with ``out`` given, neither."""
        if out is None and needs_no_operator(inputs.values()):
            return cuda_eager.forward(inputs, words)
        check_devices(inputs if out is None else {**inputs, "out": out})
        q, k, v = as_autocast_wants(inputs["q"], inputs["k"], inputs["v"])
        slopes = inputs.get("alibi_slopes")
        if out is not None:
            return forward_into(out, q, k, v, slopes, words)
        return attention(q, k, v, slopes, options_of(words))

    def backward(self, inputs: dict[str, Any], words: Keywords) -> Gradients:
        """The gradients, for code that differentiates by hand; autograd needs no call of this."""
        if needs_no_operator(inputs.values()):
            return cuda_eager.backward(inputs, words)
        check_devices(inputs)
        names = ("d_out", "q", "k", "v", "out", "lse", "d_lse", "alibi_slopes")
        arrays = (inputs.get(name) for name in names)
        return Gradients(*gradients(*arrays, options_of(words)))

    def explain(self, inputs: dict[str, Any], words: Keywords, backward: bool) -> Plan:
        """The plan for the tensors' GPU."""
        check_devices(inputs)
        if inputs["q"].device.type == "cuda":
            return cuda_eager.explain(inputs, words, backward)
        return host_eager().explain({n: as_numpy(x, n) for n, x in inputs.items()}, words, backward)


door = TorchDoor()


def as_autocast_wants(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """q, k, v in autocast's dtype where autocast is on, as torch's own attention takes them."""
    kind = q.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    return q.to(dtype), k.to(dtype), v.to(dtype)
