"""Parameters of the sm_90 backward. Twin of attention/params_sm90_backward.cuh: same names, same order, same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash.masks import Mask
from cuflash.params import STRIDES
from cuflash.scores import Score

__all__ = ["FINISH_SM90", "PREPARE_SM90", "TENSOR_MAPS", "backward_sm90_params"]

TENSOR_MAPS = ("q", "k", "v", "d_out", "dq", "dk", "dv")
_TENSOR_MAP = np.dtype((np.void, 128))
_ALIGNMENT = 64  # bytes: of a tensor map, so of the struct that begins with one
_SIZES = ("batch", "num_q_heads", "num_kv_heads", "seqlen_q", "seqlen_k", "num_q_blocks", "num_k_blocks")


def backward_sm90_params(mask: Mask, score: Score) -> np.dtype[Any]:
    """``BackwardSm90Params<Mask, Score>``."""
    fields: list[tuple[str, Any]] = [(name, _TENSOR_MAP) for name in TENSOR_MAPS]
    fields += [(name, np.uint64) for name in ("lse_log2", "delta", "dq_accumulator", "dq_turns", "tickets")]
    fields += [("stat_rows", np.int64)]
    fields += [(name, np.int32) for name in (*_SIZES, "heads_per_section")]
    fields += [(name, np.float32) for name in ("softmax_unit", "pre_scale", "grad_scale")]
    fields += [("mask", mask.params_dtype()), ("score", score.params_dtype())]
    packed = np.dtype(fields, align=True)
    assert packed.fields is not None and packed.names is not None
    places = [packed.fields[name] for name in packed.names]
    return np.dtype(
        {
            "names": list(packed.names),
            "formats": [place[0] for place in places],
            "offsets": [place[1] for place in places],
            "itemsize": -(-packed.itemsize // _ALIGNMENT) * _ALIGNMENT,
        }
    )


PREPARE_SM90 = np.dtype(
    [(name, np.uint64) for name in ("out", "d_out", "lse", "d_lse", "lse_log2", "delta")]
    + [(name, np.uint64) for name in ("dq_accumulator", "dq_turns", "tickets")]
    + [(name, STRIDES) for name in ("out_strides", "d_out_strides", "d_lse_strides")]
    + [(name, np.int64) for name in ("stat_rows", "accumulator_floats")]
    + [(name, np.int32) for name in ("num_q_heads", "seqlen_q", "head_dim_v", "num_row_blocks", "turns")],
    align=True,
)

FINISH_SM90 = np.dtype(
    [(name, np.uint64) for name in ("dq_accumulator", "dq_turns", "dq")]
    + [("dq_strides", STRIDES)]
    + [(name, np.int32) for name in ("num_q_heads", "seqlen_q", "head_dim", "num_q_blocks")]
    + [("grad_scale", np.float32)],
    align=True,
)
