"""Functions that have a name and a meaning and no kernel yet: they say what is there instead."""

from __future__ import annotations

from typing import Any, NoReturn

from cuflash.errors import UnsupportedError

__all__ = ["flash_attention_kvcache", "flash_attention_varlen"]


def flash_attention_varlen(*arrays: Any, **keywords: Any) -> NoReturn:
    """Attention over packed sequences, [total, heads, head_dim].

    Raises:
        UnsupportedError: always, in this version.
    """
    instead = "call flash_attention for each sequence, or for a batch of sequences of one length"
    raise UnsupportedError("flash_attention_varlen", "packed sequences", "has no kernel yet", instead)


def flash_attention_kvcache(*arrays: Any, **keywords: Any) -> NoReturn:
    """Attention with a cache of keys and values, appended to and perhaps paged.

    Raises:
        UnsupportedError: always, in this version.
    """
    instead = "call flash_attention with the filled part of the cache, k_cache[:, :length]: a view is not copied"
    raise UnsupportedError("flash_attention_kvcache", "a cache", "has no kernel yet", instead)
