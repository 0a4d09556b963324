"""Reported faults of the surroundings: streams, devices, threads, forks, caches, imports, installs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import case, dense, normal
from oracle import assert_right
from places import Place

import cuflash
from cuflash.architectures import architecture_of
from cuflash.errors import DeviceError, UnsupportedError
from cuflash.problem import Keywords

ROOT = Path(__file__).resolve().parents[2]
SMALL = """
import numpy as np, cupy, cuflash
q = cupy.asarray(np.random.default_rng(0).standard_normal((1, 70, 2, 64)).astype(np.float16))
out = cuflash.flash_attention(q, q, q, causal=True)
print(repr(float(cupy.abs(out.astype(cupy.float32)).sum())))
"""


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)


def test_import_without_a_driver() -> None:
    """Import, option objects, help and the reference work; the first GPU call raises one readable error."""
    script = """
import numpy as np, cuflash, cuflash.reference
from cuflash.cli import main
from click.testing import CliRunner
cuflash.SlidingWindow(3, 0), cuflash.Softcap(5.0), cuflash.Alibi()
assert CliRunner().invoke(main, ["--help"]).exit_code == 0
q = np.ones((1, 2, 1, 8), np.float32)
assert np.allclose(cuflash.reference.attention(q, q, q)[0], 1)
from cuflash.backends import why_no_gpu
assert why_no_gpu()
print("fine")
"""
    result = run(script, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0 and result.stdout.strip() == "fine", result.stderr


@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (7, 5)])
def test_a_gpu_too_old_is_named(capability: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        architecture_of(capability)
    assert f"{capability[0]}.{capability[1]}" in str(caught.value) and "8.0" in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("capability", [(12, 0), (12, 1), (13, 0)])
def test_a_gpu_newer_than_the_tables_gets_the_generic_family(capability: tuple[int, int]) -> None:
    row = architecture_of(capability)
    assert "sm80" in row.families and row.shared_limit >= 99 * 1024 and row.target.startswith("sm_1")


def test_a_target_the_compiler_does_not_know_is_named() -> None:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    from cuflash import jit
    from cuflash.architectures import Device
    from cuflash.errors import CompileError
    from cuflash.plan import forward_plan
    from cuflash.problem import Problem, spec_of_contiguous

    spec = spec_of_contiguous((1, 64, 1, 64), "float16")
    variant = forward_plan(Problem.forward(spec, spec, spec), Device.emulated()).launches[0].variant
    with pytest.raises(CompileError) as caught:
        jit.compile_cubin(variant, "sm_61")
    assert "sm_61" in str(caught.value) and variant.symbol in str(caught.value)
    assert "cuflash" in str(caught.value).rsplit("reproduce with", 1)[-1]


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

    cases = [case(dense(1, 4, 4, 128, 128, dim), dim) for dim in (32, 64, 80, 128)]
    rights = [gpu.forward(arrays)["out"] for arrays in cases]
    plans = [cuflash.explain(*(cupy.asarray(arrays[name]) for name in "qkv")) for arrays in cases]
    variants = {kernel.variant for plan in plans for kernel in plan.launches}
    for table in (jit._loaded, launch._prepared):
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
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUPY_CACHE_DIR": str(tmp_path)}
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


INSTALLED = {
    "none": ([], []),
    "one": (["cupy-cuda12x"], []),
    "two": (["cupy-cuda12x", "cupy_cuda13x"], ["cupy-cuda12x and cupy-cuda13x"]),
    "from conda": (["cupy"], []),
    "from conda and a wheel": (["cupy", "cupy-cuda13x"], ["cupy and cupy-cuda13x"]),
}


@pytest.mark.parametrize(("names", "reported"), INSTALLED.values(), ids=INSTALLED)
def test_two_cupy_packages_are_reported(names: list[str], reported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What `cuflash info` says of fake lists of installed packages; no wheel is a hard dependency of ours."""
    from importlib import metadata

    from cuflash import info

    class Fake:
        def __init__(self, name: str) -> None:
            self.metadata = {"Name": name}

    monkeypatch.setattr(metadata, "distributions", lambda: [Fake(name) for name in ("numpy", *names)])
    found = [row["what"] for row in info._missing("no GPU") if "single CuPy" in row["what"]]
    assert len(found) == len(reported) and all(part in found[0] for part in reported)
    hard = (ROOT / "pyproject.toml").read_text().split("\ndependencies = [")[1].split("]")[0]
    assert "numpy" in hard and "cupy" not in hard


def test_missing_cupy_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuflash.backends import why_no_gpu

    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "cuflash[cuda12]" in why_no_gpu() and "cuflash[cuda13]" in why_no_gpu()


def test_kernels_need_no_header_of_a_toolkit() -> None:
    """A wheel-only install has no cuda_fp16.h: every include of a kernel is one of our own."""
    sources = [p for p in (ROOT / "cuda_src").rglob("*.cuh") if "emulator" not in p.relative_to(ROOT).parts]
    assert sources
    assert [path.name for path in sources if "#include <" in path.read_text()] == []
