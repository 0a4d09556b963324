"""The drop-in for jax.nn.dot_product_attention against the original, argument by argument."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
from samples import assert_close, sample

jax = pytest.importorskip("jax")
jnp = jax.numpy

from cuflash.errors import UnsupportedError  # noqa: E402
from cuflash.interop.jax import dot_product_attention  # noqa: E402


def put(dtype: str = "float32", shape: tuple[int, ...] = (2, 17, 23, 4, 2, 8)) -> list[Any]:
    arrays = sample(dtype, shape)
    return [jnp.asarray(arrays[name]) for name in "qkv"]


def first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.works("JAX", "drop-in for jax.nn.dot_product_attention (bias, mask and lengths refused)")
@pytest.mark.parametrize(
    "words",
    [
        {},
        {"is_causal": True},
        {"local_window_size": 3},
        {"local_window_size": (4, 1)},
        {"local_window_size": (2, 0), "is_causal": True},
        {"scale": 0.3},
        {"return_residual": True, "is_causal": True},
    ],
    ids=str,
)
def test_equals_xla(words: dict[str, Any]) -> None:
    arrays = put()
    original = jax.nn.dot_product_attention
    found, wanted = (jax.jit(partial(f, **words))(*arrays) for f in (dot_product_attention, original))
    jax.tree.map(assert_close, found, wanted)
    gradients = [
        jax.jit(jax.grad(lambda *xs, f=f: (first(f(*xs, **words)) ** 2).sum(), (0, 1, 2)))(*arrays)
        for f in (dot_product_attention, original)
    ]
    jax.tree.map(lambda one, other: assert_close(one, other, scale=4), *gradients)


@pytest.mark.parametrize("residual", [False, True])
def test_rows_without_keys_are_the_mean_as_in_xla(residual: bool) -> None:
    arrays = put(shape=(1, 20, 6, 4, 2, 8))
    words = {"local_window_size": (2, 1), "return_residual": residual}
    found, wanted = (f(*arrays, **words) for f in (dot_product_attention, jax.nn.dot_product_attention))
    jax.tree.map(assert_close, found, wanted)


def test_without_a_batch() -> None:
    arrays = [x[0] for x in put()]
    assert_close(dot_product_attention(*arrays), jax.nn.dot_product_attention(*arrays))


def test_bfloat16_residual_has_the_keys_dtype_and_no_gradient() -> None:
    arrays = put("bfloat16")
    _, residual = dot_product_attention(*arrays, return_residual=True)
    assert residual.dtype == jnp.bfloat16
    assert residual.shape == (2, 17, 4)

    def scalar(q: Any) -> Any:
        return dot_product_attention(q, *arrays[1:], return_residual=True)[1].astype(jnp.float32).sum()

    assert not jax.grad(scalar)(arrays[0]).any()


@pytest.mark.parametrize("name", ["bias", "mask", "query_seq_lengths", "key_value_seq_lengths", "implementation"])
def test_what_has_no_kernel_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        dot_product_attention(*put(), **{name: "xla" if name == "implementation" else jnp.ones(2)})


def test_the_signature_is_the_originals() -> None:
    ours, original = (inspect.signature(f) for f in (dot_product_attention, jax.nn.dot_product_attention))
    assert list(ours.parameters) == list(original.parameters)
    for name, parameter in ours.parameters.items():
        assert parameter.default == original.parameters[name].default
        assert parameter.kind == original.parameters[name].kind
