"""Backward plans of the sm_80 family: prepare, the main kernel, and either a second one for dq or a finish.

The fast form adds dq up in float32 across blocks of keys (prepare zeroes the accumulator, finish rounds it); the order
of those additions is not fixed. ``deterministic=True`` computes dq in a kernel of its own instead.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cuflash.access import copy_bytes, store_bytes
from cuflash.architectures import Device, architecture_of
from cuflash.masks import Full
from cuflash.params import FINISH, PREPARE, backward_params, pack, pointer_offsets
from cuflash.plan import Launch, Output, Plan, Pointer
from cuflash.plan_sm80 import access_reason, sizes, softmax_values
from cuflash.problem import Problem, spec_of_contiguous
from cuflash.scores import Identity
from cuflash.tiling import BACKWARD, BACKWARD_DQ, BackwardTile, choose, padded
from cuflash.variant import Variant

__all__ = ["backward"]

PREPARE_WARPS = 4  # a block; memory-bound, so any number does
FINISH_ROWS, FINISH_WARPS = 64, 4
TILE_ROWS = 16  # rows of one piece of the accumulator
ALIGNMENT = 256  # bytes between the parts of the workspace
MAIN = "BackwardParams<Config::Mask, Config::Score>"
STRUCTS = {"backward_prepare": "PrepareParams", "backward_finish": "FinishParams"}
Struct = np.dtype[Any]
Fields = tuple[tuple[str, Any], ...]


def backward(problem: Problem, device: Device) -> Plan:
    """Three launches: prepare, dk and dv (with dq), then dq's finish or dq on its own."""
    return _Backward(problem, device).plan()


class _Backward:
    """The pieces of one plan."""

    def __init__(self, problem: Problem, device: Device) -> None:
        self.problem, self.device = problem, device
        self.row = choose(BACKWARD, problem, device, "backward")
        self.dq_row = choose(BACKWARD_DQ, problem, device, "deterministic backward")
        tile: BackwardTile = self.row.tile
        self.tile = tile
        self.head_dim = padded(problem.head_dim, tile.head_dim_grain)
        self.head_dim_v = padded(problem.head_dim_v, tile.head_dim_grain)
        self.heads = problem.batch * problem.num_q_heads
        self.stat_rows = padded(problem.seqlen_q, math.lcm(tile.block_q, self.dq_row.tile.block_q))
        self.accumulates = not problem.deterministic
        self.reduce_width = architecture_of(device.capability).reduce_width
        self.offsets, self.workspace_bytes = self._workspace()
        names = ("q", "k", "v")
        self.dq, self.dk, self.dv = (spec_of_contiguous(getattr(problem, n).shape, problem.dtype.name) for n in names)

    def _workspace(self) -> tuple[dict[str, int], int]:
        """Byte offsets of row_base, delta and the accumulator; linear in the length."""
        rows = self.heads * self.stat_rows
        tile_rows = padded(self.problem.seqlen_q, TILE_ROWS) * self.heads
        parts = {"row_base": rows * 4, "delta": rows * 4}
        parts["dq_accumulator"] = tile_rows * self.head_dim * 4 if self.accumulates else 0
        offsets, end = {}, 0
        for name, nbytes in parts.items():
            offsets[name] = end
            end += padded(nbytes, ALIGNMENT)
        return offsets, max(end, ALIGNMENT)  # without queries nothing is kept, yet the pointers must point somewhere

    def plan(self) -> Plan:
        problem = self.problem
        launches = [self._prepare(), self._main()]
        launches.append(self._finish() if self.accumulates else self._separate_dq())
        outputs = tuple(
            Output(name, spec.shape, problem.dtype.name)
            for name, spec in (("dq", self.dq), ("dk", self.dk), ("dv", self.dv))
        )
        inputs = ("d_out", "q", "k", "v", "out", "lse", *(("d_lse",) if problem.has_d_lse else ()))
        how = "dq in a kernel of its own: fixed order" if problem.deterministic else "dq added up in float32: any order"
        tile = self.tile
        return Plan(
            kind="backward",
            problem=problem,
            device=self.device,
            launches=tuple(launch for launch in launches if launch.grid),
            inputs=(*inputs, *problem.score.pointers),
            outputs=outputs,
            workspace_bytes=self.workspace_bytes,
            reasons=(
                f"{tile.block_q}x{tile.block_k} tiles, {tile.warps} warps: {self.row.reason}",
                how,
                access_reason(self._width()),
            ),
        )

    def _width(self) -> int:
        problem = self.problem
        assert problem.d_out is not None
        return copy_bytes((problem.q, problem.k, problem.v, problem.d_out), problem.dtype.itemsize)

    def _launch(
        self, kernel: str, dtype: Struct, grid: int, warps: int, shared: int, fields: Fields, values: dict[str, Any]
    ) -> Launch:
        problem = self.problem
        featured = "mask" in (dtype.fields or {})
        variant = Variant(
            kernel=kernel,
            family="sm80",
            dtype=problem.dtype,
            mask=type(problem.mask) if featured else Full,
            score=problem.score if featured else Identity(),
            fields=fields,
            params=f"cuflash::{STRUCTS.get(kernel, MAIN)}",
            params_size=dtype.itemsize,
            threads=32 * warps,
        )
        offsets = pointer_offsets(dtype, problem.score)
        if not problem.has_d_lse:
            offsets.pop("d_lse", None)
        pointers = tuple(
            Pointer(offset, "workspace", self.offsets[name]) if name in self.offsets else Pointer(offset, name)
            for name, offset in offsets.items()
        )
        return Launch(variant, grid, 32 * warps, shared, pack(dtype, values), pointers)

    def _prepare(self) -> Launch:
        problem = self.problem
        assert problem.out is not None and problem.d_out is not None
        itemsize = problem.dtype.itemsize
        # All rows of a thread are in flight at once; wider ones leave registers for half as many.
        rows = 64 if problem.head_dim_v * itemsize <= 512 else 32
        blocks = -(-self.stat_rows // rows)
        values = {
            "out_strides": problem.out.strides,
            "d_out_strides": problem.d_out.strides,
            # lse and its gradient are contiguous [batch, head, row]
            "d_lse_strides": (problem.num_q_heads * problem.seqlen_q, 1, problem.seqlen_q, 0),
            "num_q_heads": problem.num_q_heads,
            "seqlen_q": problem.seqlen_q,
            "head_dim_v": problem.head_dim_v,
            "stat_rows": self.stat_rows,
            "num_row_blocks": blocks,
            "accumulator_columns": self.head_dim if self.accumulates else 0,
        }
        fields = (
            ("kBlockQ", rows),
            ("kWarps", PREPARE_WARPS),
            ("kHeadDimV", padded(problem.head_dim_v)),
            ("kCopyBytes", min(store_bytes(spec, itemsize) for spec in (problem.out, problem.d_out))),
        )
        grid = blocks * self.heads
        return self._launch("backward_prepare", PREPARE, grid, PREPARE_WARPS, 0, fields, values)

    def _main_values(self, tile_q: int, tile_k: int) -> dict[str, Any]:
        problem = self.problem
        assert problem.d_out is not None
        specs = {"q": problem.q, "k": problem.k, "v": problem.v, "d_out": problem.d_out}
        specs |= {"dq": self.dq, "dk": self.dk, "dv": self.dv}
        return {
            **{f"{name}_strides": spec.strides for name, spec in specs.items()},
            **sizes(problem),
            **softmax_values(problem),
            **self._natural_unit(),
            "stat_rows": self.stat_rows,
            "num_q_blocks": -(-problem.seqlen_q // tile_q),
            "num_k_blocks": -(-problem.seqlen_k // tile_k),
            "grad_scale": problem.scale,
        }

    def _natural_unit(self) -> dict[str, float]:
        """float32 exponents are natural: log2 units would round a large lse once more (attention/gradient.cuh)."""
        problem = self.problem
        if problem.dtype.name != "float32":
            return {}
        return {"softmax_unit": 1.0 if problem.score.pre_scale else problem.scale}

    def _main(self) -> Launch:
        problem, tile = self.problem, self.tile
        itemsize = problem.dtype.itemsize
        dtype = backward_params(problem.mask, problem.score)
        values = self._main_values(tile.block_q, tile.block_k)
        fields = (
            ("kBlockQ", tile.block_q),
            ("kBlockK", tile.block_k),
            ("kHeadDim", self.head_dim),
            ("kHeadDimV", self.head_dim_v),
            ("kWarps", tile.warps),
            ("kWarpsK", tile.warps_k),
            ("kPartQ", tile.part_q),
            ("kStages", tile.stages),
            ("kCopyBytes", self._width()),
            ("kStoreBytes", min(store_bytes(spec, itemsize) for spec in (self.dk, self.dv))),
            ("kReduceWidth", self.reduce_width),
            ("kAccumulateDq", self.accumulates),
            ("kPartialDims", (self.head_dim, self.head_dim_v) != (problem.head_dim, problem.head_dim_v)),
        )
        grid = values["num_k_blocks"] * problem.num_kv_heads * problem.batch
        shared = tile.shared_bytes(self.head_dim, self.head_dim_v, itemsize, self.accumulates)
        return self._launch("backward_sm80", dtype, grid, tile.warps, shared, fields, values)

    def _finish(self) -> Launch:
        problem = self.problem
        blocks = -(-problem.seqlen_q // FINISH_ROWS)
        values = {
            "dq_strides": self.dq.strides,
            "num_q_heads": problem.num_q_heads,
            "seqlen_q": problem.seqlen_q,
            "head_dim": problem.head_dim,
            "num_row_blocks": blocks,
            "grad_scale": problem.scale,
        }
        fields = (
            ("kBlockQ", FINISH_ROWS),
            ("kWarps", FINISH_WARPS),
            ("kHeadDim", self.head_dim),
            ("kReduceWidth", self.reduce_width),
            ("kCopyBytes", store_bytes(self.dq, problem.dtype.itemsize)),
        )
        grid = blocks * self.heads
        return self._launch("backward_finish", FINISH, grid, FINISH_WARPS, 0, fields, values)

    def _separate_dq(self) -> Launch:
        problem, tile = self.problem, self.dq_row.tile
        itemsize = problem.dtype.itemsize
        head_dim, head_dim_v = padded(problem.head_dim), padded(problem.head_dim_v)
        dtype = backward_params(problem.mask, problem.score)
        values = self._main_values(tile.block_q, tile.block_k)
        fields = (
            ("kBlockQ", tile.block_q),
            ("kBlockK", tile.block_k),
            ("kHeadDim", head_dim),
            ("kHeadDimV", head_dim_v),
            ("kWarps", tile.warps),
            ("kStages", tile.stages),
            ("kCopyBytes", self._width()),
            ("kStoreBytes", store_bytes(self.dq, itemsize)),
            ("kPartialDims", (head_dim, head_dim_v) != (problem.head_dim, problem.head_dim_v)),
        )
        grid = values["num_q_blocks"] * self.heads
        shared = tile.shared_bytes(head_dim, head_dim_v, itemsize)
        return self._launch("backward_dq_sm80", dtype, grid, tile.warps, shared, fields, values)
