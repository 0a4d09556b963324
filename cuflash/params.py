"""Kernel parameters as NumPy structs. Twin of cuda_src/attention/params.cuh: same names, same order, same bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cuflash.masks import Mask
from cuflash.scores import Score

__all__ = ["STRIDES", "pack", "params_dtype", "strides_of"]

STRIDES = np.dtype([(axis, np.int64) for axis in ("batch", "row", "head", "dim")], align=True)


def params_dtype(
    pointers: tuple[str, ...],
    strides: tuple[str, ...],
    integers: tuple[str, ...],
    floats: tuple[str, ...],
    mask: Mask,
    score: Score,
) -> np.dtype[Any]:
    """The struct of one kernel: pointers, strides in elements, 32-bit integers, floats, then the features' own."""
    fields: list[tuple[str, Any]] = [(name, np.uint64) for name in pointers]
    fields += [(name, STRIDES) for name in strides]
    fields += [(name, np.int32) for name in integers]
    fields += [(name, np.float32) for name in floats]
    fields += [("mask", mask.params_dtype()), ("score", score.params_dtype())]
    return np.dtype(fields, align=True)


def strides_of(strides: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Public layout [batch, row, head, dim] to the order of ``Strides``."""
    batch, row, head, dim = strides
    return (batch, row, head, dim)


def pack(dtype: np.dtype[Any], values: Mapping[str, Any]) -> bytes:
    """The struct's bytes; fields without a value stay zero (pointers are patched by the executor)."""
    record = np.zeros((), dtype)
    for name, value in values.items():
        record[name] = value
    return record.tobytes()
