"""The doors on a GPU: values, order on streams, graphs, threads, memory, and both launchers."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import assert_close, exact, sample

import cuflash
from cuflash.backends import why_no_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_no_gpu()), reason="no GPU")]
SHAPE = (2, 200, 200, 8, 2, 64)
DTYPES = ["float16", "bfloat16", "float32"]
attend = partial(cuflash.flash_attention, causal=True)


def jax_on_gpu() -> Any:
    jax = pytest.importorskip("jax")
    try:
        jax.local_devices(backend="cuda")
    except RuntimeError:
        pytest.skip("JAX has no CUDA backend here")
    return jax


def torch_on_gpu() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return torch


def check(found: Any, arrays: dict[str, Any], dtype: str) -> None:
    for number, (got, wanted) in enumerate(zip(found, exact(arrays, causal=True), strict=True)):
        assert_close(got, wanted, "float32" if number == 1 else dtype, scale=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax(dtype: str) -> None:
    jax = jax_on_gpu()
    arrays = sample(dtype, SHAPE)
    given = [jax.numpy.asarray(arrays[name]) for name in "qkv"]
    (out, lse), pullback = jax.jit(lambda *xs: jax.vjp(partial(attend, return_lse=True), *xs))(*given)
    gradients = jax.jit(pullback)((jax.numpy.asarray(arrays["d_out"]), jax.numpy.zeros_like(lse)))
    assert next(iter(out.devices())).platform == "gpu"
    check((out, lse, *gradients), arrays, dtype)


@pytest.mark.parametrize("launcher", ["c", "python"])
def test_jax_through_either_launcher(launcher: str) -> None:
    jax_on_gpu()
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-k", "test_jax and not launcher and float16"]
    environment = {**os.environ, "CUFLASH_LAUNCHER": launcher, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_jax_keeps_order_behind_a_slow_kernel() -> None:
    jax = jax_on_gpu()
    jnp = jax.numpy
    arrays = sample("bfloat16", SHAPE)
    q, k, v = (jnp.asarray(arrays[name]) for name in "qkv")
    heavy = jnp.ones((4096, 4096), jnp.bfloat16)

    @jax.jit
    def late(q: Any, heavy: Any) -> Any:
        for _ in range(20):
            heavy = jnp.tanh(heavy @ heavy)
        zero = (heavy[0, 0] * 0).astype(q.dtype)
        return attend(q + zero, k, v) + zero

    wanted = exact(arrays, causal=True)[0]
    for _ in range(20):
        assert_close(late(q, heavy), wanted, "bfloat16", scale=4)


def test_jax_programs_of_many_layers_record_into_graphs() -> None:
    jax = jax_on_gpu()
    arrays = sample("bfloat16", SHAPE)
    q, k, v = (jax.numpy.asarray(arrays[name]) for name in "qkv")

    @jax.jit
    def stack(q: Any) -> Any:
        for _ in range(12):
            q = attend(q, k, v)
        return q

    first = np.asarray(stack(q))
    for step in range(50):
        held = [jax.numpy.zeros((step % 5 + 1, 1024)) for _ in range(step % 3)]  # buffers move between replays
        assert np.array_equal(np.asarray(stack(q + 0)), first)
        del held


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch(dtype: str) -> None:
    torch = torch_on_gpu()
    from cuflash.interop.torch_backend import as_numpy, as_torch

    arrays = sample(dtype, SHAPE)
    given = [as_torch(arrays[name].copy()).cuda().requires_grad_() for name in "qkv"]
    out, lse = attend(*given, return_lse=True)
    gradients = torch.autograd.grad(out, given, as_torch(arrays["d_out"].copy()).cuda())
    check([as_numpy(x.detach().cpu()) for x in (out, lse, *gradients)], arrays, dtype)


def test_torch_on_a_stream_of_its_own_behind_a_slow_kernel() -> None:
    torch = torch_on_gpu()
    from cuflash.interop.torch_backend import as_numpy, as_torch

    arrays = sample("bfloat16", SHAPE)
    source = [as_torch(arrays[name].copy()).cuda() for name in "qkv"]
    wanted = exact(arrays, causal=True)[0]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(50):
        with torch.cuda.stream(stream):
            q = torch.full_like(source[0], torch.nan)
            torch.cuda._sleep(2_000_000)
            q.copy_(source[0])
            out = attend(q, *source[1:])
            host = out.to("cpu", non_blocking=True)
        stream.synchronize()
        assert_close(as_numpy(host), wanted, "bfloat16", scale=4)


def test_torch_forward_and_backward_in_a_cuda_graph() -> None:
    torch = torch_on_gpu()
    given = [torch.randn(2, 200, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]

    def step() -> Any:
        out = attend(*given)
        return out, torch.autograd.grad(out, given, torch.ones_like(out))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, gradients = step()
    with torch.no_grad():
        given[0].copy_(torch.randn_like(given[0]))
    graph.replay()
    torch.cuda.synchronize()
    again, gradients_again = step()
    assert torch.equal(out, again)
    for one, other in zip(gradients, gradients_again, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def test_cupy_on_a_stream_behind_a_slow_kernel() -> None:
    import cupy

    slow = cupy.RawKernel(
        'extern "C" __global__ void slow(long long n) { long long t = clock64(); while (clock64() - t < n); }', "slow"
    )
    arrays = sample("float16", SHAPE)
    source = [cupy.asarray(arrays[name]) for name in "qkv"]
    wanted = exact(arrays, causal=True)[0]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    for _ in range(50):
        with stream:
            q = cupy.full_like(source[0], cupy.nan)
            slow((1,), (1,), (np.int64(2_000_000),))
            q[...] = source[0]
            host = attend(q, *source[1:]).get(stream=stream)
        assert_close(host, wanted, "float16", scale=4)


def test_threads_race_to_the_first_call() -> None:
    import cupy

    arrays = {dim: sample("float16", (1, 65, 65, 2, 2, dim)) for dim in (24, 40, 56)}

    def call(number: int) -> None:
        dim = (24, 40, 56)[number % 3]
        with cupy.cuda.Stream(non_blocking=True) as stream:
            q, k, v = (cupy.asarray(arrays[dim][name]) for name in "qkv")
            host = attend(q, k, v).get(stream=stream)
        assert_close(host, exact(arrays[dim], causal=True)[0], "float16", scale=4)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(call, range(96)))


@pytest.mark.parametrize("library", ["cupy", "torch", "jax"])
def test_memory_stays_flat(library: str) -> None:
    import cupy

    arrays = sample("bfloat16", SHAPE)
    if library == "jax":
        jax = jax_on_gpu()
        put, call = jax.numpy.asarray, jax.jit(attend)
    elif library == "torch":
        torch_on_gpu()
        from cuflash.interop.torch_backend import as_torch

        put, call = (lambda x: as_torch(x.copy()).cuda()), attend
    else:
        put, call = cupy.asarray, attend
    given = [put(arrays[name]) for name in "qkv"]
    for _ in range(50):
        call(*given)
    cupy.cuda.Device().synchronize()
    before = cupy.cuda.runtime.memGetInfo()[0]
    for _ in range(2000):
        call(*given)
    cupy.cuda.Device().synchronize()
    assert before - cupy.cuda.runtime.memGetInfo()[0] <= 64 << 20


def test_numpy_arrays_go_through_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUFLASH_NUMPY", raising=False)
    arrays = sample("float16", SHAPE)
    (out, lse), pullback = cuflash.flash_attention_vjp(*(arrays[name] for name in "qkv"), causal=True)
    check((out, lse, *pullback(arrays["d_out"])), arrays, "float16")


class Producer:
    """A library's array that writes down which stream the consumer names."""

    def __init__(self, array: Any) -> None:
        self.array, self.streams = array, []  # type: ignore[var-annotated]

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, **words: Any) -> Any:
        self.streams.append(stream)
        return self.array.__dlpack__(stream=stream, **words)


def test_streams_of_the_exchange_have_the_protocols_numbers() -> None:
    """1 is the default stream, 2 the thread's, more is a handle; 0 could mean either of two and is never said."""
    cupy = pytest.importorskip("cupy")
    arrays, stream = sample("float16"), cupy.cuda.Stream(non_blocking=True)
    with stream:
        given = [Producer(cupy.asarray(arrays[name])) for name in "qkv"]
    for current, wanted in ((cupy.cuda.Stream.null, {1}), (stream, {stream.ptr})):
        with current:
            out = attend(*given)
        current.synchronize()
        assert {number for one in given for number in one.streams} == wanted
        assert_close(cupy.asnumpy(out), exact(arrays, causal=True)[0], "float16")
        for one in given:
            one.streams.clear()
    for number in (None, -1, 1, 2, stream.ptr):
        assert out.__dlpack__(stream=number)
