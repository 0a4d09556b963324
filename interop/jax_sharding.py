"""How attention splits over a mesh under plain jax.jit: batch and heads are free, lengths and dims are kept whole.

Grouped heads need care. The usual rule (one compound factor for heads, run locally) is silently wrong when the kv
heads do not divide over the devices that share the query heads. Here the partitioner's suggestion is never trusted:
the query's sharding decides, and for n head shards of num_q_heads / n query heads each

- num_kv_heads divides by n: k and v are split like q;
- each shard's query heads read one kv head: k and v are kept whole, a shard slices its own head out, and its
  gradient is placed back and summed over the shards in float32;
- anything else is refused by name, with jax.shard_map as the way out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from cuflash.errors import UnsupportedError
from cuflash.interop.jax_axes import away_from_the_mesh

__all__ = ["partitioned"]

# What each operand's axes are; QUERY and KV stand for the two kinds of heads.
_AXES = {
    "q": ("batch", "row", "QUERY", "dim"),
    "k": ("batch", "key", "KV", "dim"),
    "v": ("batch", "key", "KV", "dim_v"),
    "out": ("batch", "row", "QUERY", "dim_v"),
    "lse": ("batch", "QUERY", "row"),
}
_AXES |= {"dq": _AXES["q"], "dk": _AXES["k"], "dv": _AXES["v"], "d_out": _AXES["out"], "d_lse": _AXES["lse"]}
_WHOLE = ("row", "dim", "key", "dim_v")


class Heads(NamedTuple):
    """How many of each."""

    query: int
    kv: int


class Split(NamedTuple):
    """Where q lies: mesh axes of its batch and its heads, and how many head shards that makes."""

    batch: Any
    heads: Any
    names: tuple[str, ...]
    shards: int


def partitioned(
    function: Callable[..., tuple[Any, ...]],
    operands: Sequence[str],
    results: Sequence[str],
    heads: Heads,
    slopes_rank: int,
) -> Callable[..., tuple[Any, ...]]:
    """``function`` on arrays of any sharding: ``operands`` and ``results`` name its arrays."""
    axes = dict(_AXES)
    axes["alibi_slopes"] = ("QUERY",) if slopes_rank == 1 else ("batch", "QUERY")
    wrapped = custom_partitioning(function)

    def shardings(mesh: Any, split: Split, names: Sequence[str]) -> tuple[NamedSharding, ...]:
        kv = split.heads if heads.kv % split.shards == 0 else None
        places = {"batch": split.batch, "QUERY": split.heads, "KV": kv}
        return tuple(NamedSharding(mesh, PartitionSpec(*(places.get(axis) for axis in axes[n]))) for n in names)

    def partition(mesh: Any, given: Any, _: Any) -> tuple[Any, ...]:
        split = _split_of(mesh, given[operands.index("q")].sharding)
        _check(heads, split.shards)
        local = function
        if heads.kv % split.shards:
            local = _with_one_kv_head(function, operands, results, heads, mesh, split)
        return mesh, away_from_the_mesh(local), shardings(mesh, split, results), shardings(mesh, split, operands)

    def infer(mesh: Any, given: Any, _: Any) -> tuple[Any, ...]:
        return shardings(mesh, _split_of(mesh, given[operands.index("q")].sharding), results)

    wrapped.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=lambda mesh, *_: _rule(mesh, axes, operands, results, heads),
    )
    return wrapped


def _split_of(mesh: Any, sharding: Any) -> Split:
    spec = (*sharding.spec, None, None, None, None)[:4]
    names = spec[2] if isinstance(spec[2], tuple) else (() if spec[2] is None else (spec[2],))
    return Split(spec[0], spec[2], names, math.prod(mesh.shape[name] for name in names))


def _check(heads: Heads, shards: int) -> None:
    if heads.query % shards == 0:
        mine = heads.query // shards
        if heads.kv % shards == 0 or (heads.query // heads.kv) % mine == 0:
            return
    rule = f"query heads over {heads.kv} kv heads cannot be split over {shards} devices"
    remedy = "split the batch instead, or call it inside jax.shard_map with shards that hold whole groups"
    raise UnsupportedError("num_q_heads", heads.query, rule, remedy)


def _with_one_kv_head(
    function: Callable[..., tuple[Any, ...]],
    operands: Sequence[str],
    results: Sequence[str],
    heads: Heads,
    mesh: Any,
    split: Split,
) -> Callable[..., tuple[Any, ...]]:
    """The body of a shard whose query heads read one kv head of k and v that arrive whole."""
    mine, group = heads.query // split.shards, heads.query // heads.kv

    def local(*arrays: Any) -> tuple[Any, ...]:
        shard: Any = 0
        for name in split.names:
            shard = shard * mesh.shape[name] + lax.axis_index(name)
        head = shard * mine // group
        given = [
            lax.dynamic_slice_in_dim(x, head, 1, axis=2) if name in ("k", "v") else x
            for name, x in zip(operands, arrays, strict=True)
        ]
        found = function(*given)
        return tuple(place(x, head) if n in ("dk", "dv") else x for n, x in zip(results, found, strict=True))

    def place(gradient: Any, head: Any) -> Any:
        whole = jnp.zeros((*gradient.shape[:2], heads.kv, gradient.shape[3]), jnp.float32)
        whole = lax.dynamic_update_slice_in_dim(whole, gradient.astype(jnp.float32), head, axis=2)
        return lax.psum(whole, split.names).astype(gradient.dtype)

    return local


def _rule(
    mesh: Any, axes: dict[str, tuple[str, ...]], operands: Sequence[str], results: Sequence[str], heads: Heads
) -> SdyShardingRule:
    """What Shardy may propagate. kv heads share the query heads' factor only where every split of it is whole."""
    shared = heads.kv > 1 and all(heads.kv % size == 0 for size in mesh.shape.values())
    group = heads.query // max(heads.kv, 1)
    sizes: dict[str, int] = {}
    whole = list(_WHOLE)
    if shared and group > 1:
        places: dict[str, Any] = {"QUERY": CompoundFactor("head", "group"), "KV": "head"}
        sizes["group"] = group
    elif shared or group == 1:
        places = {"QUERY": "head", "KV": "head"}
    else:
        places = {"QUERY": "head", "KV": "kv_head"}
        whole.append("kv_head")

    def mappings(names: Sequence[str]) -> tuple[ArrayMapping, ...]:
        return tuple(ArrayMapping(*(places.get(axis, axis) for axis in axes[name])) for name in names)

    first_seen = dict.fromkeys(places.get(axis, axis) for name in (*operands, *results) for axis in axes[name])
    # Shardy wants special factors in the order in which they first appear.
    kept = tuple(factor for factor in first_seen if factor in whole)
    return SdyShardingRule(mappings(operands), mappings(results), need_replication_factors=kept, **sizes)
