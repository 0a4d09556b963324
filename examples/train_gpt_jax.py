"""A small GPT trained on this project's own pages, twice: cuflash against jax.nn.dot_product_attention, step by step.

    python examples/train_gpt_jax.py                 # a few small steps on a CPU, a real size on a GPU
    python examples/train_gpt_jax.py --steps 500

Both runs start from the same weights and see the same batches, so their losses may differ by rounding only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cuflash.interop.jax import flash_attention

Attention = Callable[[Any, Any, Any], Any]
Weights = dict[str, Any]


class Size(NamedTuple):
    """One configuration."""

    layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    seqlen: int
    batch: int
    steps: int
    dtype: Any

    @property
    def width(self) -> int:
        return self.num_q_heads * self.head_dim


SMALL = Size(layers=2, num_q_heads=4, num_kv_heads=2, head_dim=16, seqlen=64, batch=4, steps=6, dtype=jnp.float32)
REAL = Size(layers=8, num_q_heads=12, num_kv_heads=4, head_dim=64, seqlen=1024, batch=8, steps=200, dtype=jnp.bfloat16)


def text() -> np.ndarray[Any, Any]:
    """The project's pages and sources as bytes."""
    root = Path(__file__).resolve().parents[1]
    pages = sorted([*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("examples/*.py")])
    return np.frombuffer(b"\n".join(page.read_bytes() for page in pages), np.uint8)


def batches(size: Size, count: int) -> Iterator[Any]:
    """Windows of seqlen + 1 bytes, [batch, seqlen + 1]; the same ones for every run."""
    corpus, rng = text(), np.random.default_rng(0)
    for _ in range(count):
        starts = rng.integers(0, len(corpus) - size.seqlen - 1, size.batch)
        yield jnp.asarray(np.stack([corpus[start : start + size.seqlen + 1] for start in starts]).astype(np.int32))


def initial_weights(size: Size) -> Weights:
    """Weights in float32; the layers are stacked along the first axis for lax.scan."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    kv_width = size.num_kv_heads * size.head_dim

    def matrix(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape, jnp.float32) * shape[-2] ** -0.5

    layer = {
        "q": matrix(size.layers, size.width, size.width),
        "kv": matrix(size.layers, size.width, 2 * kv_width),
        "out": matrix(size.layers, size.width, size.width) * 0.1,
        "up": matrix(size.layers, size.width, 4 * size.width),
        "down": matrix(size.layers, 4 * size.width, size.width) * 0.1,
    }
    return {"embed": matrix(256, size.width), "position": matrix(size.seqlen, size.width) * 0.1, "layers": layer}


def normed(x: Any) -> Any:
    """Root-mean-square norm over the width."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def logits_of(weights: Weights, tokens: Any, size: Size, attention: Attention) -> Any:
    """[batch, seqlen] bytes -> [batch, seqlen, 256] float32; every layer is recomputed in the backward pass."""
    batch, seqlen = tokens.shape
    weights = jax.tree.map(lambda w: w.astype(size.dtype), weights)
    x = weights["embed"][tokens] + weights["position"][:seqlen]

    @jax.checkpoint
    def layer(x: Any, w: Weights) -> tuple[Any, None]:
        h = normed(x)
        q = (h @ w["q"]).reshape(batch, seqlen, size.num_q_heads, size.head_dim)
        k, v = jnp.split((h @ w["kv"]).reshape(batch, seqlen, 2 * size.num_kv_heads, size.head_dim), 2, axis=2)
        x = x + attention(q, k, v).reshape(batch, seqlen, size.width) @ w["out"]
        return x + jax.nn.gelu(normed(x) @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(layer, x, weights["layers"])
    return (normed(x) @ weights["embed"].T).astype(jnp.float32)


def loss_of(weights: Weights, window: Any, size: Size, attention: Attention) -> Any:
    """Mean cross entropy of the next byte."""
    chosen = jax.nn.log_softmax(logits_of(weights, window[:, :-1], size, attention))
    return -jnp.take_along_axis(chosen, window[:, 1:, None], axis=-1).mean()


@partial(jax.jit, static_argnames=("size", "attention"), donate_argnums=(0, 1))
def step(weights: Weights, momentum: Weights, window: Any, size: Size, attention: Attention) -> tuple[Any, Any, Any]:
    """One step of Lion: the sign of a running mean of gradients."""
    loss, gradient = jax.value_and_grad(loss_of)(weights, window, size, attention)
    update = jax.tree.map(lambda m, g: jnp.sign(0.9 * m + 0.1 * g), momentum, gradient)
    momentum = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g, momentum, gradient)
    return jax.tree.map(lambda w, u: w - 3e-4 * u, weights, update), momentum, loss


def train(size: Size, attention: Attention) -> tuple[list[float], float]:
    """Losses, and seconds a step after the first."""
    weights = initial_weights(size)
    momentum = jax.tree.map(jnp.zeros_like, weights)
    losses: list[Any] = []
    start = 0.0
    for number, window in enumerate(batches(size, size.steps)):
        weights, momentum, loss = step(weights, momentum, window, size, attention)
        losses.append(loss)
        if number == 0:
            loss.block_until_ready()
            start = time.perf_counter()
    found = [float(loss) for loss in losses]
    return found, (time.perf_counter() - start) / max(size.steps - 1, 1)


def with_cuflash(q: Any, k: Any, v: Any) -> Any:
    return flash_attention(q, k, v, causal=True)


def with_jax(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def main() -> None:
    size = REAL if jax.default_backend() == "gpu" else SMALL
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=size.steps)
    size = size._replace(steps=parser.parse_args().steps)
    curves = {}
    for name, attention in (("cuflash", with_cuflash), ("jax.nn", with_jax)):
        curves[name], seconds = train(size, attention)
        print(f"{name:8s} {seconds * 1e3:8.1f} ms a step")
    print("  step   cuflash    jax.nn  difference")
    pairs = list(zip(*curves.values(), strict=True))
    for number in sorted({*range(0, size.steps, max(size.steps // 10, 1)), size.steps - 1}):
        ours, theirs = pairs[number]
        print(f"{number:6d} {ours:9.5f} {theirs:9.5f}  {ours - theirs:+.5f}")
    worst = max(abs(ours - theirs) for ours, theirs in pairs)
    allowed = 1e-4 if size.dtype == jnp.float32 else 0.05
    print(f"largest difference {worst:.2g}, allowed {allowed:g} in {jnp.dtype(size.dtype).name}")
    if worst > allowed:
        raise SystemExit("the curves part")


if __name__ == "__main__":
    main()
