"""Every refusal: before anything is launched, typed, naming argument, value, rule and way out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.errors import ArgumentError, ArgumentTypeError, CuflashError, UnsupportedError
from cuflash.problem import Keywords, Problem, spec_of_contiguous

SHAPE_Q, SHAPE_KV = (2, 5, 4, 8), (2, 7, 2, 8)


def specs(q: Any = SHAPE_Q, k: Any = SHAPE_KV, v: Any = SHAPE_KV, dtype: str = "float16") -> Any:
    return tuple(spec_of_contiguous(shape, dtype) for shape in (q, k, v))


SHAPES = {
    "q of three axes": ((5, 4, 8), SHAPE_KV, SHAPE_KV),
    "v of five axes": (SHAPE_Q, SHAPE_KV, (1, *SHAPE_KV)),
    "two batches": (SHAPE_Q, (3, 7, 2, 8), (3, 7, 2, 8)),
    "two head dims": (SHAPE_Q, (2, 7, 2, 16), SHAPE_KV),
    "v shorter than k": (SHAPE_Q, SHAPE_KV, (2, 6, 2, 8)),
    "v of other heads": (SHAPE_Q, SHAPE_KV, (2, 7, 4, 8)),
    "five heads on two": ((2, 5, 5, 8), SHAPE_KV, SHAPE_KV),
    "heads on none": (SHAPE_Q, (2, 7, 0, 8), (2, 7, 0, 8)),
    "head_dim 0": ((2, 5, 4, 0), (2, 7, 2, 0), SHAPE_KV),
    "head_dim_v 0": (SHAPE_Q, SHAPE_KV, (2, 7, 2, 0)),
    "head_dim 513": ((2, 5, 4, 513), (2, 7, 2, 513), SHAPE_KV),
    "a billion rows": ((2, 2**30, 4, 8), SHAPE_KV, SHAPE_KV),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_shapes_are_refused(shapes: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        Problem.forward(*specs(*shapes))
    assert caught.value.argument in str(caught.value) and caught.value.rule


def test_a_wide_head_is_a_wish_and_not_a_mistake() -> None:
    with pytest.raises(UnsupportedError, match="head_dim"):
        Problem.forward(*specs((2, 5, 4, 512), (2, 7, 2, 512), SHAPE_KV))


WORDS = {
    "scale nan": ({"scale": math.nan}, ArgumentError),
    "scale inf": ({"scale": math.inf}, ArgumentError),
    "scale text": ({"scale": "1"}, ArgumentTypeError),
    "scale bool": ({"scale": True}, ArgumentTypeError),
    "scale array": ({"scale": np.ones(2)}, ArgumentTypeError),
    "causal number": ({"causal": 1}, ArgumentTypeError),
    "window number": ({"window": 3}, ArgumentTypeError),
    "window of three": ({"window": (1, 2, 3)}, ArgumentTypeError),
    "window -1": ({"window": (-1, 0)}, ArgumentError),
    "window -4096": ({"window": (-4096, 0)}, ArgumentError),
    "window 1.5": ({"window": (1.5, 0)}, ArgumentTypeError),
    "window bool": ({"window": (True, 0)}, ArgumentTypeError),
    "softcap negative": ({"softcap": -1.0}, ArgumentError),
    "softcap nan": ({"softcap": math.nan}, ArgumentError),
    "softcap text": ({"softcap": "x"}, ArgumentTypeError),
    "mask array": ({"mask": np.ones((5, 7), bool)}, ArgumentTypeError),
    "mask and causal": ({"mask": cuflash.Causal(), "causal": True}, ArgumentError),
    "score text": ({"score": "softcap"}, ArgumentTypeError),
    "score and softcap": ({"score": cuflash.Softcap(3.0), "softcap": 3.0}, ArgumentError),
    "alibi score without slopes": ({"score": cuflash.Alibi()}, ArgumentError),
    "align": ({"align": "middle"}, ArgumentError),
    "deterministic": ({"deterministic": 1}, ArgumentTypeError),
    "batch_invariant": ({"batch_invariant": None}, ArgumentTypeError),
}


@pytest.mark.parametrize(("words", "error"), WORDS.values(), ids=WORDS)
def test_options_are_refused(words: Any, error: type[CuflashError]) -> None:
    with pytest.raises(error) as caught:
        Problem.forward(*specs(), Keywords(**words))
    assert next(iter(words)).split("_")[0] in str(caught.value)


def test_dtypes_are_refused() -> None:
    for dtype in ("float64", "int32", "bool", "complex64", "float8_e4m3fn"):
        with pytest.raises(ArgumentTypeError, match="dtype"):
            Problem.forward(*(spec._replace(dtype=dtype) for spec in specs()))
    q, k, v = specs()
    with pytest.raises(ArgumentTypeError, match=r"k\.dtype"):
        Problem.forward(q, k._replace(dtype="bfloat16"), v)


@pytest.mark.parametrize(
    ("slopes", "error"),
    [
        (spec_of_contiguous((4,), "float32")._replace(dtype="float16"), ArgumentTypeError),
        (spec_of_contiguous((3,), "float32"), ArgumentError),
        (spec_of_contiguous((3, 4), "float32"), ArgumentError),
        (spec_of_contiguous((4,), "float32")._replace(strides=(2,)), ArgumentError),
    ],
)
def test_slopes_are_refused(slopes: Any, error: type[CuflashError]) -> None:
    with pytest.raises(error, match="alibi_slopes"):
        Problem.forward(*specs(), alibi_slopes=slopes)


def test_outputs_are_refused() -> None:
    good = spec_of_contiguous((2, 5, 4, 8), "float16")
    Problem.forward(*specs(), out=good)
    for bad in (good._replace(shape=(2, 5, 4, 9)), good._replace(strides=(0, 32, 8, 1))):
        with pytest.raises(ArgumentError, match="out"):
            Problem.forward(*specs(), out=bad)
    with pytest.raises(ArgumentTypeError, match="out"):
        Problem.forward(*specs(), out=good._replace(dtype="float32"))


@pytest.mark.parametrize("name", ["d_out", "out", "lse", "d_lse"])
def test_backward_arrays_are_refused(name: str) -> None:
    arrays = {
        "d_out": spec_of_contiguous((2, 5, 4, 8), "float16"),
        "out": spec_of_contiguous((2, 5, 4, 8), "float16"),
        "lse": spec_of_contiguous((2, 4, 5), "float32"),
        "d_lse": spec_of_contiguous((2, 4, 5), "float32"),
    }
    for bad, error in (({"shape": (1, 2, 3, 4)}, ArgumentError), ({"dtype": "int8"}, ArgumentTypeError)):
        wrong = {**arrays, name: arrays[name]._replace(**bad)}
        d_lse = wrong.pop("d_lse")
        with pytest.raises(error, match=name):
            Problem.backward(wrong["d_out"], *specs(), wrong["out"], wrong["lse"], d_lse=d_lse)


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("thing", [None, 3.0, "q", [[1.0]], object()], ids=lambda thing: type(thing).__name__)
def test_things_that_are_no_arrays_are_refused(position: int, thing: object) -> None:
    arrays: list[object] = [
        np.zeros(SHAPE_Q, np.float16),
        np.zeros(SHAPE_KV, np.float16),
        np.zeros(SHAPE_KV, np.float16),
    ]
    arrays[position] = thing
    with pytest.raises(ArgumentTypeError, match="qkv"[position]):
        cuflash.flash_attention(*arrays)


@pytest.mark.parametrize("name", ["bias", "sinks", "dropout"])
def test_what_is_absent_is_named(name: str) -> None:
    q = np.zeros((1, 2, 1, 8), np.float16)
    with pytest.raises(UnsupportedError, match=name):
        cuflash.flash_attention(q, q, q, **{name: np.zeros(1, np.float32)})


@pytest.mark.parametrize("name", ["flash_attention_varlen", "flash_attention_kvcache"])
def test_functions_that_are_absent_say_what_is_there(name: str) -> None:
    assert name in cuflash.__all__
    with pytest.raises(UnsupportedError, match=rf"{name}.*call flash_attention "):
        getattr(cuflash, name)(1, 2, 3, page_table=None)


def test_errors_survive_pickling() -> None:
    import pickle

    error = ArgumentError("scale", math.inf, "must be finite", "pass None")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.argument == "scale"


def test_heads_and_lengths_may_be_zero() -> None:
    for q, kv in (
        ((0, 5, 4, 8), (0, 7, 2, 8)),
        ((2, 0, 4, 8), SHAPE_KV),
        (SHAPE_Q, (2, 0, 2, 8)),
        ((2, 5, 0, 8), (2, 7, 0, 8)),
    ):
        problem = Problem.forward(*specs(q, kv, kv))
        assert problem.out_shape == (*q[:3], 8)
