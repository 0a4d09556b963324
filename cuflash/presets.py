"""Attention shapes of real models: a table, read by `cuflash check` and `cuflash bench`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cuflash.masks import mask_from_keywords, shift_of

__all__ = ["GRIDS", "PRESETS", "Shape", "fa_grid", "odd_grid", "preset_shapes"]


@dataclass(frozen=True)
class Shape:
    """One attention call, without its arrays: lengths and heads as in api names, dtype, mask and score keywords."""

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    seqlen_q: int
    seqlen_k: int
    head_dim_v: int = 0  # 0: as head_dim
    batch: int = 1
    dtype: str = "bfloat16"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    alibi: bool = False
    align: str | int = "bottom-right"
    scale: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.head_dim)

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords of ``cuflash.flash_attention``, without arrays."""
        given = {name: getattr(self, name) for name in ("causal", "window", "softcap", "align", "scale")}
        defaults = {"causal": False, "window": None, "softcap": None, "align": "bottom-right", "scale": None}
        return {name: value for name, value in given.items() if value != defaults[name]}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Array shapes by operand name."""
        q_rows, k_rows = (self.batch, self.seqlen_q), (self.batch, self.seqlen_k)
        return {
            "q": (*q_rows, self.num_q_heads, self.head_dim),
            "k": (*k_rows, self.num_kv_heads, self.head_dim),
            "v": (*k_rows, self.num_kv_heads, self.head_dim_v),
            "d_out": (*q_rows, self.num_q_heads, self.head_dim_v),
        }

    @property
    def mask_name(self) -> str:
        """full, causal or window, as a table prints it."""
        return {"sliding_window": "window"}.get(name := self._mask.header, name)

    @property
    def _mask(self) -> Any:
        return mask_from_keywords(self.causal, self.window, None)

    def visible_pairs(self) -> int:
        """(query, key) pairs a head computes; a square causal mask counts half, as published numbers do."""
        if self.mask_name == "causal" and self.seqlen_q == self.seqlen_k:
            return self.seqlen_q * self.seqlen_k // 2
        shift = shift_of(self.align, self.seqlen_q, self.seqlen_k)
        return int(self._mask.visible_pairs(self.seqlen_q, self.seqlen_k, shift))

    def reduced(self, seqlen: int, heads: int = 2) -> Shape:
        """The same head_dim, mask and score on shorter sequences and fewer heads; GQA stays GQA."""
        longest = max(self.seqlen_q, self.seqlen_k, 1)
        if longest <= seqlen and self.num_q_heads <= heads and self.batch == 1:
            return self
        ratio = min(1.0, seqlen / longest)
        window = self.window
        if window is not None:
            left, right = (bound and max(1, int(bound * ratio)) for bound in window)
            window = (left, right)
        kv_heads = 1 if self.num_kv_heads < self.num_q_heads else min(heads, self.num_kv_heads)
        return replace(
            self,
            batch=1,
            num_q_heads=min(heads, self.num_q_heads),
            num_kv_heads=kv_heads,
            seqlen_q=max(1, round(self.seqlen_q * ratio)),
            seqlen_k=max(1, round(self.seqlen_k * ratio)),
            window=window,
        )


def _decoder(name: str, q_heads: int, kv_heads: int, head_dim: int, seqlen: int, **more: Any) -> Shape:
    return Shape(name, q_heads, kv_heads, head_dim, seqlen, seqlen, causal=True, **more)


def _encoder(name: str, heads: int, head_dim: int, seqlen: int, **more: Any) -> Shape:
    return Shape(name, heads, heads, head_dim, seqlen, seqlen, **more)


# Heads, head dimensions and windows are those of the models' published configurations. A window of W keys that ends at
# the query is (W - 1, 0). A model whose layers differ has one row a kind of layer.
PRESETS: Mapping[str, tuple[Shape, ...]] = {
    "gpt2": (_decoder("gpt2", 12, 12, 64, 1024, dtype="float16"),),
    "gpt-j-6b": (_decoder("gpt-j-6b", 16, 16, 256, 2048, dtype="float16"),),
    "llama3-8b": (_decoder("llama3-8b", 32, 8, 128, 8192),),
    "llama3-70b": (_decoder("llama3-70b", 64, 8, 128, 8192),),
    "mistral-7b": (_decoder("mistral-7b", 32, 8, 128, 8192, window=(4095, 0)),),
    "qwen2.5-7b": (_decoder("qwen2.5-7b", 28, 4, 128, 8192),),
    "phi2": (_decoder("phi2", 32, 32, 80, 2048, dtype="float16"),),
    "phi3-mini": (_decoder("phi3-mini", 32, 32, 96, 4096, window=(2046, 0)),),
    "falcon-7b": (_decoder("falcon-7b", 71, 1, 64, 2048),),
    "bloom-7b": (_decoder("bloom-7b", 32, 32, 128, 2048, alibi=True),),
    "gemma2-9b": (  # layers alternate; query_pre_attn_scalar = 256 = head_dim, so the scale is the usual one
        _decoder("gemma2-9b global", 16, 8, 256, 8192, softcap=50.0),
        _decoder("gemma2-9b local", 16, 8, 256, 8192, softcap=50.0, window=(4095, 0)),
    ),
    "gemma2-27b": (_decoder("gemma2-27b", 32, 16, 128, 8192, softcap=50.0, scale=144**-0.5),),
    "deepseek-v3": (
        _decoder("deepseek-v3", 128, 128, 192, 4096, head_dim_v=128),
    ),  # MLA as prefill and training see it
    "minilm": (_encoder("minilm", 12, 32, 256, dtype="float32"),),
    "bert-base": (_encoder("bert-base", 12, 64, 512, dtype="float16"),),
    "vit-l16": (_encoder("vit-l16", 16, 64, 577),),
    "vit-h14": (_encoder("vit-h14", 16, 80, 257),),
    "siglip-so400m": (_encoder("siglip-so400m", 16, 72, 729),),
    "sd15-unet": (_encoder("sd15-unet", 8, 40, 4096, dtype="float16"),),
    "flux": (_encoder("flux", 24, 128, 4608),),
    "whisper-large": (  # encoder, decoder, cross attention from 448 tokens to 1500 frames
        _encoder("whisper-large encoder", 20, 64, 1500, dtype="float16"),
        _decoder("whisper-large decoder", 20, 20, 64, 448, dtype="float16"),
        Shape("whisper-large cross", 20, 20, 64, 448, 1500, dtype="float16"),
    ),
}


def preset_shapes(name: str) -> tuple[Shape, ...]:
    """Rows of one model, or of all of them for ``all``.

    Raises:
        KeyError: no such row; the message lists the names.
    """
    if name == "all":
        return tuple(shape for shapes in PRESETS.values() for shape in shapes)
    if name not in PRESETS:
        raise KeyError(f"no preset {name!r}; there are: all, {', '.join(PRESETS)}")
    return PRESETS[name]


def fa_grid(seqlens: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)) -> tuple[Shape, ...]:
    """The grid that FlashAttention's papers report: 16384 tokens, num_heads * head_dim = 2048, bfloat16."""
    return tuple(
        Shape(
            f"d{dim} {'causal' if causal else 'full'} {length}",
            2048 // dim,
            2048 // dim,
            dim,
            length,
            length,
            batch=16384 // length,
            causal=causal,
        )
        for dim in (64, 128, 256)
        for causal in (False, True)
        for length in seqlens
    )


def odd_grid() -> tuple[Shape, ...]:
    """What models do beside the paper's grid: head_dims between its three, shared key heads, few queries, float32."""
    wide = [
        Shape(f"d{dim} {'causal' if causal else 'full'}", 16, 16, dim, 8192, 8192, batch=2, causal=causal)
        for dim in (72, 80, 96, 112, 160, 192, 224)
        for causal in (False, True)
    ]
    named = [
        Shape("192, 128 causal", 16, 16, 192, 8192, 8192, head_dim_v=128, batch=2, causal=True),
        Shape("64, 256 full", 16, 16, 64, 4096, 4096, head_dim_v=256, batch=2),
        Shape("32/8 heads full", 32, 8, 128, 8192, 8192, batch=2),
        Shape("32/8 heads causal", 32, 8, 128, 8192, 8192, batch=2, causal=True),
        Shape("float16 full", 16, 16, 128, 8192, 8192, batch=2, dtype="float16"),
        Shape("float16 causal", 16, 16, 128, 8192, 8192, batch=2, dtype="float16", causal=True),
        Shape("window 1024", 16, 16, 128, 8192, 8192, batch=2, window=(1023, 0)),
        Shape("float32", 16, 16, 128, 2048, 2048, batch=2, dtype="float32"),
        Shape("one row of 64", 16, 16, 64, 64, 64, causal=True),
        Shape("short", 16, 16, 128, 300, 300, batch=4),
        Shape("one query, 8k keys", 32, 8, 128, 1, 8192),
        Shape("one query, 64k keys", 32, 8, 128, 1, 65536),
        Shape("16 x one query", 32, 8, 128, 1, 8192, batch=16),
        Shape("few queries", 32, 8, 128, 16, 32768, causal=True),
    ]
    return (*wide, *named)


GRIDS: Mapping[str, Callable[[], tuple[Shape, ...]]] = {"fa": fa_grid, "odd": odd_grid}
