"""How far results lie from float64: cuflash's and its peers', root mean square, on the same inputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class Error:
    """One result on one kind of input; root mean square of its distance from float64."""

    shape: str
    distribution: str
    result: str
    cuflash: float
    peers: dict[str, float]

    @property
    def ratio(self) -> float | None:
        """cuflash's error over the least of the peers'; below 1, cuflash is more accurate."""
        return self.cuflash / min(self.peers.values()) if self.peers else None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio}


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
    shapes: Sequence[Shape], peers: Mapping[str, Peer], eager: Eager, put: Callable[[Any], Any]
) -> Iterator[Error]:
    """Every shape on every kind of input; ``put`` brings a NumPy array to where ``eager`` computes."""
    for shape in shapes:
        for distribution, share in DISTRIBUTIONS.items():
            arrays = {name: put(x) for name, x in draw(shape, share).items()}
            exact, found = _exact(arrays, shape), _found(eager, arrays, shape)
            for mode, names in RESULTS.items():
                others, _ = contestants(peers, arrays, shape, mode, [found[name] for name in names])
                answers = {one.name: _in_a_row(one.call()) for one in others}
                for number, name in enumerate(names):
                    errors = {peer: distance(results[number], exact[name]) for peer, results in answers.items()}
                    yield Error(shape.name, distribution, name, distance(found[name], exact[name]), errors)


def run(
    shapes: Sequence[Shape], peers: str, family: str, save: Path | None, advance: Callable[[], object]
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
        "protocol": _PROTOCOL,
        "rows": [],
    }
    load_ahead(shapes, device_here(None, family), ("fwd", "bwd"))
    for shape in shapes:
        record["rows"] += [one.as_dict() for one in measure((shape,), present, eager_on("gpu", family), cupy.asarray)]
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
        values = rng.standard_normal(extents)
        values += 10 * rng.standard_normal(extents) * (rng.random(extents) < share)
        arrays[name] = values.astype(DTYPES[shape.dtype].numpy)
    return arrays


def distance(result: Any, exact: Any) -> float:
    """Root mean square of the difference."""
    library = array_namespace(exact)
    difference = numbers_of(result, library).astype("float64") - exact
    return float(library.sqrt(library.mean(difference * difference)))


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
