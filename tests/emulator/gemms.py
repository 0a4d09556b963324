"""The two matrix products of kernels/, whole or with one planted fault."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from primitive_case import Array, Case, Map

TILE = 64


def _inputs(m: int, n: int, depth: int, element: str) -> tuple[Array, Array]:
    random = np.random.default_rng(m * 7919 + n * 31 + depth)
    dtype = np.dtype(np.float16 if element == "float16" else ml_dtypes.bfloat16)
    a, b = (random.standard_normal((rows, depth)).astype(dtype) for rows in (m, n))
    return a, b


def gemm_sm80(m: int, n: int, depth: int, fault: str = "none", element: str = "float16") -> Case:
    a, b = _inputs(m, n, depth, element)
    along_n = -(-n // TILE)
    grid = -(-m // TILE) * along_n
    out = np.full((m, n), np.nan, np.float32)
    entry = f"gemm<{element}, Fault::{fault}>"
    return Case("gemm_sm80", "gemm_sm80", entry, (a, b), out, (m, n, depth, along_n), (), 128, grid, 4 * 8192)


def gemm_sm90(m: int, n: int, depth: int, fault: str = "none", element: str = "float16") -> Case:
    a, b = _inputs(m, n, depth, element)
    along_n = -(-n // TILE)
    grid = -(-m // TILE) * along_n
    out = np.full((m, n), np.nan, np.float32)
    maps = (
        Map("in0", element, (depth, m), (depth * 2,), (TILE, TILE), 128),
        Map("in1", element, (depth, n), (depth * 2,), (TILE, TILE), 128),
        Map("out", "float32", (n, m), (n * 4,), (TILE, TILE), 0),
    )
    entry = f"gemm<{element}, Fault::{fault}>"
    shared = 4 * 8192 + TILE * TILE * 4 + 64
    return Case("gemm_sm90", "gemm_sm90", entry, (a, b), out, (m, n, depth, along_n), maps, 160, grid, shared)


def expected(case: Case) -> Array:
    """A B^T in float64."""
    a, b = case.inputs
    return a.astype(np.float64) @ b.astype(np.float64).T
