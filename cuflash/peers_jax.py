"""Peers that speak JAX: jitted functions on CuPy's memory, timed by the host over queued calls."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

from cuflash.peers_base import Call, Contestant, Peer, refuse
from cuflash.presets import Shape
from cuflash.timing import wall_times

__all__ = ["FlashAttention3Jax", "JaxCudnn", "JaxPeer"]


class JaxPeer(Peer):
    """What JAX peers share: jitted functions on arrays of CuPy's memory, timed by the host over queued calls."""

    module = "jax"

    def missing(self) -> str:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # CuPy and torch share the card
        if why := super().missing():
            return why
        import jax

        return "" if jax.default_backend() == "gpu" else "jax sees no GPU"

    @abstractmethod
    def attend(self, q: Any, k: Any, v: Any, shape: Shape) -> Any:
        """out [batch, seqlen_q, num_q_heads, head_dim_v] from arrays in that layout."""

    def prepare(self, arrays: Mapping[str, Any], shape: Shape, mode: str) -> Contestant:
        import jax

        q, k, v, d_out = (jax.dlpack.from_dlpack(arrays[name]) for name in ("q", "k", "v", "d_out"))
        function = partial(self.attend, shape=shape)
        if mode == "fwd":
            call: Call = partial(jax.jit(function), q, k, v)
        elif mode == "fwdbwd":
            call = partial(jax.jit(lambda q, k, v, d: jax.vjp(function, q, k, v)[1](d)), q, k, v, d_out)
        else:
            pullback = jax.jit(lambda q, k, v: jax.vjp(function, q, k, v)[1])(q, k, v)
            call = partial(jax.jit(lambda pull, d: pull(d)), pullback, d_out)
        return Contestant(self.name, call, lambda call, budget: wall_times(call, jax.block_until_ready, budget))


class JaxCudnn(JaxPeer):
    """jax.nn.dot_product_attention on cuDNN."""

    name = "jax-cudnn"

    def attend(self, q: Any, k: Any, v: Any, shape: Shape) -> Any:
        import jax

        refuse(shape, softcap=True, alibi=True, window=True, rectangular_causal=True)
        return jax.nn.dot_product_attention(q, k, v, scale=shape.scale, is_causal=shape.causal, implementation="cudnn")


class FlashAttention3Jax(JaxPeer):
    """FlashAttention-3's kernels behind JAX; the wheel that also has its backward."""

    name, module = "fa3-jax", "flash_attn3_jax"

    def attend(self, q: Any, k: Any, v: Any, shape: Shape) -> Any:
        from flash_attn3_jax import flash_mha

        refuse(shape, softcap=True, alibi=True, top_left=True)
        window = tuple(-1 if bound is None else bound for bound in shape.window or (None, None))
        return flash_mha(q, k, v, softmax_scale=shape.scale, is_causal=shape.causal, window_size=window)
