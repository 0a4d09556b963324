"""Reported faults of the surroundings: streams, graphs, devices, threads, forks, caches."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import case, dense, normal
from children import child_environment, run
from oracle import assert_right
from places import Place

import cuflash
from cuflash.errors import DeviceError
from cuflash.problem import Keywords

SMALL = """
import numpy as np, cupy, cuflash
q = cupy.asarray(np.random.default_rng(0).standard_normal((1, 70, 2, 64)).astype(np.float16))
out = cuflash.flash_attention(q, q, q, causal=True)
print(repr(float(cupy.abs(out.astype(cupy.float32)).sum())))
"""

LATE = """
import threading, time
import numpy as np, cuflash
def late():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    from cuflash import side_by_side
    done = []
    side_by_side.side_by_side(done.append, range(5), 3)
    q = np.ones((1, 8, 1, 8), np.float32)
    print(sorted(done), cuflash.flash_attention(q, q, q).sum())
threading.Thread(target=late).start()
"""


def test_a_thread_may_outlive_the_main_one() -> None:
    """Servers whose script has ended: a pool of concurrent.futures takes no work then, nor can it be imported."""
    pytest.importorskip("cuflash.jit")
    done = run(LATE, CUFLASH_NUMPY="emulator")
    assert done.stdout == "[0, 1, 2, 3, 4] 64.0\n", done.stderr


FORKED = """
import os, signal
import numpy as np, cuflash
q = np.random.default_rng(0).standard_normal((1, 33, 2, 16)).astype(np.float32)
out = cuflash.flash_attention(q, q, q, causal=True)
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(0 if (cuflash.flash_attention(q, q, q, causal=True) == out).all() else 1)
print(os.waitpid(child, 0)[1])
"""


def test_a_child_of_a_busy_parent_may_use_the_emulator() -> None:
    assert run(FORKED, CUFLASH_NUMPY="emulator").stdout == "0\n"


def test_launches_follow_the_current_stream(gpu: Place) -> None:
    """A slow kernel fills q on a non-blocking stream, then attention, then a copy of out: right without a wait."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    k, v = (cupy.asarray(normal((1, 1024, 4, 128), "float16", seed)) for seed in (1, 2))
    value = cupy.asarray(normal((1, 1024, 4, 128), "float16", 3))
    right, _ = gpu.eager.forward({"q": value, "k": k, "v": v}, Keywords())
    cupy.cuda.Device().synchronize()
    slow = cupy.ones((3000, 3000), cupy.float32)
    for _ in range(50):
        with stream:
            q = cupy.zeros_like(value)
            for _ in range(3):
                slow = slow @ slow * 0
            q += value + slow[0, 0].astype(cupy.float16)
            out, _ = gpu.eager.forward({"q": q, "k": k, "v": v}, Keywords())
            copy = out.copy()
        stream.synchronize()
        assert (copy.view(cupy.uint16) == right.view(cupy.uint16)).all()


def test_a_graph_repeats_a_captured_call(gpu: Place) -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    arrays = {name: gpu.put(x) for name, x in case(dense(1, 2, 2, 70, 70, 64), 1).items() if name != "d_out"}
    right = {**arrays, "q": arrays["q"] * 2}
    expected, _ = gpu.eager.forward(right, Keywords())
    out = cupy.empty_like(expected)
    with stream:
        for _ in range(3):
            gpu.eager.forward(arrays, Keywords(), out)
            gpu.eager.backend.guarded.clear()  # type: ignore[attr-defined]  # back to the pool: a capture cannot allocate
        stream.begin_capture()
        gpu.eager.forward(arrays, Keywords(), out)
        graph = stream.end_capture()
        arrays["q"][...] = right["q"]
        out.fill(0)
        graph.launch(stream)
    stream.synchronize()
    assert (out.view(cupy.uint16) == expected.view(cupy.uint16)).all()


def test_a_second_device(gpu: Place) -> None:
    """Inputs on device 1 while device 0 is current; each device from a thread of its own; mixed devices refused."""
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    host = case(dense(1, 4, 4, 256, 256, 64), 1)
    placed: dict[int, dict[str, Any]] = {}
    found: dict[int, Any] = {}
    for index in (0, 1):
        with cupy.cuda.Device(index):
            placed[index] = {name: cupy.asarray(host[name]) for name in "qkv"}
    out = cuflash.flash_attention(*placed[1].values())
    assert out.device.id == 1 and cupy.cuda.runtime.getDevice() == 0
    assert_right({"out": out.get()}, {name: host[name] for name in "qkv"})

    def work(index: int) -> None:
        with cupy.cuda.Device(index):
            found[index] = cuflash.flash_attention(*placed[index].values()).get()

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(found[0].view(np.uint16), found[1].view(np.uint16))
    with pytest.raises(DeviceError, match="1"):
        cuflash.flash_attention(placed[0]["q"], placed[1]["k"], placed[0]["v"])


def test_nothing_happens_on_device_zero_meanwhile(gpu: Place) -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    script = f"import cupy\ncupy.cuda.Device(1).use()\n{SMALL}\nimport ctypes\n" + (
        "active = ctypes.c_int(); flags = ctypes.c_uint()\n"
        "state = ctypes.CDLL('libcuda.so.1').cuDevicePrimaryCtxGetState\n"
        "assert state(0, ctypes.byref(flags), ctypes.byref(active)) == 0\n"
        "assert active.value == 0, 'a context on device 0'\n"
    )
    result = run(script)
    assert result.returncode == 0, result.stderr


def test_many_threads_race_to_compile(gpu: Place) -> None:
    """32 threads with mixed head dimensions from an empty table: every result right, every variant built once."""
    import cupy

    from cuflash import jit, launch
    from cuflash.interop import cupy as door

    cases = [case(dense(1, 4, 4, 128, 128, dim), dim) for dim in (32, 64, 80, 128)]
    rights = [gpu.forward(arrays)["out"] for arrays in cases]
    plans = [cuflash.explain(*(cupy.asarray(arrays[name]) for name in "qkv")) for arrays in cases]
    variants = {kernel.variant for plan in plans for kernel in plan.launches}
    for table in (jit._loaded, launch._prepared, door.eager.backend._prepared):
        table.clear()
    wrong: list[str] = []

    def work(number: int) -> None:
        try:
            with cupy.cuda.Stream(non_blocking=True) as stream:
                for turn in range(200):
                    index = (number + turn) % len(cases)
                    placed = [cupy.asarray(cases[index][name]) for name in "qkv"]
                    out = cuflash.flash_attention(*placed)
                    stream.synchronize()
                    if out.get().tobytes() != rights[index].tobytes():
                        wrong.append(f"head_dim {placed[0].shape[-1]}")
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert {key[1] for key in jit._loaded} == variants and len(jit._loaded) == len(variants)


def test_processes_share_an_empty_kernel_cache(gpu: Place, tmp_path: Path) -> None:
    """Eight at once on an empty folder; then cut files, then a folder that cannot be written: always the same sum."""
    command = [sys.executable, "-c", SMALL]
    environment = child_environment(CUPY_CACHE_DIR=str(tmp_path))
    children = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    sums = {child.communicate(timeout=120)[0].strip() for child in children}
    assert len(sums) == 1 and all(child.returncode == 0 for child in children)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert run(SMALL, CUPY_CACHE_DIR=str(tmp_path)).stdout.strip() in sums
    tmp_path.chmod(0o500)
    try:
        assert run(SMALL, CUPY_CACHE_DIR=str(tmp_path)).stdout.strip() in sums
    finally:
        tmp_path.chmod(0o700)


FORK = """
import os, sys
import cuflash, cuflash.launch
child = os.fork()
if child == 0:
    {small}
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_may_compute_after_a_fork_of_an_idle_parent(gpu: Place) -> None:
    small = SMALL.strip().replace("\n", "\n    ")
    result = run(FORK.format(small=small))
    assert result.returncode == 0, result.stderr


def test_a_child_of_a_busy_parent_gets_a_message(gpu: Place) -> None:
    """CUDA does not survive a fork: an exception, neither a crash nor a hang."""
    body = "try:\n    cuflash.flash_attention(q, q, q)\nexcept Exception:\n    os._exit(0)\nos._exit(3)"
    result = run(f"import os, sys\n{SMALL}\n" + FORK.split("\n", 3)[3].format(small=body.replace("\n", "\n    ")))
    assert result.returncode == 0, result.stderr
