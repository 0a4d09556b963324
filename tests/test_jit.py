"""Loading kernels without a GPU: what a call needs is compiled side by side, and each kernel once."""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from sm90 import arrays_of, plan

from cuflash import jit
from cuflash.plan import Plan
from cuflash.variant import Variant


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """Kernels of two plans, and a CuPy that knows one device."""
    runtime = SimpleNamespace(getDevice=lambda: 0)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Device=lambda number: nullcontext()))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(jit, "_loaded", {})
    monkeypatch.setattr(jit, "_building", {})
    found = []
    for words in ({}, {"causal": True}):
        made = plan(arrays_of(20, heads=2), **words)
        assert isinstance(made, Plan)
        found.append(made.launches[0].variant)
    return found


def test_kernels_are_compiled_side_by_side(variants: list[Variant], monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2, timeout=20)
    built: list[Variant] = []

    def build(variant: Variant) -> Any:
        together.wait()  # broken unless the other compiles at the same time
        built.append(variant)
        return SimpleNamespace(max_dynamic_shared_size_bytes=0, variant=variant)

    monkeypatch.setattr(jit, "_build", build)
    first, second, again = jit.load_all([(variants[0], 10), (variants[1], 30), (variants[0], 20)])
    assert (first.variant, second.variant) == tuple(variants)
    assert again is first
    assert (first.max_dynamic_shared_size_bytes, second.max_dynamic_shared_size_bytes) == (20, 30)
    assert sorted(built, key=id) == sorted(variants, key=id)
    assert jit.load_all([(variant, 0) for variant in variants]) == [first, second]  # loaded: nobody waits for a second


def test_what_the_compiler_refuses_is_told(variants: list[Variant], monkeypatch: pytest.MonkeyPatch) -> None:
    def build(variant: Variant) -> Any:
        raise ValueError(variant.symbol)

    monkeypatch.setattr(jit, "_build", build)
    with pytest.raises(ValueError, match="forward_sm90"):
        jit.load_all([(variant, 0) for variant in variants])
