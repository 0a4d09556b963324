"""Reported faults: launches with an empty grid and gradients left unwritten when an axis has length zero."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import case, dense
from places import Place

CASES = {"no batch": (0, 4, 2, 7, 9), "no queries": (2, 4, 2, 0, 9), "no keys": (2, 4, 2, 7, 0)}


@pytest.mark.parametrize("extents", CASES.values(), ids=CASES)
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_zero_length_axes(device: Place, extents: tuple[int, ...], deterministic: bool) -> None:
    """The place fills outputs and gradients with NaN beforehand and refuses a launch with an empty grid."""
    arrays = case(dense(*extents, 64))  # type: ignore[arg-type]
    found = device.both(arrays, deterministic=deterministic)
    assert (found["out"] == 0).all() and np.isneginf(found["lse"]).all()
    for name, like in (("dq", "q"), ("dk", "k"), ("dv", "v"), ("out", "d_out")):
        assert found[name].shape == arrays[like].shape and (found[name] == 0).all(), name
