"""The element types that kernels take: a table from array dtype to C++ element and error budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cuflash.errors import ArgumentTypeError

__all__ = ["DTYPES", "DType", "dtype_of"]


@dataclass(frozen=True)
class DType:
    """One row: the array's dtype name, its C++ spelling, its size in bytes and its unit roundoff."""

    name: str
    element: str
    short: str
    itemsize: int
    roundoff: float

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype; bfloat16 is the one of ml_dtypes, which CuPy and JAX share."""
        return np.dtype(ml_dtypes.bfloat16) if self.name == "bfloat16" else np.dtype(self.name)


DTYPES = {
    row.name: row
    for row in (
        DType("float16", "cuflash::ptx::float16", "fp16", 2, 2.0**-11),
        DType("bfloat16", "cuflash::ptx::bfloat16", "bf16", 2, 2.0**-8),
        DType("float32", "float", "fp32", 4, 2.0**-24),
    )
}


def dtype_of(argument: str, dtype: object) -> DType:
    """The row for an array's dtype (any library's spelling).

    Raises:
        ArgumentTypeError: the dtype has no kernel.
    """
    name = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    if name not in DTYPES:
        remedy = "cast with .astype(numpy.float32)" if name == "float64" else "cast the array first"
        raise ArgumentTypeError(f"{argument}.dtype", name, f"must be one of {', '.join(DTYPES)}", remedy)
    if not getattr(dtype, "isnative", True):  # NumPy's name of a dtype says nothing about the order of its bytes
        text = f"{getattr(dtype, 'str', name)} ({name})"
        remedy = f"cast with .astype('{name}')"
        raise ArgumentTypeError(f"{argument}.dtype", text, "must be in native byte order", remedy)
    return DTYPES[name]
