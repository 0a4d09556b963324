"""Cases for the Hopper forward, and the way to run one on the emulator with its race detector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from arrays import case, nans
from oracle import faults

from cuflash import emulator, plan_sm90
from cuflash.architectures import Device
from cuflash.host import NumpyBackend
from cuflash.plan import Plan
from cuflash.presets import Shape
from cuflash.problem import Keywords, Problem
from cuflash.tiling_sm90 import Base, Schedule, TileSm90

Array = np.ndarray[Any, Any]
H200 = Device("NVIDIA H200", (9, 0), 132, 227 * 1024, ("sm90",))


def tile(warpgroups: int = 2, block_k: int = 64, **more: Any) -> TileSm90:
    """A small tile with the table's other choices."""
    plain = TileSm90(warpgroups, block_k, 2, 1, Base.FIXED, Schedule.DYNAMIC, warpgroups > 1, True, 64, "for a test")
    return replace(plain, **more)


def plan(arrays: dict[str, Array], chosen: TileSm90 | None = None, sm_count: int = 3, **words: Any) -> Plan | str:
    """The plan on a small GPU, so that a block serves several tiles."""
    spec = NumpyBackend().spec
    specs = {name: spec(name, array) for name, array in arrays.items() if name in ("alibi_slopes", "out")}
    problem = Problem.forward(*(spec(name, arrays[name]) for name in "qkv"), Keywords(**words), **specs)
    device = replace(H200, sm_count=sm_count)
    return plan_sm90.forward_with_tile(problem, device, chosen) if chosen else plan_sm90.forward(problem, device)


def run(arrays: dict[str, Array], chosen: TileSm90 | None = None, seed: int = 0, **words: Any) -> dict[str, Array]:
    """out and lse from the emulator, with race detection, into arrays of NaN."""
    made = plan(arrays, chosen, **words)
    assert isinstance(made, Plan), made
    found = {
        output.name: nans(output.shape, arrays["q"].dtype if output.name == "out" else "f4") for output in made.outputs
    }
    found.update({name: arrays[name] for name in ("out",) if name in arrays})
    emulator.execute(made, {**arrays, **found}, seed=seed, race=True)
    return found


def check(arrays: dict[str, Array], chosen: TileSm90 | None = None, **words: Any) -> None:
    assert faults(run(arrays, chosen, **words), arrays, **words) == []


def arrays_of(seqlen_q: int, seqlen_k: int = 0, heads: int = 2, head_dim: int = 64, **more: Any) -> dict[str, Array]:
    shape = Shape(
        name="case",
        batch=more.pop("batch", 1),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k or seqlen_q,
        num_q_heads=heads,
        num_kv_heads=more.pop("kv_heads", heads),
        head_dim=head_dim,
        head_dim_v=more.pop("head_dim_v", head_dim),
        **more,
    )
    return {name: array for name, array in case(shape, seed=seqlen_q).items() if name != "d_out"}


FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal, more keys": ({"seqlen_q": 100, "seqlen_k": 260}, {"causal": True}),
    "causal, top-left": ({"seqlen_q": 150, "seqlen_k": 90}, {"causal": True, "align": "top-left"}),
    "window": ({"seqlen_q": 300}, {"window": (70, 30)}),
    "window, rows without keys": ({"seqlen_q": 300, "seqlen_k": 60}, {"window": (20, 0)}),
    "keys nobody sees, ALiBi": ({"seqlen_q": 40, "seqlen_k": 300, "alibi": True}, {"window": (30, 10)}),
    "one row": ({"seqlen_q": 1, "seqlen_k": 130}, {}),
    "grouped heads": ({"seqlen_q": 130, "heads": 6, "kv_heads": 2}, {"causal": True}),
    "packed heads": ({"seqlen_q": 5, "seqlen_k": 130, "heads": 8, "kv_heads": 2}, {"causal": True}),
    "split keys": ({"seqlen_q": 3, "seqlen_k": 1700, "heads": 1}, {}),
    "packed heads, split keys": ({"seqlen_q": 3, "seqlen_k": 1700, "heads": 4, "kv_heads": 1}, {"causal": True}),
    "float16": ({"seqlen_q": 200, "dtype": "float16"}, {"causal": True}),
    "softcap and ALiBi": ({"seqlen_q": 130, "alibi": True}, {"softcap": 5.0, "causal": True}),
    "head_dim 96 and 40": ({"seqlen_q": 130, "head_dim": 96, "head_dim_v": 40}, {"causal": True}),
    "head_dim 256": ({"seqlen_q": 130, "head_dim": 256}, {"causal": True}),
}
MORE_FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({"seqlen_q": 200}, {}),
    "causal, fewer keys": ({"seqlen_q": 260, "seqlen_k": 100}, {"causal": True}),
    "one key": ({"seqlen_q": 130, "seqlen_k": 1}, {"causal": True}),
    "softcap": ({"seqlen_q": 130}, {"softcap": 5.0}),
    "ALiBi, split keys": ({"seqlen_q": 3, "seqlen_k": 1700, "alibi": True}, {}),
    "window, split keys": ({"seqlen_q": 9, "seqlen_k": 2500, "heads": 1}, {"window": (1300, 0)}),
    "negative scale": ({"seqlen_q": 130}, {"scale": -0.2}),
    "zero scale": ({"seqlen_q": 70}, {"scale": 0.0}),
    "head_dim 8": ({"seqlen_q": 70, "head_dim": 8}, {"causal": True}),
    "head_dim 72": ({"seqlen_q": 130, "head_dim": 72}, {}),
    "head_dim 128": ({"seqlen_q": 130, "head_dim": 128}, {}),
    "head_dim 160": ({"seqlen_q": 130, "head_dim": 160}, {"causal": True}),
    "head_dim 192 and 128": ({"seqlen_q": 130, "head_dim": 192, "head_dim_v": 128}, {"causal": True}),
    "head_dim 64 and 256": ({"seqlen_q": 130, "head_dim": 64, "head_dim_v": 256}, {}),
}


def grown(keys: Array) -> None:
    """Later blocks hold ever larger scores: the first base is outgrown again and again."""
    keys *= np.linspace(60, 1, keys.shape[1])[None, :, None, None]


def one_huge(keys: Array) -> None:
    """One score beyond the exponent range, in the block visited last."""
    keys[:, 3] *= 300


EXTREMES: dict[str, Callable[[dict[str, Array]], None]] = {
    "large queries": lambda arrays: np.multiply(arrays["q"], 30, out=arrays["q"]),
    "growing keys": lambda arrays: grown(arrays["k"]),
    "one huge key": lambda arrays: one_huge(arrays["k"]),
    "equal keys": lambda arrays: np.copyto(arrays["k"], arrays["k"][:, :1]),
    "zero queries": lambda arrays: np.multiply(arrays["q"], 0, out=arrays["q"]),
    "very negative scores": lambda arrays: np.multiply(
        np.abs(arrays["k"]), -30 * np.sign(arrays["q"][:, :1]), out=arrays["k"]
    ),
    "large values": lambda arrays: np.multiply(arrays["v"], 3e3, out=arrays["v"]),
}
