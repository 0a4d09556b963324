"""Is attention right here? Forward and backward against float64, within twice the error of an unfused computation."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from cuflash import reference
from cuflash.backends import ANY_FAMILY, eager_on
from cuflash.catalog import unique_variants
from cuflash.dtypes import DTYPES
from cuflash.eager import Eager
from cuflash.emulator_build import kernel_library
from cuflash.emulator_options import EmulatorOptions
from cuflash.errors import CuflashError, UnsupportedError
from cuflash.presets import Shape, preset_shapes
from cuflash.problem import Keywords

__all__ = ["CaseResult", "Deviation", "cases", "check_case", "compare", "operands", "run"]

FLOOR = 1e-5  # absolute; the part of the budget that does not depend on the dtype
QUICK = ("minilm", "gpt2", "llama3-8b", "whisper-large cross", "gemma2-9b local")

# What models rarely do and users do anyway: tails, rows without keys, odd dimensions, no keys at all.
EDGES = (
    Shape("one query, one key", 2, 2, 64, 1, 1, dtype="float16"),
    Shape("rows without keys", 2, 2, 64, 70, 33, causal=True),
    Shape("top-left", 2, 1, 64, 33, 70, causal=True, align="top-left"),
    Shape("no keys", 2, 2, 64, 5, 0),
    Shape("odd head_dims", 3, 1, 13, 37, 41, head_dim_v=7, dtype="float32"),
    Shape("two-sided window", 2, 2, 48, 67, 67, window=(9, 5), dtype="float16"),
    Shape("left open window", 2, 2, 64, 67, 67, window=(None, 3)),
    Shape("softcap and ALiBi", 4, 2, 64, 65, 65, causal=True, softcap=5.0, alibi=True),
    Shape("negative scale", 2, 2, 64, 50, 50, scale=-0.2),
)


@dataclass(frozen=True)
class Deviation:
    """Largest error of one result against float64, and the most it may be."""

    name: str
    error: float
    budget: float
    why: str = ""

    @property
    def ok(self) -> bool:
        return not self.why and self.error <= self.budget


@dataclass(frozen=True)
class CaseResult:
    """One case on one device; ``failure`` is the exception's text where there was one.

    ``refusal`` is set instead where a forced kernel family does not take the case: neither right nor wrong.
    """

    name: str
    dtype: str
    mask: str
    shape: str
    deviations: tuple[Deviation, ...] = ()
    seconds: float = 0.0
    failure: str = ""
    refusal: str = ""

    @property
    def ok(self) -> bool:
        return not self.failure and all(deviation.ok for deviation in self.deviations)

    @property
    def worst(self) -> Deviation | None:
        """The result nearest to its budget, or furthest beyond it."""

        def fullness(deviation: Deviation) -> float:
            return math.inf if deviation.why else deviation.error / deviation.budget

        return max(self.deviations, key=fullness, default=None)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}


def cases(preset: str = "all", scope: str = "", device: str = "emulator") -> list[Shape]:
    """The shapes to check: real models cut down to what the device and a float64 reference can do in time."""
    rows = list(preset_shapes(preset))
    if scope == "quick":
        rows = [row for row in rows if preset != "all" or row.name in QUICK]
    seqlen, heads = {"quick": (64, 2), "": (96, 2), "full": (192, 4)}[scope]
    if device == "gpu":
        seqlen, heads = {"quick": (256, 4), "": (640, 8), "full": (1024, 8)}[scope]
    rows = [row.reduced(seqlen, heads) for row in rows]
    if scope == "full":
        others = [replace(row, name=f"{row.name} {name}", dtype=name) for row in rows for name in DTYPES]
        rows += [row for row in others if not any(row.name == f"{old.name} {old.dtype}" for old in rows)]
    if preset == "all" and scope != "quick":
        rows += EDGES
    return rows


def operands(shape: Shape, seed: int = 0) -> dict[str, np.ndarray]:
    """q, k, v, d_out (and slopes) in the case's dtype: normal, off-centre, with a few outliers; fixed by the seed."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[shape.dtype].numpy
    arrays = {}
    for name, extents in shape.shapes.items():
        values = rng.standard_normal(extents) + 0.1
        values[rng.random(extents) < 1e-3] *= 5
        arrays[name] = values.astype(dtype)
    if shape.alibi:
        arrays["alibi_slopes"] = 2.0 ** (
            -8.0 * np.arange(1, shape.num_q_heads + 1, dtype=np.float32) / shape.num_q_heads
        )
    return arrays


def compare(
    name: str, got: np.ndarray, exact: np.ndarray, unfused: np.ndarray, special: tuple[str, ...] = ()
) -> Deviation:
    """One result against float64; where NaN and infinity stand is compared before any value.

    ``special`` names what the case expects among "NaN", "+inf" and "-inf": anything else fails even where both sides
    agree, so that a broken case cannot pass by being NaN on both.
    """
    got, unfused = got.astype(np.float64), unfused.astype(np.float64)
    if got.shape != exact.shape:
        return Deviation(name, math.inf, FLOOR, f"shape {got.shape}, not {exact.shape}")
    for what, positions in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = positions(got) != positions(exact)
        if wrong.any():
            where = tuple(int(i) for i in np.argwhere(wrong)[0])
            return Deviation(
                name, math.inf, FLOOR, f"{what} misplaced at {int(wrong.sum())} of {got.size}, first {where}"
            )
        if what not in special and positions(exact).any():
            return Deviation(name, math.inf, FLOOR, f"{what} on both sides, where the case expects none")
    finite = np.isfinite(exact)
    if not finite.any():
        return Deviation(name, 0.0, FLOOR)
    both = finite & np.isfinite(unfused)  # an overflow of the unfused computation is no excuse
    budget = 2 * float(np.max(np.abs(unfused[both] - exact[both]), initial=0.0)) + FLOOR
    return Deviation(name, float(np.abs(got[finite] - exact[finite]).max()), budget)


def check_case(shape: Shape, device: str, eager: Eager, seed: int = 0, forced: bool = False) -> CaseResult:
    """One case, forward and backward; a failure of any kind becomes a row and not an exception."""
    extents = f"{shape.batch}x{shape.num_q_heads}/{shape.num_kv_heads}x{shape.seqlen_q}x{shape.seqlen_k}"
    dims = f"{shape.head_dim}" if shape.head_dim == shape.head_dim_v else f"{shape.head_dim},{shape.head_dim_v}"
    row = CaseResult(shape.name, shape.dtype, shape.mask_name, f"{extents} d{dims}")
    try:
        host = operands(shape, seed)
        begin = time.perf_counter()
        got = _compute(shape, host, device, eager)
        seconds = time.perf_counter() - begin
        exact, unfused = (_oracle(shape, host, precision) for precision in (None, shape.dtype))
        deviations = tuple(
            compare(name, got[name], exact[name], unfused[name], ("-inf",) if name == "lse" else ()) for name in got
        )
        return replace(row, deviations=deviations, seconds=seconds)
    except UnsupportedError as error:
        told = f"{type(error).__name__}: {error}"
        return replace(row, refusal=told) if forced else replace(row, failure=told)
    except Exception as error:
        return replace(row, failure=f"{type(error).__name__}: {error}")


def run(shapes: list[Shape], device: str, family: str = ANY_FAMILY) -> Iterator[CaseResult]:
    """The cases one after another, each as soon as it is known."""
    eager, forced = eager_on(device, family), family != ANY_FAMILY
    results = (check_case(shape, device, eager, forced=forced) for shape in shapes)
    if device != "emulator":
        yield from results
        return
    with ThreadPoolExecutor(2) as builders:  # the next cases' kernels, while this case is emulated
        waiting = [builders.submit(_build_kernels, shape, eager) for shape in shapes]
        yield from results
        for build in waiting:
            build.cancel()


def _build_kernels(shape: Shape, eager: Eager) -> None:
    """Fills the emulator's cache; what goes wrong here goes wrong again, and is reported, where the case runs."""
    instrument = EmulatorOptions.from_environment().instrument
    with contextlib.suppress(CuflashError):
        for variant in unique_variants([shape], eager.backend.device({})):
            kernel_library(variant.source(), instrument)


def _compute(shape: Shape, host: dict[str, np.ndarray], device: str, eager: Eager) -> dict[str, np.ndarray]:
    arrays = _placed(host, device)
    inputs = {name: array for name, array in arrays.items() if name != "d_out"}
    words = Keywords(**shape.keywords)
    out, lse = eager.forward(inputs, words, _poisoned_like(arrays["d_out"]))
    _poison_pool(device, *inputs.values())
    gradients = eager.backward({"d_out": arrays["d_out"], **inputs, "out": out, "lse": lse}, words)
    found = {"out": out, "lse": lse, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
    return {name: array.get() if device == "gpu" else np.asarray(array) for name, array in found.items()}


def _oracle(shape: Shape, host: dict[str, np.ndarray], precision: str | None) -> dict[str, np.ndarray]:
    words = {**shape.keywords, "alibi_slopes": host.get("alibi_slopes"), "precision": precision}
    q, k, v, d_out = (host[name] for name in ("q", "k", "v", "d_out"))
    out, lse = reference.attention(q, k, v, **words)
    dq, dk, dv = reference.attention_backward(d_out, q, k, v, **words)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def _placed(host: dict[str, np.ndarray], device: str) -> dict[str, Any]:
    if device != "gpu":
        return dict(host)
    import cupy

    return {name: cupy.asarray(array) for name, array in host.items()}


def _poisoned_like(array: Any) -> Any:
    poisoned = array.copy()
    poisoned[...] = math.nan
    return poisoned


def _poison_pool(device: str, *arrays: Any) -> None:
    """Leaves NaN where the memory pool will take the gradients from, so that an unwritten element shows."""
    if device == "gpu":
        poisoned = [_poisoned_like(array) for array in arrays]
        del poisoned
