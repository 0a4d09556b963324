"""What counts as a number and as a flag among a caller's options."""

from __future__ import annotations

import math
from numbers import Real

import numpy as np

from cuflash.errors import ArgumentError, ArgumentTypeError

__all__ = ["LARGEST", "SMALLEST", "finite_number", "flag", "positive_number"]

SMALLEST, LARGEST = 2.0**-126, 2.0**126  # normal in float32, as are their inverses and products with log2(e)


def flag(argument: str, value: object) -> bool:
    """True or False, and nothing that only looks like it.

    Raises:
        ArgumentTypeError: anything else.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError(argument, value, "must be True or False")
    return bool(value)


def finite_number(argument: str, value: object, remedy: str) -> float:
    """A real number as a Python float.

    Raises:
        ArgumentTypeError: not a number, or an array of any size.
        ArgumentError: infinite, NaN or beyond a float.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (Real, np.floating, np.integer)):
        raise ArgumentTypeError(argument, value, "must be a real number or None", remedy)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ArgumentError(argument, value, "must be finite", remedy)
    return number


def positive_number(argument: str, value: object, remedy: str) -> float:
    """A positive number that float32 can work with.

    Raises:
        ArgumentError, ArgumentTypeError: anything else.
    """
    number = finite_number(argument, value, remedy)
    if not SMALLEST <= number <= LARGEST:
        rule = f"must be positive, and float32 must hold it and its inverse: {SMALLEST:.3g} to {LARGEST:.3g}"
        raise ArgumentError(argument, value, rule, remedy)
    return number
