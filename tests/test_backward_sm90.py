"""The Hopper backward: every kernel and form under the race detector, hidden NaN, fixed bits, and what it asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from arrays import case, dense, stored, untouched_outside
from oracle import assert_equal_bits, assert_right, expected
from places import Place

from cuflash import plan_sm90_backward, tiling_sm90_backward
from cuflash.architectures import Device
from cuflash.backends import why_no_gpu
from cuflash.plan import Plan
from cuflash.presets import Shape
from cuflash.problem import Keywords, Problem, spec_of_contiguous

Array = np.ndarray[Any, Any]
H200 = Device("NVIDIA H200", (9, 0), 132, 227 * 1024, ("sm90",))


PLACES = ["emulator", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=PLACES)
def hopper(request: pytest.FixtureRequest) -> Iterator[Place]:
    """The emulator dressed as a Hopper GPU under the race detector, then a GPU."""
    yield from places(request.param)


@pytest.fixture(params=PLACES)
def any_order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """The same where all sequences count as long: dq is added up in any order."""
    monkeypatch.setattr(tiling_sm90_backward, "_SHORT", 0)
    yield from places(request.param)


def places(name: str) -> Iterator[Place]:
    if name == "gpu":
        if reason := why_no_gpu():
            pytest.skip(f"no GPU: {reason}")
        yield Place("gpu", "sm90")
        return
    place = Place("emulator", device=Device.emulated((9, 0)))
    with place.schedule(race=True):
        yield place


def problem(arrays: dict[str, Array], **words: Any) -> Problem:
    specs = {name: spec_of_contiguous(arrays[name].shape, arrays[name].dtype.name) for name in ("d_out", "q", "k", "v")}
    batch, seqlen_q, heads, _ = arrays["q"].shape
    lse = spec_of_contiguous((batch, heads, seqlen_q), "float32")
    slopes = arrays.get("alibi_slopes")
    slopes_spec = None if slopes is None else spec_of_contiguous(slopes.shape, "float32")
    return Problem.backward(**specs, out=specs["d_out"], lse=lse, keywords=Keywords(**words), alibi_slopes=slopes_spec)


def plan(arrays: dict[str, Array], **words: Any) -> Plan:
    made = plan_sm90_backward.backward(problem(arrays, **words), H200)
    assert isinstance(made, Plan), made
    return made


def with_forward(arrays: dict[str, Array], **words: Any) -> dict[str, Array]:
    """The arrays with out and lse as the reference has them."""
    found = expected({name: array for name, array in arrays.items() if name != "d_out"}, **words)
    dtype = arrays["q"].dtype
    return {**arrays, "out": found["out"].astype(dtype), "lse": found["lse"].astype(np.float32)}


def check(hopper: Place, shape: Shape, seed: int = 0, d_lse: bool = False, **more: Any) -> dict[str, Array]:
    arrays = case(shape, seed, d_lse=d_lse)
    words = {**shape.keywords, **more}
    assert all(launch.variant.family == "sm90" for launch in plan(arrays, **words).launches)
    found = hopper.backward(with_forward(arrays, **words), **words)
    assert_right(found, arrays, **words)
    return found


FAST: dict[str, tuple[Shape, dict[str, Any]]] = {
    "64, tails": (dense(1, 2, 1, 300, 150, 64), {}),
    "64, causal, a row of blocks each": (dense(2, 4, 2, 200, 330, 64, causal=True), {}),
    "64, more rows than keys": (dense(1, 2, 2, 300, 40, 64, causal=True), {}),
    "64, window": (dense(1, 2, 1, 200, 330, 64, window=(40, 3)), {}),
    "128, tails": (dense(1, 1, 1, 200, 130, 128), {}),
    "128, causal, top-left": (dense(1, 2, 1, 300, 200, 128, causal=True), {"align": "top-left"}),
    "128, softcap, half": (dense(1, 2, 2, 70, 200, 128, dtype="float16", softcap=3.0), {}),
    "128, ALiBi after softcap": (dense(1, 2, 2, 130, 70, 128, alibi=True, softcap=5.0, causal=True), {}),
    "96": (dense(1, 2, 1, 70, 130, 96, causal=True), {}),
    "72 and 40": (dense(1, 1, 1, 200, 200, 72, 40), {}),
}


@pytest.mark.parametrize(("shape", "words"), FAST.values(), ids=FAST)
def test_tiles_of_keys_in_turn(hopper: Place, shape: Shape, words: dict[str, Any]) -> None:
    """Persistent blocks that draw tickets; the emulator has four multiprocessors, so some draw several."""
    check(hopper, shape, seed=shape.seqlen_q, d_lse=shape.seqlen_k == 330, **words)


@pytest.mark.parametrize(("shape", "words"), FAST.values(), ids=FAST)
def test_tiles_of_keys_in_any_order(any_order: Place, shape: Shape, words: dict[str, Any]) -> None:
    check(any_order, shape, seed=shape.seqlen_q, d_lse=shape.seqlen_k == 330, **words)


def test_short_sequences_take_turns_and_long_ones_do_not() -> None:
    for head_dim, causal, turns in ((64, True, 1024), (64, False, 1024), (128, True, 1024), (128, False, 0)):
        for seqlen in (512, 1024, 2048):
            for deterministic in (False, True):
                arrays = case(dense(1, 1, 1, seqlen, 16, head_dim))
                _, keys, finish = plan(arrays, causal=causal, deterministic=deterministic).launches
                in_turn = dict(keys.variant.fields)["kOrderedDq"]
                assert in_turn == (deterministic or seqlen <= turns), (head_dim, causal, seqlen, deterministic)
                assert dict(finish.variant.fields)["kOrderedDq"] == in_turn


def test_later_kernels_overlap_the_one_before() -> None:
    """Launched early, they wait for themselves; the first waits for whatever was queued before the call."""
    from cuflash.interop.words import decode, encode

    for head_dim in (64, 256):
        made = plan(case(dense(1, 2, 2, 16, 16, head_dim)))
        assert [launch.overlap for launch in made.launches] == [False, True, True]
        assert [launch.overlap for launch in decode(encode(made, "sm_90a").tolist()).launches] == [0, 1, 1]


FIXED: dict[str, tuple[Shape, dict[str, Any]]] = {
    "64": (dense(1, 2, 1, 200, 330, 64, causal=True), {"deterministic": True}),
    "128": (dense(2, 4, 2, 130, 300, 128, causal=True), {"deterministic": True}),
    "128, full": (dense(1, 2, 2, 260, 130, 128), {"deterministic": True}),
    "64, full": (dense(1, 2, 2, 140, 300, 64), {"deterministic": True}),
    "64, window": (dense(1, 2, 1, 200, 330, 64, window=(40, 3)), {"deterministic": True}),
    "128, softcap": (dense(1, 2, 2, 300, 140, 128, softcap=3.0, causal=True), {"deterministic": True}),
    "192 and 128": (dense(1, 2, 1, 130, 200, 192, 128, causal=True), {}),
    "256": (dense(1, 2, 1, 130, 200, 256, causal=True), {}),
    "256, window": (dense(1, 2, 2, 200, 130, 256, dtype="float16", window=(60, 20)), {}),
}


@pytest.mark.parametrize(("shape", "words"), FIXED.values(), ids=FIXED)
def test_fixed_order(hopper: Place, shape: Shape, words: dict[str, Any]) -> None:
    """Right, and the same bits on another schedule and as the second of a larger batch."""
    found = check(hopper, shape, seed=3, d_lse=True, **words)
    arrays = with_forward(case(shape, 3, d_lse=True), **shape.keywords)
    words = {**shape.keywords, **words}
    with hopper.schedule(seed=7, race=False):
        assert_equal_bits(found, hopper.backward(arrays, **words))
        doubled = {
            name: array if name == "alibi_slopes" else np.concatenate([array[::-1] * array.dtype.type(0.5), array])
            for name, array in arrays.items()
        }
        batch = shape.batch
        assert_equal_bits(found, {n: x[batch:] for n, x in hopper.backward(doubled, **words).items()})


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
def test_hidden_keys_reach_nobody(hopper: Place, value: float, deterministic: bool, head_dim: int) -> None:
    """Key 100 holds rubbish: queries that do not see it, in the same block too, have their clean dq."""
    words = {"causal": True, "align": "top-left", "deterministic": deterministic}
    arrays = case(dense(1, 2, 1, 140, 130, head_dim, causal=True), 4)
    clean = hopper.backward(with_forward(arrays, causal=True, align="top-left"), **words)
    dirty = {name: array.copy() for name, array in arrays.items()}
    dirty["k"][:, 100], dirty["v"][:, 100] = value, np.nan
    inputs = with_forward(arrays, causal=True, align="top-left")
    inputs["out"][:, 100:], inputs["lse"][:, :, 100:] = np.nan, np.nan  # as the forward leaves rows that see it
    with hopper.schedule(race=False):
        found = hopper.backward({**inputs, "k": dirty["k"], "v": dirty["v"]}, **words)
    assert_equal_bits({"dq": found["dq"][:, :100]}, {"dq": clean["dq"][:, :100]})
    assert np.isnan(found["dq"][:, 100:].astype(np.float32)).all()


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize(("where", "value"), [("q", np.nan), ("q", np.inf), ("d_out", np.nan), ("d_out", -np.inf)])
def test_queries_reach_only_keys_that_see_them(
    hopper: Place, where: str, value: float, deterministic: bool, head_dim: int
) -> None:
    """One rotten element of query 70, window of 31 keys: the gradients of no other key of its blocks change."""
    words = {"window": (20, 10), "align": "top-left"}
    arrays = case(dense(1, 2, 1, 140, 130, head_dim), 9)
    clean = with_forward(arrays, **words)
    rotten = {name: array.copy() for name, array in clean.items()}
    rotten[where][0, 70, 0, 5] = value
    if where == "q":  # as the forward leaves them
        rotten["out"][0, 70, 0] = rotten["lse"][0, 0, 70] = np.nan
    found = hopper.backward(rotten, **words, deterministic=deterministic)
    right = expected(arrays, **words)
    for name, spoiled in (("dq", slice(70, 71)), ("dk", slice(50, 81)), ("dv", slice(50, 81))):
        heads = slice(0, 1) if name == "dq" else slice(None)
        assert np.isnan(found[name][:, spoiled, heads].astype(np.float32)).all(), name
        found[name][:, spoiled, heads] = right[name][:, spoiled, heads]
    assert_right(found, arrays, **words)  # all else is as if nothing had happened


def test_keys_that_nobody_sees(hopper: Place) -> None:
    """40 queries, 130 keys, top-left: keys from 40 on may hold anything; their gradients are zero."""
    arrays = case(dense(1, 2, 1, 40, 130, 128, causal=True), 5)
    inputs = with_forward(arrays, causal=True, align="top-left")
    for name in ("k", "v"):
        inputs[name] = inputs[name].copy()
        inputs[name][:, 40:] = np.nan
    found = hopper.backward(inputs, causal=True, align="top-left")
    assert_right(found, arrays, causal=True, align="top-left")
    assert (found["dk"][:, 40:] == 0).all() and (found["dv"][:, 40:] == 0).all()


@pytest.mark.parametrize("layout", ["BHSD", "SBHD", "padded rows", "guard rows", "row step 2"])
def test_strides_of_every_input(hopper: Place, layout: str) -> None:
    plain = with_forward(case(dense(2, 2, 1, 33, 37, 64, dtype="float16", causal=True), 6), causal=True)
    arrays = {name: array if name == "lse" else stored(array, layout) for name, array in plain.items()}
    found = hopper.backward(arrays, causal=True)
    assert_right(found, plain, causal=True)
    assert all(untouched_outside(array) for name, array in arrays.items() if name != "lse")


def test_the_workspace_is_linear_in_the_length() -> None:
    for head_dim, bytes_a_row in ((64, 4 * 64 + 8), (128, 4 * 128 + 8), (256, 8)):
        for seqlen in (1024, 16384):
            made = plan(case(dense(1, 2, 2, seqlen, 16, head_dim)))
            assert made.workspace_bytes <= 2 * (seqlen + 384) * bytes_a_row + 3 * 256


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (dense(1, 2, 2, 16, 16, 64, dtype="float32"), "float32"),
        (dense(1, 2, 2, 16, 16, 60), "multiple of 8"),
        (dense(1, 2, 2, 16, 0, 64), "no rows"),
    ],
    ids=["float32", "head_dim 60", "no keys"],
)
def test_it_says_what_it_does_not_take(shape: Shape, reason: str) -> None:
    answer = plan_sm90_backward.backward(problem(case(shape)), H200)
    assert isinstance(answer, str) and reason in answer


COMPILED = [(64, {}), (128, {"causal": True}), (128, {"deterministic": True}), (256, {"causal": True})]
COMPILED += [(dim, {"window": (64, 0), "softcap": 5.0}) for dim in (64, 128)] + [(192, {}), (96, {"causal": True})]
LONG = [(64, {}), (64, {"causal": True}), (128, {"causal": True}), (128, {"window": (64, 0)})]  # dq in any order


@pytest.mark.parametrize(
    ("head_dim", "words", "seqlen"), [*((*row, 16) for row in COMPILED), *((*row, 2048) for row in LONG)], ids=str
)
def test_no_spills_and_no_serialised_products(head_dim: int, words: dict[str, Any], seqlen: int) -> None:
    jit = pytest.importorskip("cuflash.jit")
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="NVRTC comes with CuPy and nvidia-cuda-nvrtc")
    for launch in plan(case(dense(1, 1, 1, seqlen, 16, head_dim)), **words).launches:
        log = jit.compile_cubin(launch.variant, "sm_90a").log
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
        assert spills and not any(spills), log
        assert not re.search(r"C75\d\d|serializ", log), log


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_queries_that_see_nothing_reach_nobody(hopper: Place, deterministic: bool, head_dim: int) -> None:
    """130 queries on 64 keys, bottom-right: what stands in q and d_out of the first 66 is of no account."""
    words = {"causal": True, "deterministic": deterministic}
    arrays = case(dense(1, 2, 1, 130, 64, head_dim, dtype="float16", causal=True), 8)
    clean = with_forward(arrays, causal=True)
    dirty = {name: array.copy() for name, array in clean.items()}
    dirty["q"][:, :66] = dirty["d_out"][:, :66] = np.nan
    found = hopper.backward(dirty, **words)
    assert_right(found, arrays, causal=True)
    assert (found["dq"][:, :66] == 0).all()


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_are_rounded_no_more_often_than_by_the_other_family(hopper: Place, dtype: str, head_dim: int) -> None:
    """d(scores) come from probabilities not yet rounded to the dtype: twice would give 1.2 times the error."""
    arrays = with_forward(case(dense(1, 1, 1, 192, 192, head_dim, dtype=dtype), 5))
    exact = expected(arrays)
    other = Place(hopper.name, "sm80") if hopper.is_gpu else Place("emulator")

    def error(place: Place, name: str) -> float:
        found = place.backward(arrays)[name].astype(np.float64)
        return float(np.sqrt(np.mean((found - exact[name]) ** 2)))

    for name in ("dq", "dk", "dv"):
        assert error(hopper, name) <= 1.05 * error(other, name), name
