"""Tensors and options that torch knows and kernels do not: refused by name; numbers of NumPy's are numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from samples import sample

torch = pytest.importorskip("torch")

import cuflash  # noqa: E402
from cuflash.errors import ArgumentError, ArgumentTypeError, UnsupportedError  # noqa: E402

pytestmark = pytest.mark.usefixtures("emulated")


def tensors() -> list[Any]:
    arrays = sample()
    return [torch.from_numpy(arrays[name]) for name in "qkv"]


KINDS = {
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("position", range(3))
def test_tensors_without_plain_memory_are_refused(position: int, kind: Any) -> None:
    given = tensors()
    given[position] = kind(given[position])
    with pytest.raises(UnsupportedError, match="qkv"[position]):
        cuflash.flash_attention(*given)


@pytest.mark.parametrize("name", ["scale", "softcap", "causal", "window", "mask", "score", "align", "deterministic"])
def test_options_are_no_tensors(name: str) -> None:
    for value in (torch.ones(2), torch.tensor(1.0), np.ones(2)):
        with pytest.raises((ArgumentError, ArgumentTypeError), match=name):
            cuflash.flash_attention(*tensors(), **{name: value})


def test_numbers_of_numpy_are_options() -> None:
    """The operators carry options as text, which must read back."""
    for plain, other in (
        ({"scale": 0.5}, {"scale": np.float32(0.5)}),
        ({"softcap": 3.0}, {"score": cuflash.Softcap(np.float16(3))}),  # type: ignore[arg-type]
        ({"window": (3, 0)}, {"mask": cuflash.SlidingWindow(np.int64(3), np.int8(0))}),  # type: ignore[arg-type]
        ({"align": 2, "causal": True}, {"align": np.int64(2), "causal": np.bool_(True)}),
    ):
        assert torch.equal(*(cuflash.flash_attention(*tensors(), **words) for words in (plain, other)))
    with pytest.raises(ArgumentError, match="scale"):
        cuflash.flash_attention(*tensors(), scale=float("nan"))
    with pytest.raises(ArgumentTypeError, match="causal"):
        cuflash.flash_attention(*tensors(), causal=1)  # type: ignore[arg-type]
