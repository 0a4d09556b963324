"""The question, checked once and frozen: shapes, strides, dtypes and options. The only place that refuses a caller."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cuflash.dtypes import DTYPES, DType, dtype_of
from cuflash.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from cuflash.masks import Mask, mask_from_keywords, shift_of
from cuflash.score_keywords import score_from_keywords
from cuflash.scores import Score
from cuflash.specs import ArraySpec, Keywords, settled, spec_of_contiguous

__all__ = ["ArraySpec", "Keywords", "Problem", "spec_of_contiguous"]

MAX_HEAD_DIM = 256  # elements; the widest tile of the tables
CONTRACT_HEAD_DIM = 512  # elements; anything above is a mistake rather than a wish
MAX_SEQLEN = 2**30  # rows; positions are 32-bit and a window bound is added to them


@dataclass(frozen=True)
class Problem:
    """A valid attention problem. Array layout: q [batch, seqlen_q, num_q_heads, head_dim] and so on (see docs)."""

    q: ArraySpec
    k: ArraySpec
    v: ArraySpec
    dtype: DType
    mask: Mask
    score: Score
    scale: float
    shift: int
    deterministic: bool = False
    alibi_slopes: ArraySpec | None = None
    out: ArraySpec | None = None
    d_out: ArraySpec | None = None
    has_d_lse: bool = False
    batch_invariant: bool = False  # no result may depend on the batch around it

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def seqlen_q(self) -> int:
        return self.q.shape[1]

    @property
    def seqlen_k(self) -> int:
        return self.k.shape[1]

    @property
    def num_q_heads(self) -> int:
        return self.q.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[3]

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.seqlen_q, self.num_q_heads, self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return (self.batch, self.num_q_heads, self.seqlen_q)

    @classmethod
    def forward(
        cls,
        q: ArraySpec,
        k: ArraySpec,
        v: ArraySpec,
        keywords: Keywords = Keywords(),
        *,
        alibi_slopes: ArraySpec | None = None,
        out: ArraySpec | None = None,
    ) -> Problem:
        """The forward problem.

        Raises:
            ArgumentError, ArgumentTypeError: a shape, dtype or option outside the contract.
            UnsupportedError: a meaningful request beyond this version.
        """
        dtype = _check_arrays(q, k, v)
        keywords = settled(keywords)
        scale = 1.0 / math.sqrt(max(q.shape[3], 1)) if keywords.scale is None else keywords.scale
        has_alibi = alibi_slopes is not None
        problem = cls(
            q=q,
            k=k,
            v=v,
            dtype=dtype,
            mask=mask_from_keywords(keywords.causal, keywords.window, keywords.mask),
            score=score_from_keywords(scale, keywords.softcap, has_alibi, keywords.score),
            scale=scale,
            shift=shift_of(keywords.align, q.shape[1], k.shape[1]),
            deterministic=keywords.deterministic,
            alibi_slopes=alibi_slopes,
            out=out,
            batch_invariant=keywords.batch_invariant,
        )
        if alibi_slopes is not None:
            _check_slopes(alibi_slopes, problem)
        if out is not None:
            _check_like("out", out, problem.out_shape, dtype)
            _check_no_self_overlap("out", out)
        return problem

    @classmethod
    def backward(
        cls,
        d_out: ArraySpec,
        q: ArraySpec,
        k: ArraySpec,
        v: ArraySpec,
        out: ArraySpec,
        lse: ArraySpec,
        keywords: Keywords = Keywords(),
        *,
        d_lse: ArraySpec | None = None,
        alibi_slopes: ArraySpec | None = None,
    ) -> Problem:
        """The backward problem; raises as ``forward``."""
        base = cls.forward(q, k, v, keywords, alibi_slopes=alibi_slopes)
        _check_like("out", out, base.out_shape, base.dtype)
        _check_like("d_out", d_out, base.out_shape, base.dtype)
        _check_like("lse", lse, base.lse_shape, DTYPES["float32"])
        if d_lse is not None:
            _check_like("d_lse", d_lse, base.lse_shape, DTYPES["float32"])
        fields = {name: getattr(base, name) for name in base.__dataclass_fields__}
        fields.update(out=out, d_out=d_out, has_d_lse=d_lse is not None)
        return cls(**fields)


def _check_arrays(q: ArraySpec, k: ArraySpec, v: ArraySpec) -> DType:
    for name, spec, axes in (
        ("q", q, "[batch, seqlen_q, num_q_heads, head_dim]"),
        ("k", k, "[batch, seqlen_k, num_kv_heads, head_dim]"),
        ("v", v, "[batch, seqlen_k, num_kv_heads, head_dim_v]"),
    ):
        if len(spec.shape) != 4:
            raise ArgumentError(f"{name}.shape", spec.shape, f"must have the four axes {axes}")
        if spec.shape[1] >= MAX_SEQLEN:
            raise ArgumentError(f"{name}.shape", spec.shape, f"must have fewer than {MAX_SEQLEN} rows")
        _check_address(name, spec)
    dtype = dtype_of("q", q.dtype)
    for name, spec in (("k", k), ("v", v)):
        if dtype_of(name, spec.dtype) is not dtype:
            raise ArgumentTypeError(f"{name}.dtype", spec.dtype, f"must equal q.dtype={q.dtype}", "cast one of them")
        if spec.shape[0] != q.shape[0]:
            raise ArgumentError(f"{name}.shape", spec.shape, f"must have q's batch of {q.shape[0]}")
    if k.shape[3] != q.shape[3]:
        raise ArgumentError("k.shape", k.shape, f"must have q's head_dim of {q.shape[3]}")
    if v.shape[:3] != k.shape[:3]:
        raise ArgumentError("v.shape", v.shape, f"must agree with k's batch, seqlen_k and num_kv_heads {k.shape[:3]}")
    _check_heads(q.shape[2], k.shape[2])
    _check_head_dim("head_dim", q.shape[3])
    _check_head_dim("head_dim_v", v.shape[3])
    return dtype


def _check_address(argument: str, spec: ArraySpec) -> None:
    itemsize = dtype_of(argument, spec.dtype).itemsize
    if spec.alignment < itemsize and 0 not in spec.shape:
        rule = f"divides its address, which must be a multiple of the {itemsize}-byte element"
        raise ArgumentError(f"{argument}.alignment", spec.alignment, rule, "pass a copy")


def _check_heads(num_q_heads: int, num_kv_heads: int) -> None:
    if num_kv_heads == 0 and num_q_heads == 0:
        return
    if num_kv_heads == 0 or num_q_heads % num_kv_heads:
        rule = f"must be a multiple of num_kv_heads={num_kv_heads}"
        raise ArgumentError("num_q_heads", num_q_heads, rule, "query head h reads key head h // (q heads / kv heads)")


def _check_head_dim(argument: str, value: int) -> None:
    if not 1 <= value <= CONTRACT_HEAD_DIM:
        raise ArgumentError(argument, value, f"must lie between 1 and {MAX_HEAD_DIM}")
    if value > MAX_HEAD_DIM:
        raise UnsupportedError(argument, value, f"has no kernel yet; 1 to {MAX_HEAD_DIM} have", "split the heads")


def _check_slopes(slopes: ArraySpec, problem: Problem) -> None:
    if slopes.dtype != "float32":
        raise ArgumentTypeError("alibi_slopes.dtype", slopes.dtype, "must be float32", "cast with .astype('float32')")
    allowed = ((problem.num_q_heads,), (problem.batch, problem.num_q_heads))
    if slopes.shape not in allowed:
        raise ArgumentError("alibi_slopes.shape", slopes.shape, f"must be {allowed[0]} or {allowed[1]}")
    if slopes.shape[-1] > 1 and 0 not in slopes.shape and slopes.strides[-1] != 1:
        raise ArgumentError("alibi_slopes.strides", slopes.strides, "must be contiguous over heads")
    _check_address("alibi_slopes", slopes)


def _check_like(argument: str, spec: ArraySpec, shape: tuple[int, ...], dtype: DType) -> None:
    if spec.shape != shape:
        raise ArgumentError(f"{argument}.shape", spec.shape, f"must be {shape}")
    if spec.dtype != dtype.name:
        raise ArgumentTypeError(f"{argument}.dtype", spec.dtype, f"must be {dtype.name}")
    _check_address(argument, spec)


def _check_no_self_overlap(argument: str, spec: ArraySpec) -> None:
    reach = 0  # elements covered by the axes looked at so far, smallest stride first
    for stride, extent in sorted((abs(s), n) for s, n in zip(spec.strides, spec.shape, strict=True) if n > 1):
        if stride <= reach:
            raise ArgumentError(f"{argument}.strides", spec.strides, "let two elements share memory", "pass a copy")
        reach += stride * (extent - 1)
