"""One real attention on whatever is here: a GPU through CuPy, or the CPU emulator through NumPy."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import cuflash
from cuflash import reference
from cuflash.backends import default_device


def main() -> None:
    device = default_device()
    if device == "gpu":
        import cupy as xp
    else:
        xp = np  # type: ignore[assignment]
    rng = np.random.default_rng(0)
    q, k, v, d_out = (xp.asarray(rng.standard_normal((1, 64, heads, 64)).astype(np.float16)) for heads in (2, 1, 1, 2))

    start = time.perf_counter()
    (out, lse), pullback = cuflash.flash_attention_vjp(q, k, v, causal=True)
    gradients = pullback(d_out)
    host = [on_host(array) for array in (out, lse, *gradients)]
    spent = time.perf_counter() - start

    q, k, v, d_out = (on_host(array) for array in (q, k, v, d_out))
    exact_out, exact_lse = reference.attention(q, k, v, causal=True)
    exact = (exact_out, exact_lse, *reference.attention_backward(d_out, q, k, v, causal=True))
    print(f"\ncausal attention of 64 tokens, 2 query heads on 1 key head, head_dim 64, float16, on the {device}:")
    for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), host, exact, strict=True):
        error = float(np.abs(got.astype(np.float64) - want).max())
        print(f"  {name:4} {got.shape!s:16} {got.dtype!s:8} largest error against float64 {error:.1e}")
    print(f"  out[0, 0, 0, :4] = {np.array2string(host[0][0, 0, 0, :4].astype(float), precision=4)}  ({spent:.2f} s)")


def on_host(array: Any) -> np.ndarray:
    return array.get() if hasattr(array, "get") else np.asarray(array)


if __name__ == "__main__":
    main()
