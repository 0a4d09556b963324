"""Every row of the tile tables through NVRTC, for every target, without a GPU: no spills but the known, no warnings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product

import pytest

from cuflash.architectures import ARCHITECTURES, Device
from cuflash.plan import Plan, backward_plan, forward_plan
from cuflash.problem import Keywords, Problem, spec_of_contiguous
from cuflash.variant import Variant

jit = pytest.importorskip("cuflash.jit")
pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="NVRTC comes with CuPy and nvidia-cuda-nvrtc")

TARGETS = {row.target: row for row in ARCHITECTURES.values()}
HEAD_DIMS = {"float16": (128,), "bfloat16": (32, 64, 96, 128, 192, 256), "float32": (64, 128, 256)}
ONE_EACH = {"bfloat16": (64,)}


def problem(kind: str, dtype: str, head_dim: int, words: Keywords, head_dim_v: int | None = None) -> Problem:
    q, k, v = (spec_of_contiguous((1, 4096, 4, dim), dtype) for dim in (head_dim, head_dim, head_dim_v or head_dim))
    if kind == "forward":
        return Problem.forward(q, k, v, words)
    out = spec_of_contiguous((1, 4096, 4, head_dim_v or head_dim), dtype)
    return Problem.backward(out, q, k, v, out, spec_of_contiguous((1, 4, 4096), "float32"), words)


def plan(kind: str, target: str, dtype: str, head_dim: int, words: Keywords, head_dim_v: int | None = None) -> Plan:
    row = TARGETS[target]
    device = Device(target, row.capability, 132, row.shared_limit, row.families[-1:])
    planner = forward_plan if kind == "forward" else backward_plan
    return planner(problem(kind, dtype, head_dim, words, head_dim_v), device)


def variants(
    targets: Iterable[str], masks: Iterable[Keywords], head_dims: Mapping[str, tuple[int, ...]] = HEAD_DIMS
) -> Iterator[tuple[str, Variant]]:
    """Each distinct kernel once per target."""
    found: dict[tuple[str, Variant], None] = {}
    for target, words, kind in product(targets, masks, ("forward", "backward")):
        for dtype, dims in head_dims.items():
            for dim in dims:
                found.update(
                    {(target, launch.variant): None for launch in plan(kind, target, dtype, dim, words).launches}
                )
    yield from found


def check_compiles(target: str, variant: Variant) -> None:
    log = jit.compile_cubin(variant, target).log
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
    assert spills and not any(spills), log
    assert not re.search(r"C75\d\d|serializ|warning #", log), log


# All rows for a GPU with much shared memory and for one with little, and each other target once: their instructions are
# the same, so that what compiles for one compiles for the next; the exhaustive test does not rely on it.
FULL_TARGETS = ("sm_80", "sm_86")
QUICK = list(variants(FULL_TARGETS[:1], (Keywords(causal=True),)))
QUICK += list(variants(FULL_TARGETS[1:], (Keywords(),)))
QUICK += list(variants(sorted(set(TARGETS) - set(FULL_TARGETS)), (Keywords(causal=True),), ONE_EACH))
FEATURES = (Keywords(), Keywords(causal=True), Keywords(window=(128, 0)), Keywords(softcap=20.0))
# Where 64 columns used to spill: without dS's way through shared memory, and under scores and masks that need most.
TIGHT = (*FEATURES[2:], *(words._replace(deterministic=True) for words in FEATURES))
QUICK += [pair for pair in variants(("sm_90a",), TIGHT, ONE_EACH) if pair not in QUICK]
WIDE = variants(("sm_120",), TIGHT[3:5], {"float32": (256,), "bfloat16": (128,)})
QUICK += [pair for pair in WIDE if pair not in QUICK]
FULL = list(variants(TARGETS, (*FEATURES, Keywords(causal=True, deterministic=True))))


@pytest.mark.parametrize(("target", "variant"), QUICK, ids=[f"{t}-{v.symbol}" for t, v in QUICK])
def test_the_tables_compile_within_their_registers(target: str, variant: Variant) -> None:
    check_compiles(target, variant)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("target", "variant"), FULL, ids=[f"{t}-{v.symbol}-{i}" for i, (t, v) in enumerate(FULL)])
def test_every_mask_and_target_compiles_within_its_registers(target: str, variant: Variant) -> None:
    check_compiles(target, variant)


def ptx(variant: Variant, target: str) -> str:
    """What NVRTC hands to ptxas."""
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(variant.source(), f"{variant.symbol}.cu", (), ())
    try:
        virtual = target.replace("sm_", "compute_")
        nvrtc.compileProgram(program, (*jit.options(virtual), "--device-as-default-execution-space"))
        text = nvrtc.getPTX(program)
        return str(text if isinstance(text, str) else text.decode())
    finally:
        nvrtc.destroyProgram(program)


def moved_bases(text: str) -> list[str]:
    """Shared addresses ``base + constant`` of copies that are used after ``base`` has moved on.

    That is right as it stands, but ptxas (12.9, 13.0) may fold the constant into the access and take the moved base.
    """
    lines = [line.strip() for line in text.splitlines()]
    assert any(line.startswith("cp.async.") for line in lines)
    results = [re.match(r"(?:@!?%p\d+ )?[a-z][\w.]*\s+(%r\d+),", line) for line in lines]
    defined: dict[str, list[int]] = {}
    for place, result in enumerate(results):
        if result:
            defined.setdefault(result[1], []).append(place)
    found = []
    for place, line in enumerate(lines):
        total = re.match(r"add\.s32\s+(%r\d+), (%r\d+), -?\d{4,};", line)  # tiles lie thousands of bytes apart
        moves = [later for later in defined.get(total[2], ()) if later > place] if total else []
        if total and moves and any(re.search(rf", {total[1]}\b", later) for later in lines[moves[0] + 1 :]):
            found.append(line)
    return found


def with_narrow_copies(kernel: Variant) -> Iterator[Variant]:
    import dataclasses

    for width in (kernel.dtype.itemsize, 4, 8):
        fields = tuple((n, width if n == "kCopyBytes" else value) for n, value in kernel.fields)
        yield dataclasses.replace(kernel, fields=fields)


WORDS = (Keywords(), FEATURES[3], Keywords(deterministic=True))
NARROW = [
    kernel
    for kind, dtype, word in product(("forward", "backward"), ("bfloat16", "float32"), WORDS)
    for launch in plan(kind, "sm_80", dtype, 64, word).launches
    if launch.variant.kernel in ("forward_sm80", "backward_sm80", "backward_dq_sm80")
    for kernel in with_narrow_copies(launch.variant)
]


@pytest.mark.parametrize("variant", NARROW, ids=[f"{v.symbol}-{i}" for i, v in enumerate(NARROW)])
def test_copies_keep_their_bases(variant: Variant) -> None:
    assert moved_bases(ptx(variant, "sm_80")) == []


def test_a_faulty_kernel_is_reported_with_its_name() -> None:
    """The check can fail: an unknown field in Config is a CompileError that says how to see it."""
    import dataclasses

    from cuflash.errors import CompileError

    good = plan("forward", "sm_80", "bfloat16", 64, Keywords()).launches[0].variant
    broken = dataclasses.replace(good, fields=(*good.fields[:-1], ("kMisspelt", 1)))
    with pytest.raises(CompileError, match="forward_sm80_bf16_d64") as caught:
        jit.compile_cubin(broken, "sm_80")
    assert "cuflash compile" in str(caught.value)


def test_a_spill_is_noticed() -> None:
    """The check can fail: 255 registers cannot hold a 128-row tile of 256 output columns in four warps."""
    import dataclasses

    good = plan("forward", "sm_80", "bfloat16", 256, Keywords()).launches[0].variant
    fields = tuple((n, {"kWarps": 4, "kBlockQ": 128}.get(n, value)) for n, value in good.fields)
    with pytest.raises(AssertionError):
        check_compiles("sm_80", dataclasses.replace(good, fields=fields, threads=128))
