"""The public functions: signatures, prose, and the step from keywords to the door of the caller's array library.

Array layout everywhere: q [batch, seqlen_q, num_q_heads, head_dim]; k [batch, seqlen_k, num_kv_heads, head_dim];
v [batch, seqlen_k, num_kv_heads, head_dim_v]; out [batch, seqlen_q, num_q_heads, head_dim_v];
lse [batch, num_q_heads, seqlen_q] float32, the natural logarithm of each row's sum of exponentials.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuflash.dispatch import door_of
from cuflash.eager import Gradients
from cuflash.errors import ArgumentTypeError, UnsupportedError
from cuflash.numeric import flag
from cuflash.plan import Plan
from cuflash.specs import Keywords

__all__ = ["explain", "flash_attention", "flash_attention_backward", "flash_attention_vjp"]


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    sinks: Any = None,
    mask: Any = None,
    score: Any = None,
    dropout: Any = None,
    align: str | int = "bottom-right",
    deterministic: bool = False,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """Exact attention, softmax(scale * q k^T) v, without the seqlen_q x seqlen_k array (Dao et al. 2022, 2023).

    Args:
        q, k, v: [batch, seqlen_q, num_q_heads, head_dim], [batch, seqlen_k, num_kv_heads, head_dim] and
            [batch, seqlen_k, num_kv_heads, head_dim_v]; float16, bfloat16 or float32, of one library, any strides.
            num_q_heads is a multiple of num_kv_heads; query head h reads key head h // (num_q_heads / num_kv_heads).
        scale: factor on q k^T; None means 1/sqrt(head_dim).
        causal: row i sees key j when j <= i + seqlen_k - seqlen_q (``align="bottom-right"``) or j <= i ("top-left").
            With more queries than keys the first rows of the default alignment see nothing. An integer ``align`` is
            the key position of query 0: j <= i + align.
        window: (left, right), inclusive, None = open: j from i + shift - left to i + shift + right.
        softcap: cap of softcap * tanh(score / softcap), after the scale and before everything else; None or 0 is off.
        alibi_slopes: float32 [num_q_heads] or [batch, num_q_heads]; score - slope * |i + shift - j|.
        mask, score: objects of cuflash.masks and cuflash.scores, instead of the keywords that name the common ones.
        deterministic: concerns gradients; the forward always repeats bit for bit.
        batch_invariant: a result's bits do not depend on the batch around it; a few queries on many keys are slower.
        return_lse: also return lse, [batch, num_q_heads, seqlen_q] float32.
        out: array to write into instead of a fresh one; must not overlap any input.

    Returns:
        out, or (out, lse). A row that sees no key has out = 0 and lse = -inf.

    Raises:
        ArgumentError, ArgumentTypeError, DeviceError: a caller's mistake, found before anything is launched.
        UnsupportedError: bias, sinks and dropout, which have no kernel yet.
    """
    if bias is not None or sinks is not None or dropout is not None:
        _refuse_absent(bias=bias, sinks=sinks, dropout=dropout)
    if return_lse is not True and return_lse is not False:
        return_lse = flag("return_lse", return_lse)
    words = Keywords(scale, causal, _pair(window), softcap, mask, score, align, deterministic, batch_invariant)
    arrays = {"q": q, "k": k, "v": v}
    if alibi_slopes is not None:
        arrays["alibi_slopes"] = alibi_slopes
    out, lse = door_of(arrays if out is None else {**arrays, "out": out}).forward(arrays, words, out)
    return (out, lse) if return_lse else out


def flash_attention_backward(
    d_out: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    d_lse: Any = None,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    sinks: Any = None,
    mask: Any = None,
    score: Any = None,
    dropout: Any = None,
    align: str | int = "bottom-right",
    deterministic: bool = False,
    batch_invariant: bool = False,
) -> Gradients:
    """Gradients of ``flash_attention`` at the same keywords, recomputing the probabilities from lse.

    Args:
        d_out: gradient of out, its shape and dtype.
        out, lse: what the forward returned.
        d_lse: gradient of lse, float32 [batch, num_q_heads, seqlen_q], or None.
        deterministic: True fixes the order of every sum: the same bits on every run, at some cost in time.

    Returns:
        Gradients(dq, dk, dv), shaped and typed as q, k, v. Rows without keys have gradient 0.

    Raises:
        As ``flash_attention``.
    """
    _refuse_absent(bias=bias, sinks=sinks, dropout=dropout)
    words = Keywords(scale, causal, _pair(window), softcap, mask, score, align, deterministic, batch_invariant)
    arrays = {"d_out": d_out, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    arrays |= {name: x for name, x in (("d_lse", d_lse), ("alibi_slopes", alibi_slopes)) if x is not None}
    return door_of(arrays).backward(arrays, words)


def flash_attention_vjp(q: Any, k: Any, v: Any, **keywords: Any) -> tuple[tuple[Any, Any], Callable[..., Gradients]]:
    """``flash_attention`` with its pullback.

    Returns:
        ((out, lse), pullback); ``pullback(d_out, d_lse=None)`` gives Gradients by name.

    Raises:
        As ``flash_attention``.
    """
    keywords = {name: value for name, value in keywords.items() if name not in ("return_lse",)}
    out, lse = flash_attention(q, k, v, return_lse=True, **keywords)
    keywords.pop("out", None)

    def pullback(d_out: Any, d_lse: Any = None) -> Gradients:
        return flash_attention_backward(d_out, q, k, v, out, lse, d_lse=d_lse, **keywords)

    return (out, lse), pullback


def explain(q: Any, k: Any, v: Any, *, backward: bool = False, **keywords: Any) -> Plan:
    """The plan of a call without running it: kernels, tiles, grid, shared memory, workspace, and the reasons.

    Args:
        backward: the plan of the gradients instead.
        keywords: those of ``flash_attention``.

    Raises:
        As ``flash_attention``.
    """
    slopes = keywords.pop("alibi_slopes", None)
    _refuse_absent(**{name: keywords.pop(name, None) for name in ("bias", "sinks", "dropout")})
    keywords = {name: value for name, value in keywords.items() if name not in ("return_lse", "out")}
    keywords["window"] = _pair(keywords.get("window"))
    for name in keywords.keys() - set(Keywords._fields):
        rule = "is no option of flash_attention"
        raise ArgumentTypeError(name, keywords[name], rule, f"there are: {', '.join(Keywords._fields)}")
    arrays = {"q": q, "k": k, "v": v}
    if slopes is not None:
        arrays["alibi_slopes"] = slopes
    return door_of(arrays).explain(arrays, Keywords(**keywords), backward)


def _pair(window: Any) -> Any:
    return tuple(window) if isinstance(window, list) else window


def _refuse_absent(**arguments: Any) -> None:
    instead = {
        "bias": "alibi_slopes= and score= change scores without an array",
        "sinks": "merge_states can join a sink's (out=0, lse=sink) to a result",
        "dropout": "use no dropout on the probabilities",
    }
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedError(name, type(value).__name__, "has no kernel yet", instead[name])
