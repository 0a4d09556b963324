"""Plans of named shapes for GPUs that need not be here, and their kernels compiled for them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from cuflash.architectures import ARCHITECTURES, Architecture, Device
from cuflash.backends import ANY_FAMILY, why_no_gpu
from cuflash.errors import ArgumentError, CompileError, CuflashError
from cuflash.jit import compile_cubin, load_all
from cuflash.plan import Plan, backward_plan, forward_plan
from cuflash.presets import Shape
from cuflash.problem import Keywords, Problem, spec_of_contiguous
from cuflash.variant import Variant

__all__ = [
    "architectures",
    "compile_many",
    "compile_one",
    "device_here",
    "device_like",
    "load_ahead",
    "plans",
    "resources_in",
    "unique_variants",
]

# Multiprocessors of the usual card of each capability; a plan's grid may depend on them.
_SM_COUNTS = {(8, 0): 108, (8, 6): 84, (8, 7): 16, (8, 9): 128, (9, 0): 132, (10, 0): 148, (10, 3): 160, (12, 0): 170}


def architectures(names: Iterable[str]) -> list[Architecture]:
    """Rows by target, with or without its suffix ("sm_90", "sm_90a", "90"); all rows for "all".

    Raises:
        ArgumentError: a target that is not in the table.
    """
    rows = list(ARCHITECTURES.values())
    by_name = {f"{major}{minor}": row for (major, minor), row in ARCHITECTURES.items()}
    found = []
    for name in names:
        key = name.lower().removeprefix("sm_").removesuffix("a")
        if name != "all" and key not in by_name:
            targets = ", ".join(row.target for row in rows)
            raise ArgumentError("arch", name, "is not in the table", f"there are: all, {targets}")
        found += rows if name == "all" else [by_name[key]]
    return list(dict.fromkeys(found))


def device_like(row: Architecture, family: str = ANY_FAMILY) -> Device:
    """A card of this architecture as plain data, restricted to one kernel family unless ``auto``.

    Raises:
        UnsupportedError: the family does not run there.
    """
    device = Device(row.target, row.capability, _SM_COUNTS.get(row.capability, 64), row.shared_limit, row.families)
    return device if family == ANY_FAMILY else device.restricted(family)


def device_here(arch: str | None, family: str = ANY_FAMILY) -> Device:
    """The GPU of this machine, or a card of the named target; sm_90a where neither is there."""
    if arch is None and not why_no_gpu():
        from cuflash.launch import device_of

        device = device_of(0)
        return device if family == ANY_FAMILY else device.restricted(family)
    return device_like(architectures([arch or "sm_90a"])[0], family)


def plans(
    shape: Shape, device: Device, modes: Iterable[str] = ("fwd", "bwd"), deterministic: bool = False
) -> list[Plan]:
    """The forward and backward plans of one shape on contiguous arrays."""
    specs = {name: spec_of_contiguous(extents, shape.dtype) for name, extents in shape.shapes.items()}
    q, k, v, d_out = (specs[name] for name in ("q", "k", "v", "d_out"))
    words = Keywords(**shape.keywords, deterministic=deterministic)
    slopes = spec_of_contiguous((shape.num_q_heads,), "float32") if shape.alibi else None
    found = []
    if "fwd" in modes:
        found.append(forward_plan(Problem.forward(q, k, v, words, alibi_slopes=slopes), device))
    if "bwd" in modes:
        lse = spec_of_contiguous((shape.batch, shape.num_q_heads, shape.seqlen_q), "float32")
        problem = Problem.backward(d_out, q, k, v, d_out, lse, words, alibi_slopes=slopes)
        found.append(backward_plan(problem, device))
    return found


def unique_variants(shapes: Iterable[Shape], device: Device, deterministic: bool = False) -> list[Variant]:
    """Every kernel that the shapes need on the device, each once."""
    launches = (
        launch
        for shape in shapes
        for plan in plans(shape, device, deterministic=deterministic)
        for launch in plan.launches
    )
    return list({launch.variant: None for launch in launches})


def load_ahead(shapes: Iterable[Shape], device: Device, modes: Iterable[str], deterministic: bool = False) -> None:
    """Compiles what the shapes need on this GPU, on all cores; what goes wrong goes wrong again where it is told."""
    needed: dict[Variant, int] = {}
    with suppress(CuflashError):
        for shape in shapes:
            for launch in (one for plan in plans(shape, device, modes, deterministic) for one in plan.launches):
                needed[launch.variant] = max(launch.shared_bytes, needed.get(launch.variant, 0))
    with suppress(CuflashError):
        load_all(needed.items())


def compile_many(jobs: Iterable[tuple[Variant, str]], out: Path | None) -> Iterator[dict[str, Any]]:
    """``compile_one`` over all cores, results in order; NVRTC works outside Python's lock."""
    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        yield from compilers.map(lambda job: compile_one(job[0], job[1], out), jobs)


def compile_one(variant: Variant, target: str, out: Path | None) -> dict[str, Any]:
    """Compiles a kernel through NVRTC, no GPU needed, and writes the cubin into ``out`` if given.

    A refusal is told in ``error`` and makes ``ok`` False; spilled registers are told in ``spill_bytes``.
    """
    begin = time.perf_counter()
    row: dict[str, Any] = {
        "symbol": variant.symbol,
        "target": target,
        "digest": variant.digest,
        "error": "",
        "bytes": 0,
    }
    try:
        cubin = compile_cubin(variant, target)
        row |= {"bytes": len(cubin.code), "log": cubin.log.strip()}
        if out is not None:
            path = out / f"{variant.symbol}.{variant.digest[:8]}.{target}.cubin"
            path.write_bytes(cubin.code)
            row["file"] = str(path)
    except CompileError as error:
        row |= {"log": error.log, "error": str(error)}
    row |= resources_in(row["log"])
    return row | {"seconds": time.perf_counter() - begin, "ok": not row["error"]}


def resources_in(log: str) -> dict[str, int]:
    """Registers a thread and spilled bytes a thread, from the report of ptxas."""
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", log)]
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill", log)]
    return {"registers": max(registers, default=0), "spill_bytes": sum(spills)}
