"""Hugging Face transformers: cuflash as an attention implementation, ``attn_implementation="cuflash"``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cuflash.errors import UnsupportedError

__all__ = ["attention", "attention_mask", "register_hf"]

# What the keywords of the attention function say in full; anything else would be lost by passing no mask array.
_KNOWN_RULES = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
}


def register_hf(name: str = "cuflash") -> None:
    """Makes ``attn_implementation=name`` known to transformers; call once, before a model is made.

    Padding is refused, for there is no kernel for it: use batches of equal length.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, attention_mask)
    _exempt(name)


def _exempt(name: str) -> None:
    """transformers takes every name that contains "flash" for a build of flash-attn and imports that; not this one."""
    if "flash" not in name:
        return
    from transformers import modeling_utils

    importer = getattr(modeling_utils, "lazy_import_flash_attention", None)
    if importer is None or name in getattr(importer, "exempt", ()):
        return

    def lazy_import_flash_attention(implementation: Any, *others: Any, **words: Any) -> Any:
        return None if implementation == name else importer(implementation, *others, **words)

    lazy_import_flash_attention.exempt = (name, *getattr(importer, "exempt", ()))  # type: ignore[attr-defined]
    modeling_utils.lazy_import_flash_attention = lazy_import_flash_attention


def attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Any, None]:
    """The function transformers calls in every layer.

    Args:
        query: [batch, num_q_heads, seqlen_q, head_dim]; key and value with num_kv_heads.
        is_causal: None asks the module, as transformers does.

    Returns:
        (out [batch, seqlen_q, num_q_heads, head_dim_v], None): there are no attention weights to give.

    Raises:
        UnsupportedError: a mask array, dropout, packed sequences, attention sinks or a position bias.
    """
    from cuflash.attention import flash_attention

    if attention_mask is not None:
        remedy = "use batches without padding, or another attn_implementation"
        raise UnsupportedError("attention_mask", tuple(attention_mask.shape), "has no kernel yet", remedy)
    if dropout:
        remedy = "set attention_dropout=0 in the model's config"
        raise UnsupportedError("dropout", dropout, "has no kernel yet", remedy)
    for name in ("s_aux", "position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens"):
        if others.get(name) is not None:
            raise UnsupportedError(name, "a tensor", "has no kernel yet", "use another attn_implementation")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # transformers counts the query itself in a causal window and does not in a two-sided one
    window = None
    if sliding_window is not None:
        window = (sliding_window - 1, 0) if causal else (sliding_window, sliding_window)
    out = flash_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        scale=scaling,
        causal=bool(causal),
        window=window,
        softcap=softcap,
    )
    return out, None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Any = None,
    **others: Any,
) -> None:
    """The mask transformers asks for: None, since causal masks and windows are rules and not arrays here.

    Raises:
        UnsupportedError: padding, a pattern other than causal, bidirectional and their windows, or a key cache with
            unfilled places.
    """
    if attention_mask is not None:
        kept = attention_mask[:, kv_offset : kv_offset + kv_length]
        if kept.shape[1] != kv_length or not bool(kept.all()):
            remedy = "use batches of equal length, or another attn_implementation"
            raise UnsupportedError("attention_mask", tuple(attention_mask.shape), "marks padding", remedy)
    rules = set(_rules(mask_function))
    unknown = rules - _KNOWN_RULES
    if unknown:
        remedy = "use another attn_implementation"
        raise UnsupportedError("mask_function", sorted(unknown), "is a pattern without a kernel", remedy)
    if "causal_mask_function" in rules and kv_offset + kv_length != q_offset + q_length:
        rule = f"holds {kv_length} keys for queries that end at position {q_offset + q_length}"
        raise UnsupportedError("past_key_values", kv_length, rule, "use a dynamic cache instead of a static one")


def _rules(mask_function: Any) -> Iterator[str]:
    """Names of the rules that a mask function of transformers is made of."""
    name = getattr(mask_function, "__qualname__", str(mask_function))
    if name != "and_masks.<locals>.and_mask":
        yield name
        return
    for cell in mask_function.__closure__:
        for part in cell.cell_contents:
            yield from _rules(part)
