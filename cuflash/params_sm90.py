"""Parameters of the sm_90 forward kernel. Twin of attention/params_sm90.cuh: same names, same order, same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash.masks import Mask
from cuflash.params import STRIDES
from cuflash.scores import Score

__all__ = ["COMBINE", "TENSOR_MAPS", "forward_sm90_params_dtype"]

TENSOR_MAPS = ("q_map", "k_map", "v_map", "out_map")
_TENSOR_MAP = np.dtype((np.void, 128))
_ALIGNMENT = 64  # bytes: of a tensor map, so of the struct that begins with one
_INTEGERS = (
    "num_q_heads",
    "seqlen_q",
    "seqlen_k",
    "head_dim_v",
    "group",
    "tile_heads",
    "tile_rows",
    "num_q_blocks",
    "num_splits",
    "num_tiles",
    "section_heads",
)

# ForwardCombineParams
COMBINE = np.dtype(
    [(name, np.uint64) for name in ("split_out", "split_lse", "out", "lse")]
    + [("out_strides", STRIDES), ("split_rows", np.int64)]
    + [(name, np.int32) for name in ("num_q_heads", "seqlen_q", "head_dim_v", "num_splits")],
    align=True,
)


def forward_sm90_params_dtype(mask: Mask, score: Score) -> np.dtype[Any]:
    """``ForwardSm90Params<Mask, Score>``."""
    fields: list[tuple[str, Any]] = [(name, _TENSOR_MAP) for name in TENSOR_MAPS]
    fields += [(name, np.uint64) for name in ("out", "lse", "counter")]
    fields += [("out_strides", STRIDES), ("split_rows", np.int64)]
    fields += [(name, np.int32) for name in _INTEGERS]
    fields += [("softmax_unit", np.float32), ("pre_scale", np.float32)]
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
