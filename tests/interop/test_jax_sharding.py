"""Eight fake devices: sharded jit, shard_map and explicit meshes give what one device gives, and gather nothing."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from samples import assert_close, sample

jax = pytest.importorskip("jax")
jnp = jax.numpy

from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import cuflash  # noqa: E402
from cuflash.interop.jax import flash_attention  # noqa: E402

HEADS = 8
BY_HEADS = P("data", None, "model", None)


@pytest.fixture(autouse=True)
def _eight_devices() -> None:
    if len(jax.devices("cpu")) < 8:
        pytest.skip("another test opened the CPU backend before the devices were faked")


def mesh_of(kind: str, shape: tuple[int, int] = (2, 4)) -> Any:
    count = shape[0] * shape[1]
    types = (getattr(AxisType, kind),) * 2
    return jax.make_mesh(shape, ("data", "model"), axis_types=types, devices=jax.devices("cpu")[:count])


def attend(q: Any, k: Any, v: Any) -> Any:
    return cuflash.flash_attention(q, k, v, causal=True)


def reference(q: Any, k: Any, v: Any) -> Any:
    return flash_attention(q, k, v, causal=True, reference=True)


def squared(function: Any) -> Any:
    return lambda *xs: (function(*xs) ** 2).sum()


@cache
def given(num_kv_heads: int) -> tuple[list[Any], Any, Any]:
    """Arrays, and what one device makes of them."""
    arrays = sample(shape=(4, 16, 20, HEADS, num_kv_heads, 8))
    whole = [jnp.asarray(arrays[name]) for name in "qkv"]
    return whole, jax.jit(reference)(*whole), jax.jit(jax.grad(squared(reference), (0, 1, 2)))(*whole)


def spread(mesh: Any, num_kv_heads: int) -> list[Any]:
    kv = BY_HEADS if num_kv_heads % mesh.shape["model"] == 0 else P("data")
    places = [NamedSharding(mesh, spec) for spec in (BY_HEADS, kv, kv)]
    return [jax.device_put(x, place) for x, place in zip(given(num_kv_heads)[0], places, strict=True)]


def collectives(function: Any, arrays: list[Any]) -> dict[str, int]:
    text = function.lower(*arrays).compile().as_text()
    kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    return {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in kinds}


@pytest.mark.works("JAX", "plain jit over arrays sharded on batch and heads, any number of kv heads")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("num_kv_heads", [8, 4, 2, 1])
def test_plain_jit(num_kv_heads: int, kind: str) -> None:
    mesh = mesh_of(kind)
    _, out, gradients = given(num_kv_heads)
    with jax.set_mesh(mesh):
        arrays = spread(mesh, num_kv_heads)
        forward = jax.jit(attend)
        assert_close(forward(*arrays), out)
        backward = jax.jit(jax.grad(squared(attend), (0, 1, 2)))
        found = backward(*arrays)
        jax.tree.map(lambda one, other: assert_close(one, other, scale=16), found, gradients)
        assert forward(*arrays).sharding.spec[2] == "model"
        assert set(collectives(forward, arrays).values()) == {0}
        counts = collectives(backward, arrays)
        summed = 0 if num_kv_heads % 4 == 0 else 1  # a kv head's gradient is summed over the shards that read it
        assert counts.pop("all-reduce") <= summed
        assert set(counts.values()) == {0}


@pytest.mark.works("JAX", "shard_map with either check_vma")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis", ["heads", "batch"])
def test_shard_map(axis: str, check_vma: bool) -> None:
    mesh = mesh_of("Auto")
    spec = P("data", None, "model") if axis == "heads" else P(("data", "model"))
    whole, out, gradients = given(4)
    if axis == "batch":
        whole = [jnp.concatenate([x, 2 * x]) for x in whole]
        out, gradients = jax.jit(reference)(*whole), jax.jit(jax.grad(squared(reference), (0, 1, 2)))(*whole)
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=check_vma)
    assert_close(jax.jit(mapped)(*whole), out)
    found = jax.jit(jax.grad(squared(mapped), (0, 1, 2)))(*whole)
    jax.tree.map(lambda one, other: assert_close(one, other, scale=16), found, gradients)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("replicated", ["kv", "slopes", "q", "v"])
def test_shard_map_with_arguments_that_every_shard_shares(replicated: str, check_vma: bool) -> None:
    """Their gradient is the sum over the shards."""
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:2], ("data",))
    q, k, v = given(4)[0]
    slopes = jnp.linspace(0.1, 0.5, q.shape[2], dtype=jnp.float32)
    shared = {"kv": (1, 2), "slopes": (), "q": (0,), "v": (2,)}[replicated]
    arrays = [x[:1] if n in shared else jnp.concatenate([x[:1], 2 * x[:1]]) for n, x in enumerate((q, k, v))]
    specs = (*(P() if n in shared else P("data") for n in range(3)), P())

    def one(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        return flash_attention(q, k, v, causal=True, alibi_slopes=slopes)

    def by_hand(*arrays: Any) -> Any:
        *arrays, slopes = arrays
        halves = [[x if n in shared else x[half : half + 1] for n, x in enumerate(arrays)] for half in (0, 1)]
        return jnp.concatenate([one(*half, slopes) for half in halves])

    mapped = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=check_vma)
    found = jax.jit(jax.grad(squared(mapped), (0, 1, 2, 3)))(*arrays, slopes)
    wanted = jax.jit(jax.grad(squared(by_hand), (0, 1, 2, 3)))(*arrays, slopes)
    jax.tree.map(lambda one, other: assert_close(one, other, scale=16), found, wanted)


@pytest.mark.works("JAX", "vmap, scan and remat on sharded arrays")
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_transforms_on_sharded_arrays(num_kv_heads: int) -> None:
    mesh = mesh_of("Auto")
    q, k, _ = given(num_kv_heads)[0]

    def scalar(f: Any) -> Any:
        def run(q: Any, k: Any) -> Any:
            step = jax.checkpoint(lambda carry, _: (f(carry, k, k), None))
            stacked = jax.vmap(lambda q: jax.lax.scan(step, q, None, length=2)[0])(jnp.stack([q, 2 * q]))
            return (stacked**2).sum()

        return run

    with jax.set_mesh(mesh):
        sharded_q, sharded_k, _ = spread(mesh, num_kv_heads)
        found = jax.jit(jax.grad(scalar(attend), (0, 1)))(sharded_q, sharded_k)
    wanted = jax.jit(jax.grad(scalar(reference), (0, 1)))(q, k)
    jax.tree.map(lambda one, other: assert_close(one, other, scale=16), found, wanted)


@pytest.mark.parametrize("spec", [P(None, "model"), P(None, None, None, "model"), P()], ids=str)
def test_other_shardings_are_right_too(spec: Any) -> None:
    mesh = mesh_of("Auto", (1, 8))
    whole, *_ = given(8)
    arrays = [jax.device_put(x[:, :16], NamedSharding(mesh, spec)) for x in whole]
    assert_close(jax.jit(attend)(*arrays), reference(*(x[:, :16] for x in whole)))


def test_slopes_are_split_with_the_heads() -> None:
    mesh = mesh_of("Auto")
    whole, *_ = given(2)
    slopes = jnp.linspace(0.1, 0.8, HEADS)
    with jax.set_mesh(mesh):
        arrays = spread(mesh, 2)
        found = jax.jit(lambda q, k, v, s: cuflash.flash_attention(q, k, v, alibi_slopes=s))(*arrays, slopes)
    assert_close(found, flash_attention(*whole, alibi_slopes=slopes, reference=True))


def test_heads_that_cannot_be_split_are_refused() -> None:
    mesh = mesh_of("Auto", (1, 8))
    arrays = sample(shape=(1, 8, 8, 24, 6, 8))  # three query heads a device, four to a kv head
    q, k, v = (jnp.asarray(arrays[name]) for name in "qkv")
    q = jax.device_put(q, NamedSharding(mesh, P(None, None, "model")))
    with pytest.raises(Exception, match=r"24.*query heads over 6 kv heads cannot be split over 8 devices"):
        jax.jit(attend)(q, k, v)


@pytest.mark.works("JAX", "kernels on the emulator under a sharded jit")
@pytest.mark.usefixtures("emulated")
def test_the_foreign_call_inside_the_partitioner() -> None:
    mesh = mesh_of("Auto", (2, 2))
    arrays = sample(shape=(2, 33, 40, 4, 2, 16))
    whole = [jnp.asarray(arrays[name]) for name in "qkv"]
    sharded = [jax.device_put(x, NamedSharding(mesh, P("data", None, "model"))) for x in whole]
    assert_close(jax.jit(attend)(*sharded), reference(*whole))
