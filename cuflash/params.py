"""Kernel parameters as NumPy structs. Twin of cuda_src/attention/params*.cuh: same names, same order, same bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cuflash.masks import Mask
from cuflash.scores import Score

__all__ = ["FINISH", "PREPARE", "STRIDES", "backward_params", "forward_params", "pack", "pointer_offsets"]

STRIDES = np.dtype([(axis, np.int64) for axis in ("batch", "row", "head", "dim")], align=True)


def _struct(pointers: str, strides: str, integers: str, floats: str, *features: tuple[str, Any]) -> np.dtype[Any]:
    """Pointers, strides in elements, 32-bit integers, floats, then what the features add; C layout."""
    fields: list[tuple[str, Any]] = [(name, np.uint64) for name in pointers.split()]
    fields += [(name, STRIDES) for name in strides.split()]
    fields += [(name, np.int32) for name in integers.split()]
    fields += [(name, np.float32) for name in floats.split()]
    return np.dtype([*fields, *features], align=True)


def _features(mask: Mask, score: Score) -> tuple[tuple[str, Any], tuple[str, Any]]:
    return ("mask", mask.params_dtype()), ("score", score.params_dtype())


def forward_params(mask: Mask, score: Score) -> np.dtype[Any]:
    """``ForwardParams`` of attention/params.cuh."""
    return _struct(
        "q k v out lse",
        "q_strides k_strides v_strides out_strides",
        "batch num_q_heads num_kv_heads seqlen_q seqlen_k head_dim head_dim_v num_q_blocks",
        "softmax_unit pre_scale",
        *_features(mask, score),
    )


def backward_params(mask: Mask, score: Score) -> np.dtype[Any]:
    """``BackwardParams`` of attention/params_backward.cuh."""
    return _struct(
        "q k v d_out row_base delta dq dk dv dq_accumulator",
        "q_strides k_strides v_strides d_out_strides dq_strides dk_strides dv_strides",
        "batch num_q_heads num_kv_heads seqlen_q seqlen_k head_dim head_dim_v stat_rows num_q_blocks num_k_blocks",
        "softmax_unit pre_scale grad_scale",
        *_features(mask, score),
    )


PREPARE = _struct(
    "out d_out lse d_lse row_base delta dq_accumulator",
    "out_strides d_out_strides d_lse_strides",
    "num_q_heads seqlen_q head_dim_v stat_rows num_row_blocks accumulator_columns",
    "",
)

FINISH = _struct("dq_accumulator dq", "dq_strides", "num_q_heads seqlen_q head_dim num_row_blocks", "grad_scale")


def pack(dtype: np.dtype[Any], values: Mapping[str, Any]) -> bytes:
    """The struct's bytes; fields without a value stay zero (pointers are patched by the executor)."""
    record = np.zeros((), dtype)
    for name, value in values.items():
        record[name] = value
    return record.tobytes()


def pointer_offsets(dtype: np.dtype[Any], score: Score | None = None) -> dict[str, int]:
    """Byte offset of every pointer field, those of the score function by the operand's name."""
    fields: Mapping[str, Any] = dtype.fields or {}
    found = {name: int(entry[1]) for name, entry in fields.items() if entry[0] == np.uint64}
    if score is not None and "score" in fields:
        base = int(fields["score"][1])
        found.update({operand: base + offset for operand, offset in score.operand_offsets().items()})
    return found
