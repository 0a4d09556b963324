"""How far results lie from float64: cuflash's and its peers', root mean square, on the same inputs.

Several draws of the inputs: the first rows of a causal mask have gradients so large that the rounding of a few numbers
is a good part of the whole error, and two ways of rounding, equally good, lie up to 4% apart on any one draw.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from cuflash import reference
from cuflash.backends import eager_on
from cuflash.catalog import device_here, load_ahead
from cuflash.dtypes import DTYPES
from cuflash.eager import Eager
from cuflash.info import circumstances
from cuflash.peers import chosen, contestants, numbers_of
from cuflash.peers_base import Peer
from cuflash.presets import Shape
from cuflash.problem import Keywords

__all__ = ["DISTRIBUTIONS", "Error", "accuracy_shapes", "measure", "run"]

# Share of the elements to which N(0, 100) is added, beside N(0, 1) everywhere: the inputs of FlashAttention-3's paper.
DISTRIBUTIONS = {"normal": 0.0, "outliers": 1e-3}
_PROTOCOL = "root mean square distance from float64; normal: N(0, 1); outliers: + N(0, 100) in one of 1000 places"
RESULTS = {"fwd": ("out",), "bwd": ("dq", "dk", "dv")}


Squares = dict[str, list[float]]  # by library: the mean square distance of each draw
_OURS = "cuflash"


@dataclass(frozen=True)
class Error:
    """One result on one kind of input: mean square distances from float64, draw by draw."""

    shape: str
    distribution: str
    result: str
    squares: Squares

    @property
    def cuflash(self) -> float:
        """Root mean square over all draws."""
        return _root(self.squares[_OURS])

    @property
    def peers(self) -> dict[str, float]:
        """The peers' root mean squares, those that answered every draw."""
        draws = len(self.squares[_OURS])
        return {name: _root(found) for name, found in self.squares.items() if name != _OURS and len(found) == draws}

    @property
    def ratio(self) -> float | None:
        """cuflash's error over the least of the peers'; below 1, cuflash is more accurate."""
        return self.cuflash / min(self.peers.values()) if self.peers else None

    @property
    def uncertainty(self) -> float | None:
        """Standard error of the ratio: how far another set of as many draws may lie."""
        draws = len(self.squares[_OURS])
        if not self.peers or draws < 2:
            return None
        best = min(self.peers, key=self.peers.__getitem__)
        ratios = [math.sqrt(ours / theirs) for ours, theirs in zip(*map(self.squares.get, (_OURS, best)), strict=True)]
        return statistics.stdev(ratios) / math.sqrt(draws)

    def as_dict(self) -> dict[str, Any]:
        names = ("shape", "distribution", "result", _OURS, "peers", "ratio", "uncertainty")
        return {name: getattr(self, name) for name in names}


def accuracy_shapes(seqlen: int = 2048, heads: int = 4) -> tuple[Shape, ...]:
    """Three head_dims, full and causal, in both 16-bit dtypes."""

    def one(dim: int, causal: bool, dtype: str) -> Shape:
        name = f"d{dim} {'causal' if causal else 'full'} {dtype}"
        return Shape(name, heads, heads, dim, seqlen, seqlen, dtype=dtype, causal=causal)

    return tuple(
        one(dim, causal, dtype)
        for dim in (64, 128, 256)
        for causal in (False, True)
        for dtype in ("bfloat16", "float16")
    )


def measure(
    shapes: Sequence[Shape], peers: Mapping[str, Peer], eager: Eager, put: Callable[[Any], Any], draws: int = 1
) -> Iterator[Error]:
    """Every shape on every kind of input; ``put`` brings a NumPy array to where ``eager`` computes."""
    for shape in shapes:
        for distribution, share in DISTRIBUTIONS.items():
            found: dict[str, Squares] = {name: {} for names in RESULTS.values() for name in names}
            for seed in range(draws):
                arrays = {name: put(x) for name, x in draw(shape, share, seed).items()}
                for name, library, square in _squares(shape, arrays, peers, eager):
                    found[name].setdefault(library, []).append(square)
            yield from (Error(shape.name, distribution, name, squares) for name, squares in found.items())


def _squares(
    shape: Shape, arrays: Mapping[str, Any], peers: Mapping[str, Peer], eager: Eager
) -> Iterator[tuple[str, str, float]]:
    """(result, library, mean square distance) of everything that one draw gives."""
    exact, ours = _exact(arrays, shape), _found(eager, arrays, shape)
    for mode, names in RESULTS.items():
        others, _ = contestants(peers, arrays, shape, mode, [ours[name] for name in names])
        answers = {_OURS: [ours[name] for name in names]} | {one.name: _in_a_row(one.call()) for one in others}
        for library, results in answers.items():
            for name, result in zip(names, results, strict=False):
                yield name, library, mean_square(result, exact[name])


def run(
    shapes: Sequence[Shape], peers: str, family: str, draws: int, save: Path | None, advance: Callable[[], object]
) -> dict[str, Any]:
    """The record of a comparison on this GPU, written to ``save`` as it grows.

    Raises:
        KeyError: an unknown peer; the message lists the known ones.
    """
    import cupy

    present, absent = chosen(peers)
    record = {
        **circumstances(),
        "peer_versions": {name: peer.version() for name, peer in present.items()},
        "absent_peers": absent,
        "protocol": f"{_PROTOCOL}; {draws} draws, uncertainty: standard error of the ratio",
        "rows": [],
    }
    load_ahead(shapes, device_here(None, family), ("fwd", "bwd"))
    eager = eager_on("gpu", family)
    for shape in shapes:
        record["rows"] += [one.as_dict() for one in measure((shape,), present, eager, cupy.asarray, draws)]
        advance()
        if save:
            save.parent.mkdir(parents=True, exist_ok=True)
            save.write_text(json.dumps(record, indent=1, default=str) + "\n")
    return record


def draw(shape: Shape, share: float, seed: int = 0) -> dict[str, Any]:
    """q, k, v and d_out, rounded to the dtype."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, extents in shape.shapes.items():
        values = rng.standard_normal(extents, np.float32)
        places = rng.random(extents, np.float32) < share
        values[places] += 10 * rng.standard_normal(np.count_nonzero(places), np.float32)
        arrays[name] = values.astype(DTYPES[shape.dtype].numpy)
    return arrays


def mean_square(result: Any, exact: Any) -> float:
    """Of the differences."""
    library = array_namespace(exact)
    difference = numbers_of(result, library).astype("float64") - exact
    return float(library.mean(difference * difference))


def _root(squares: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(squares))


def _exact(arrays: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    q, k, v = (arrays[name] for name in "qkv")
    out, _ = reference.attention(q, k, v, **shape.keywords)
    gradients = reference.attention_backward(arrays["d_out"], q, k, v, **shape.keywords)
    return dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))


def _found(eager: Eager, arrays: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    words, inputs = Keywords(**shape.keywords), {name: arrays[name] for name in "qkv"}
    out, lse = eager.forward(inputs, words)
    gradients = eager.backward({"d_out": arrays["d_out"], **inputs, "out": out, "lse": lse}, words)
    return {"out": out, **gradients._asdict()}


def _in_a_row(results: Any) -> Sequence[Any]:
    return results if isinstance(results, (tuple, list)) else (results,)
