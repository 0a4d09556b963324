"""What `explain` prints: plans as plain data, with resources, the best that a model allows, and what this GPU does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from cuflash.architectures import architecture_of
from cuflash.backends import why_no_gpu
from cuflash.catalog import device_here, plans, resources_in
from cuflash.errors import ArgumentError
from cuflash.jit import compile_cubin
from cuflash.plan import Launch, Plan
from cuflash.prediction import predict
from cuflash.presets import Shape

__all__ = ["describe", "explain_shapes"]

_MODES = {"forward": "fwd", "backward": "bwd"}  # as the benchmark calls them
_BUDGET_MS = 50.0


def explain_shapes(
    shapes: Iterable[Shape], *, arch: str | None, registers: bool, measure: bool, deterministic: bool, family: str
) -> Iterator[tuple[Shape, list[dict[str, Any]]]]:
    """Each shape with its forward and backward plans, described.

    Raises:
        ArgumentError: ``measure`` with a GPU that is not the one here.
    """
    if measure and (why := why_no_gpu() or (arch and f"--arch {arch} asks for another GPU")):
        raise ArgumentError("measure", measure, f"needs the GPU that it explains: {why}", "leave it out")
    peak = _matmul_tflops() if measure else None
    for shape in shapes:
        found = plans(shape, device_here(arch, family), deterministic=deterministic)
        described = [describe(plan, registers) for plan in found]
        if measure:
            for plan in described:
                plan |= {"tflops": _tflops(shape, plan["kind"], family, deterministic), "matmul_tflops": peak}
        yield shape, described


def describe(plan: Plan, with_registers: bool = False) -> dict[str, Any]:
    """A plan as plain data for printing; registers and spills cost a compilation each."""
    launches = [_describe_launch(launch) for launch in plan.launches]
    if with_registers:
        target = architecture_of(plan.device.capability).target
        for launch, printed in zip(plan.launches, launches, strict=True):
            printed |= resources_in(compile_cubin(launch.variant, target).log)
    prediction = predict(plan)
    return {
        "kind": plan.kind,
        "device": plan.device.name,
        "gflops": plan.flops / 1e9,
        "workspace_bytes": plan.workspace_bytes,
        "predicted_share": prediction and prediction.share,
        "bound_by": prediction and prediction.bound,
        "reasons": list(plan.reasons),
        "launches": launches,
    }


def _describe_launch(launch: Launch) -> dict[str, Any]:
    variant = launch.variant
    return {
        "kernel": variant.symbol,
        "family": variant.family,
        "grid": launch.grid,
        "block": launch.block,
        "shared_bytes": launch.shared_bytes,
        "config": dict(variant.fields),
        "digest": variant.digest[:12],
    }


def _tflops(shape: Shape, kind: str, family: str, deterministic: bool) -> float:
    from cuflash.benchmark import Settings, measure

    settings = Settings((_MODES[kind],), family, deterministic, _BUDGET_MS, 1, {})
    (row,) = measure((shape,), {}, settings)
    return row.cuflash.tflops


def _matmul_tflops() -> float | None:
    from cuflash import peers_torch, timing

    return timing.matmul_peak((peers_torch.product, timing.product))
