"""Attention and its gradients on CuPy arrays: a Llama-3-like layer, then what the plan says about it."""

from __future__ import annotations

import cupy as cp
import numpy as np

import cuflash


def main() -> None:
    rng = np.random.default_rng(0)
    shapes = ((2, 4096, 32, 128), (2, 4096, 8, 128), (2, 4096, 8, 128))
    q, k, v = (cp.asarray(rng.standard_normal(shape, dtype=np.float32).astype(np.float16)) for shape in shapes)

    (out, lse), pullback = cuflash.flash_attention_vjp(q, k, v, causal=True)
    dq, dk, dv = pullback(cp.ones_like(out))
    print("out", out.shape, out.dtype, " lse", lse.shape, lse.dtype)
    print("dq", dq.shape, " dk", dk.shape, " dv", dv.shape)

    window = cuflash.flash_attention(q, k, v, causal=True, window=(1023, 0), softcap=30.0)
    print("sliding window of 1024 keys with a soft cap:", window.shape)

    print(cuflash.explain(q, k, v, causal=True))


if __name__ == "__main__":
    main()
