"""Arrays on the second GPU: results live there, the current device stays, mixtures are refused by name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from samples import assert_close, exact, sample

import cuflash
from cuflash.backends import why_no_gpu
from cuflash.errors import DeviceError

pytestmark = pytest.mark.gpu
SHAPE = (1, 200, 200, 4, 2, 64)
attend = partial(cuflash.flash_attention, causal=True)


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    if why_no_gpu():
        pytest.skip("no GPU")
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")


def on_cupy(device: int) -> list[Any]:
    import cupy

    with cupy.cuda.Device(device):
        return [cupy.asarray(sample("float16", SHAPE)[name]) for name in "qkv"]


def wanted() -> Any:
    return exact(sample("float16", SHAPE), causal=True)[0]


def test_cupy() -> None:
    import cupy

    arrays = on_cupy(1)
    with cupy.cuda.Device(0):
        out = attend(*arrays)
        assert cupy.cuda.runtime.getDevice() == 0
    assert out.device.id == 1
    assert_close(out.get(), wanted(), "float16", scale=4)
    with pytest.raises(DeviceError, match=r"k.device=0 must lie on q's device 1"):
        attend(arrays[0], on_cupy(0)[1], arrays[2])


def test_threads_with_a_device_each() -> None:
    import cupy

    def call(number: int) -> None:
        with cupy.cuda.Device(number % 2):
            assert_close(attend(*on_cupy(number % 2)).get(), wanted(), "float16", scale=4)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(16)))


def test_torch() -> None:
    torch = pytest.importorskip("torch")
    arrays = [torch.from_numpy(sample("float16", SHAPE)[name].copy()).to("cuda:1").requires_grad_() for name in "qkv"]
    with torch.cuda.device(0):
        out = attend(*arrays)
        gradients = torch.autograd.grad(out.float().sum(), arrays)
        assert torch.cuda.current_device() == 0
    assert {x.device.index for x in (out, *gradients)} == {1}
    assert_close(out.detach().cpu().numpy(), wanted(), "float16", scale=4)
    with pytest.raises(DeviceError, match=r"k.device='cuda:0' must be q's device cuda:1"):
        attend(arrays[0], arrays[1].to("cuda:0"), arrays[2])


@pytest.mark.parametrize("num_kv_heads", [2, 1])
def test_jax_on_the_second_device_and_on_both(num_kv_heads: int) -> None:
    jax = pytest.importorskip("jax")
    if len(jax.devices()) < 2 or jax.default_backend() != "gpu":
        pytest.skip("JAX has no two GPUs")
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    arrays = sample("float16", (2, 200, 200, 4, num_kv_heads, 64))
    expected = exact(arrays, causal=True)[0]
    second = [jax.device_put(arrays[name], jax.devices()[1]) for name in "qkv"]
    out = jax.jit(attend)(*second)
    assert out.devices() == {jax.devices()[1]}
    assert_close(np.asarray(out), expected, "float16", scale=4)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    for spec in (P("x"), P(None, None, "x")):
        q = jax.device_put(arrays["q"], NamedSharding(mesh, spec))
        found = jax.jit(attend)(q, *(jax.device_put(arrays[n], NamedSharding(mesh, P())) for n in "kv"))
        assert_close(np.asarray(found), expected, "float16", scale=4)
