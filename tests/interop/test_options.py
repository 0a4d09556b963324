"""Options through the public functions, as callers write them: refused by name in any order of calls, or as meant."""

from __future__ import annotations

import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.errors import ArgumentError, ArgumentTypeError, CuflashError
from cuflash.interop.chunk import attention_chunk
from cuflash.specs import Keywords, settled


def arrays(dtype: Any = np.float16) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    shapes = ((1, 5, 4, 8), (1, 7, 2, 8), (1, 7, 2, 8))
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


NO_OPTION: tuple[Any, ...] = (
    np.ones(2),
    np.array(0.5),
    np.ones((5, 7), bool),
    [1.0],
    {},
    {1},
    "x",
    b"x",
    1j,
    object(),
    float("nan"),
    float("inf"),
    -(10**400),
    lambda: 0,
    cuflash.Causal,
    cuflash.Mask(),
    cuflash.Score(),
)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", Keywords._fields)
@pytest.mark.parametrize("value", NO_OPTION, ids=lambda value: repr(value)[:20])
def test_what_is_no_option_is_refused_by_name(name: str, value: Any) -> None:
    """Whatever it is, unhashable too, and in every function."""
    q, k, v = arrays()
    out, lse = np.zeros((1, 5, 4, 8), np.float16), np.zeros((1, 4, 5), np.float32)
    calls = (
        lambda: cuflash.flash_attention(q, k, v, **{name: value}),
        lambda: cuflash.explain(q, k, v, **{name: value}),
        lambda: cuflash.flash_attention_backward(out, q, k, v, out, lse, **{name: value}),
    )
    for call in calls:
        with pytest.raises((ArgumentError, ArgumentTypeError), match=name) as caught:
            call()
        assert isinstance(pickle.loads(pickle.dumps(caught.value)), type(caught.value))


@pytest.mark.usefixtures("emulated")
def test_an_option_is_judged_alike_before_and_after_its_equal() -> None:
    """1 == True: a number where a flag belongs must not find the flag's plan, nor the other way round."""
    q, k, v = arrays()
    for first, second in (({"causal": True}, {"causal": 1}), ({"scale": 1}, {"scale": True})):
        cuflash.flash_attention(q, k, v, **first)  # type: ignore[arg-type]
        with pytest.raises(ArgumentTypeError, match=next(iter(second))):
            cuflash.flash_attention(q, k, v, **second)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="casual"):
        cuflash.explain(q, k, v, casual=True)
    for name, value in (("return_lse", 1), ("return_lse", np.ones(2))):
        with pytest.raises(ArgumentTypeError, match=name):
            cuflash.flash_attention(q, k, v, **{name: value})


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("tiny", [0, -0.0, 1e-46, -1e-46, 1e-39, 2.0**-140, Fraction(1, 10**50)])
def test_a_scale_below_float32_is_zero(tiny: Any) -> None:
    """Folded into the exponent it would be 0 times minus infinity."""
    q, k, v = arrays(np.float32)
    out, lse = cuflash.flash_attention(q, k, v, scale=tiny, return_lse=True)
    np.testing.assert_allclose(out, np.repeat(v.mean(1, keepdims=True), 2, axis=2).repeat(5, 1), atol=1e-6)
    np.testing.assert_allclose(lse, np.log(7), atol=1e-6)


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("value", [1e38, 1e39, 1e300, 10**50, np.float64(1e100)])
def test_numbers_beyond_float32_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=name):
        settled(Keywords(**{name: value}))


@pytest.mark.parametrize("value", [1e-40, 5e-324, 2.0**-127])
def test_a_cap_whose_inverse_overflows_is_refused(value: float) -> None:
    with pytest.raises(ArgumentError, match="softcap"):
        settled(Keywords(softcap=value))


def test_settled_options_are_plain_values() -> None:
    words = Keywords(
        scale=np.float32(0.5),  # type: ignore[arg-type]
        causal=np.bool_(True),  # type: ignore[arg-type]
        window=[np.int64(3), None],  # type: ignore[arg-type]
        softcap=np.float16(0),  # type: ignore[arg-type]
        align=np.int8(3),  # type: ignore[arg-type]
    )
    plain = settled(words)
    assert repr(plain) == repr(Keywords(scale=0.5, causal=True, window=(3, None), align=3))
    assert settled(plain) == plain
    assert repr(cuflash.SlidingWindow(np.int8(3), None)) == "SlidingWindow(before=3, after=None)"  # type: ignore[arg-type]
    assert repr(cuflash.Softcap(np.float32(3))) == "Softcap(cap=3.0)"  # type: ignore[arg-type]


def test_scores_that_cannot_run_are_refused_when_they_are_made() -> None:
    for parts in ((1, 2), (cuflash.Softcap(3.0), None), (cuflash.Alibi, cuflash.Alibi())):
        with pytest.raises(ArgumentTypeError, match="score"):
            cuflash.Then(*parts)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="reads an array twice"):
        cuflash.Then(cuflash.Alibi(), cuflash.Then(cuflash.Softcap(3.0), cuflash.Alibi()))


@pytest.mark.usefixtures("emulated")
def test_a_chunk_fixes_alignment_and_lse() -> None:
    for name, value in (("align", 3), ("return_lse", True)):
        with pytest.raises(ArgumentError, match=name):
            attention_chunk(*arrays(), **{name: value})
    for spelling in (np.float32, "f4", np.dtype("float32"), "float32"):
        assert attention_chunk(*arrays(), out_dtype=spelling)[0].dtype == np.float32


def merged(**changes: Any) -> Any:
    out, lse = np.ones((1, 5, 4, 8), np.float32), np.zeros((1, 4, 5), np.float32)
    return cuflash.merge_states(**{"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse, **changes})


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_part_without_keys_may_hold_anything(side: str, value: float) -> None:
    rubbish = np.full((1, 5, 4, 8), value, np.float32)
    empty = np.full((1, 4, 5), -np.inf, np.float32)
    out, lse = merged(**{f"out_{side}": rubbish, f"lse_{side}": empty})
    assert (out == 1).all()
    assert (lse == 0).all()
    out, lse = merged(out_a=rubbish, lse_a=empty, out_b=rubbish, lse_b=empty)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize("name", ["out_a", "lse_a", "out_b", "lse_b"])
@pytest.mark.parametrize("thing", [None, 1.0, [1.0], np.float32(1), np.ones(3, np.float32), np.ones((1, 5, 4, 8), int)])
def test_parts_that_do_not_belong_together_are_refused(name: str, thing: Any) -> None:
    with pytest.raises(CuflashError, match=r"out_[ab]|lse_[ab]"):
        merged(**{name: thing})
