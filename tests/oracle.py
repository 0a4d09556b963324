"""What is right: the float64 reference, an unfused computation in the case's dtype, and the budget between them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash import reference
from cuflash.check import compare

Array = np.ndarray[Any, Any]
NAMES = ("out", "lse", "dq", "dk", "dv")


def expected(arrays: dict[str, Array], precision: str | None = None, **words: Any) -> dict[str, Array]:
    """out, lse (and the gradients where there is a d_out) by the reference; ``precision`` as in the reference."""
    words = {**words, "alibi_slopes": arrays.get("alibi_slopes"), "precision": precision}
    q, k, v = (arrays[name] for name in "qkv")
    results = dict(zip(NAMES, reference.attention(q, k, v, **words), strict=False))
    if "d_out" in arrays:
        gradients = reference.attention_backward(arrays["d_out"], q, k, v, d_lse=arrays.get("d_lse"), **words)
        results.update(zip(NAMES[2:], gradients, strict=True))
    return results


def faults(found: dict[str, Array], arrays: dict[str, Array], **words: Any) -> list[str]:
    """What is wrong with results, one line a result; empty when all keep their budget."""
    dtype = arrays["q"].dtype
    exact = expected(arrays, **words)
    unfused = expected(arrays, dtype.name, **words)
    lines = []
    for name, got in found.items():
        want = np.dtype(np.float32) if name == "lse" else dtype
        if got.dtype != want:
            lines.append(f"{name} has dtype {got.dtype}, not {want}")
        special = ("-inf",) if name == "lse" else ()  # rows without keys
        deviation = compare(name, got, exact[name], unfused[name], special)
        if not deviation.ok:
            lines.append(f"{name}: {deviation.why or f'error {deviation.error:.3g} > {deviation.budget:.3g}'}")
    return lines


def assert_right(found: dict[str, Array], arrays: dict[str, Array], **words: Any) -> None:
    """Every result within twice the error of an unfused computation; special values in their places."""
    wrong = faults(found, arrays, **words)
    assert not wrong, "; ".join(wrong)


def assert_equal_bits(one: dict[str, Array], other: dict[str, Array]) -> None:
    """The same bits in every result that both have."""
    names = one.keys() & other.keys()
    assert names
    unequal = [name for name in sorted(names) if not equal_bits(one[name], other[name])]
    assert not unequal, f"different bits in {unequal}"


def equal_bits(one: Array, other: Array) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
