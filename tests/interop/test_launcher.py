"""Both launchers over a driver that only writes down what it is told: the C one and its twin say the same."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver_double import WritingDriver, drive
from test_words import plans

from cuflash.errors import CuflashError
from cuflash.interop import launcher as launchers
from cuflash.interop.driver import PythonLauncher
from cuflash.interop.words import encode, kernel_key, operand_names
from cuflash.plan import Launch, Plan, Pointer, TensorMapSlot

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")
LAUNCHERS = [pytest.param("c", marks=needs_compiler), "python"]
OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@pytest.fixture(params=LAUNCHERS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Any, WritingDriver]]:
    driver = WritingDriver()
    if request.param == "python":
        yield PythonLauncher(driver), driver
        return
    chosen = launchers.CLauncher(launchers.build())
    drive(chosen.library, driver)
    yield chosen, driver
    drive(chosen.library, None)


def register(launcher: Any, driver: WritingDriver, plan: Plan, device: int = 0) -> None:
    for number, launch in enumerate(plan.launches):
        handle = 0x1000 + number
        driver.param_bytes[handle] = len(launch.params)
        launcher.register(kernel_key(launch.variant, "sm_80"), device, handle)


@pytest.mark.parametrize("kind", [0, 1], ids=["forward", "backward"])
def test_parameters_reach_the_driver_with_every_address_in_place(pair: Any, kind: int) -> None:
    launcher, driver = pair
    plan = plans()[kind]
    register(launcher, driver, plan)
    names = operand_names(plan)
    addresses = [0x10000000 * (i + 1) for i in range(len(names))]
    launcher.prepare(encode(plan, "sm_80"))(addresses, 77, 0)
    assert len(driver.launched) == len(plan.launches)
    for number, (got, launch) in enumerate(zip(driver.launched, plan.launches, strict=True)):
        wanted = bytearray(launch.params)
        for p in launch.pointers:
            value = addresses[names.index(p.operand)] + p.byte_offset
            wanted[p.offset : p.offset + 8] = value.to_bytes(8, "little")
        assert got == (0x1000 + number, (launch.grid, launch.block, launch.shared_bytes, 77), bytes(wanted))


def test_the_current_device_chooses_the_kernel(pair: Any) -> None:
    launcher, driver = pair
    plan = plans()[0]
    for device in (0, 1):
        driver.param_bytes[0x2000 + device] = len(plan.launches[0].params)
        launcher.register(kernel_key(plan.launches[0].variant, "sm_80"), device, 0x2000 + device)
    operands = [0x1000] * len(operand_names(plan))
    for device in (1, 0):
        driver.device = device
        launcher.prepare(encode(plan, "sm_80"))(operands, 0, -1)
    assert [handle for handle, _, _ in driver.launched] == [0x2001, 0x2000]


def test_a_kernel_that_was_never_loaded_is_named(pair: Any) -> None:
    launcher, _ = pair
    plan = plans()[0]
    with pytest.raises(CuflashError, match="not loaded on device 3"):
        launcher.prepare(encode(plan, "sm_80"))([0] * len(operand_names(plan)), 0, 3)


def test_the_drivers_refusal_is_reported(pair: Any) -> None:
    launcher, driver = pair
    plan = plans()[0]
    driver.param_bytes[0xBAD] = len(plan.launches[0].params)
    launcher.register(kernel_key(plan.launches[0].variant, "sm_86"), 0, 0xBAD)
    with pytest.raises(CuflashError, match="cuLaunchKernelEx returned 700"):
        launcher.prepare(encode(plan, "sm_86"))([0] * len(operand_names(plan)), 0, 0)


@pytest.mark.parametrize("damage", [lambda w: w[:-3], lambda w: w[:5], lambda w: [9, *w[1:]]])
def test_damaged_words_launch_nothing(pair: Any, damage: Callable[[list[int]], list[int]]) -> None:
    launcher, driver = pair
    plan = plans()[0]
    register(launcher, driver, plan)
    words = np.array(damage(encode(plan, "sm_80").tolist()), np.int64)
    with pytest.raises(CuflashError):
        launcher.prepare(words)([0] * len(operand_names(plan)), 0, 0)
    assert not driver.launched


def test_kernels_overlap_on_streams_but_not_in_graphs(pair: Any) -> None:
    """A kernel that may start early has the attribute, unless its stream is being captured."""
    launcher, driver = pair
    base = plans()[0]
    launches = tuple(replace(base.launches[0], overlap=overlap) for overlap in (False, True))
    plan = replace(base, launches=launches)
    driver.param_bytes[0x1000] = len(launches[0].params)
    launcher.register(kernel_key(launches[0].variant, "sm_80"), 0, 0x1000)
    run = launcher.prepare(encode(plan, "sm_80"))
    operands = [0x1000] * len(operand_names(plan))
    driver.captured = {5}
    for stream in (4, 5, 4):
        run(operands, stream, 0)
    early = [(OVERLAP, [1, 0, 0])]
    assert driver.attributes == [[], early, [], [], [], early]


def test_tensor_maps_are_encoded_where_the_kernel_looks(pair: Any) -> None:
    launcher, driver = pair
    base = plans()[0]
    slot = TensorMapSlot(64, "k", "float16", (16, 40), (128,), (16, 64), 128, byte_offset=32, l2_promotion=256)
    launch = Launch(base.launches[0].variant, 3, 128, 1024, bytes(192), (Pointer(0, "q"),), (slot,))
    plan = Plan("forward", base.problem, base.device, (launch,), ("q", "k"), ())
    register(launcher, driver, plan)
    launcher.prepare(encode(plan, "sm_80"))([0x1000, 0x2000], 0, 0)
    params = driver.launched[0][2]
    assert np.frombuffer(params[64:96], np.int64).tolist() == [6, 2, 0x2020, 3]
    assert int.from_bytes(params[:8], "little") == 0x1000


def test_a_prepared_plan_follows_its_operands(pair: Any) -> None:
    """Addresses of one call leave no trace in the next, nor in a call of another thread."""
    launcher, driver = pair
    base = plans()[0]
    slot = TensorMapSlot(64, "k", "float16", (16, 40), (128,), (16, 64), 128)
    pointers = (Pointer(0, "q"), Pointer(8, "k", 16), Pointer(24, "q"))
    launch = Launch(base.launches[0].variant, 3, 128, 1024, bytes(192), pointers, (slot,))
    plan = Plan("forward", base.problem, base.device, (launch,), ("q", "k"), ())
    register(launcher, driver, plan)
    run = launcher.prepare(encode(plan, "sm_80"))

    def call(number: int) -> None:
        run([0x1000 * (number % 7 + 1), 0x100000 * (number % 7 + 1)], number % 7, 0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(200)))
    assert len(driver.launched) == 200
    for _, (*_, stream), params in driver.launched:
        q, k = 0x1000 * (stream + 1), 0x100000 * (stream + 1)
        assert np.frombuffer(params[:32], np.int64).tolist() == [q, k + 16, 0, q]
        assert np.frombuffer(params[64:96], np.int64).tolist() == [6, 2, k, 2]


def test_a_zeroed_workspace_is_cleared_on_the_stream_first(pair: Any) -> None:
    launcher, driver = pair
    base = plans()[0]
    launch = Launch(base.launches[0].variant, 1, 128, 0, bytes(8), (), zeroed=True)
    plan = Plan("forward", base.problem, base.device, (launch,), ("q",), (), 6)
    register(launcher, driver, plan)
    launcher.prepare(encode(plan, "sm_80"))([0x1000, 0x2000], 5, 0)
    assert driver.cleared == [(0x2000, 2, 5)]


@needs_compiler
def test_structs_agree_with_the_headers_of_xla(tmp_path: Path) -> None:
    jaxlib = pytest.importorskip("jaxlib")
    include = Path(jaxlib.__file__).parent / "include"
    source = Path(launchers.__file__).with_name("launcher.c")
    renamed = "XLA_FFI_InternalExtension"  # from jaxlib 0.11 on; the same fields at the same places
    extension = renamed if renamed in (include / "xla/ffi/api/c_api.h").read_text() else "XLA_FFI_Extension_Base"
    pairs = {
        "FfiExtension": (extension, {"type": "type", "next": "next"}),
        "FfiVersion": ("XLA_FFI_Api_Version", {"major": "major_version", "minor": "minor_version"}),
        "FfiMetadata": ("XLA_FFI_Metadata", {"version": "api_version", "traits": "traits"}),
        "FfiMetadataExtension": ("XLA_FFI_Metadata_Extension", {"metadata": "metadata"}),
        "FfiBuffer": ("XLA_FFI_Buffer", {"dtype": "dtype", "data": "data"}),
        "FfiList": ("XLA_FFI_Args", {"size": "size", "types": "types", "items": "args"}),
        "FfiAttributes": ("XLA_FFI_Attrs", {"names": "names", "values": "attrs"}),
        "FfiArray": ("XLA_FFI_Array", {"size": "size", "data": "data"}),
        "FfiErrorCreate": ("XLA_FFI_Error_Create_Args", {"message": "message", "code": "errc"}),
        "FfiStreamGet": ("XLA_FFI_Stream_Get_Args", {"context": "ctx", "stream": "stream"}),
        "FfiApi": ("XLA_FFI_Api", {"error_create": "XLA_FFI_Error_Create", "stream_get": "XLA_FFI_Stream_Get"}),
        "FfiCallFrame": (
            "XLA_FFI_CallFrame",
            {"api": "api", "context": "ctx", "arguments": "args", "results": "rets", "attributes": "attrs"},
        ),
    }
    lines = [f'#include "{source}"', '#include "xla/ffi/api/c_api.h"']
    for ours, (theirs, fields) in pairs.items():
        lines += [
            f'_Static_assert(offsetof({ours}, {a}) == offsetof({theirs}, {b}), "{ours}.{a}");'
            for a, b in fields.items()
        ]
    program = tmp_path / "agree.c"
    program.write_text("\n".join(lines) + "\n")
    command = ["cc", "-std=c11", "-fsyntax-only", f"-I{include}", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_python_structs_agree_with_those_of_c() -> None:
    frames = pytest.importorskip("cuflash.interop.jax_frame")
    assert frames.CallFrame.arguments.offset == 40
    assert frames.Api.stream_get.offset == 80
    assert frames.Buffer.data.offset == 24
    assert ctypes.sizeof(frames.StreamGet) == 32


@needs_compiler
def test_the_library_is_built_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    launchers.build.cache_clear()
    try:
        path = launchers.build()
        stamp = path.stat().st_mtime_ns
        launchers.build.cache_clear()
        assert launchers.build() == path
        assert path.stat().st_mtime_ns == stamp
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    finally:
        launchers.build.cache_clear()


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_LAUNCHER", "rust")
    with pytest.raises(ValueError, match="CUFLASH_LAUNCHER='rust' must be auto, c or python"):
        launchers.launcher.__wrapped__()


def test_a_thread_without_a_context_gets_the_primary_one() -> None:
    driver = WritingDriver()
    launcher = PythonLauncher(driver)
    plan = plans()[0]
    register(launcher, driver, plan, device=1)
    run = launcher.prepare(encode(plan, "sm_80"))
    operands = [0x1000] * len(operand_names(plan))
    run(operands, 0, 1)
    assert driver.contexts == []
    driver.current = None
    run(operands, 0, 1)
    assert driver.contexts == [0xC1]
