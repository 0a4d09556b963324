"""Reported faults: shared memory beyond 48 KiB without the attribute, arrays of the wrong dtype read bytewise."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from arrays import case, dense, normal
from oracle import assert_right
from places import Place

from cuflash.errors import ArgumentTypeError, DeviceError
from cuflash.problem import Keywords


def test_shared_memory_beyond_48_kib(device: Place) -> None:
    arrays = case(dense(1, 1, 1, 64, 64, 256), 1)
    plan = device.eager.plan("forward", {name: device.put(arrays[name]) for name in "qkv"}, Keywords())
    assert max(launch.shared_bytes for launch in plan.launches) > 48 * 1024
    assert_right(device.both(arrays), arrays)


def test_shared_memory_beyond_48_kib_in_two_threads(device: Place) -> None:
    arrays = case(dense(1, 1, 1, 64, 64, 256), 2)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(forward(device, arrays))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    for results in found:
        assert_right(results, arrays)


def forward(device: Place, arrays: dict[str, Any]) -> dict[str, Any]:
    out, lse = device.eager.forward({name: device.put(arrays[name]) for name in "qkv"}, Keywords())
    return {"out": device.get(out), "lse": device.get(lse)}


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "complex64", "bool", "int8"])
def test_a_wrong_dtype_is_named(device: Place, dtype: str, name: str) -> None:
    arrays = {letter: normal((1, 8, 2, 32), "float16", 1) for letter in "qkv"}
    arrays[name] = arrays[name].astype(dtype)
    inputs = {letter: device.put(array) for letter, array in arrays.items()}
    with pytest.raises(ArgumentTypeError) as caught:
        device.eager.forward(inputs, Keywords())
    blamed = "k" if dtype == "float32" and name == "q" else name  # q sets the dtype where both are possible
    assert f"{blamed}.dtype" in str(caught.value) and "float16" in str(caught.value)
    assert dtype in str(caught.value)


def test_lse_of_the_wrong_dtype_is_named(device: Place) -> None:
    arrays = case(dense(1, 2, 2, 8, 8, 32), 3)
    arrays |= device.forward(arrays)
    arrays["lse"] = arrays["lse"].astype(np.float16)
    with pytest.raises(ArgumentTypeError, match=r"lse\.dtype.*float16.*float32"):
        device.backward(arrays)


def test_a_host_array_never_reaches_a_kernel(gpu: Place) -> None:
    import cupy

    import cuflash

    host = normal((1, 8, 2, 32), "float16", 4)
    on_gpu = cupy.asarray(host)
    with pytest.raises((ArgumentTypeError, DeviceError), match="k"):
        cuflash.flash_attention(on_gpu, host, on_gpu)
