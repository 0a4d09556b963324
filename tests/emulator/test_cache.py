"""The emulator's cache on disk in every bad state: computed all the same, or refused by name."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cuflash import emulator_build, shared_library
from cuflash.architectures import capability_from_environment
from cuflash.errors import ArgumentError, EmulatorError
from cuflash.shared_library import is_whole

SOURCE = "int answer = 42;"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A finished library of the cache, copied."""
    return Path(shutil.copy(emulator_build.kernel_library(SOURCE, False), tmp_path / "kernel.so"))


@pytest.fixture(autouse=True)
def _forgetful() -> Iterator[None]:
    yield
    emulator_build.kernel_library.cache_clear()
    shared_library.private_folder.cache_clear()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut by a byte": lambda code: code[:-1],
    "cut in half": lambda code: code[: len(code) // 2],
    "a header": lambda code: code[:64],
    "half a header": lambda code: code[:32],
    "empty": lambda code: b"",
    "zeros": lambda code: bytes(len(code)),
    "text": lambda code: b"no space left on device\n" * 100,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_library_is_built_again(library: Path, damage: Callable[[bytes], bytes]) -> None:
    whole = library.read_bytes()
    assert is_whole(library)
    library.write_bytes(damage(whole))
    assert not is_whole(library)

    def build(scratch: Path) -> None:
        (scratch / library.name).write_bytes(whole)

    emulator_build._once(library, build)
    assert library.read_bytes() == whole


@pytest.mark.parametrize("obstacle", ["file", "file/below", "full"])
def test_a_cache_that_cannot_be_written_only_warns(
    obstacle: str, library: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    target = tmp_path / obstacle / "kernel-new.so"

    def build(scratch: Path) -> None:
        if scratch.parent == target.parent:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        shutil.copy(library, scratch / target.name)

    for _ in range(2):
        found = emulator_build._once(target, build)
        assert is_whole(found)
        assert found.parent != target.parent
    assert [record.message.split(" cannot")[0] for record in caplog.records] == [str(target.parent)]


def test_a_compiler_without_room_counts_as_a_full_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    told = f"as: kernel.o: {os.strerror(errno.ENOSPC)}"
    answer = subprocess.CompletedProcess((), 1, "", told)
    monkeypatch.setattr(emulator_build.subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        emulator_build._run(["g++", "-o", "kernel.o"], "a kernel")


def test_names_may_hold_spaces_and_any_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sp ace ünïçödé 漢 'quote'"
    monkeypatch.setenv("CUFLASH_EMULATOR_CACHE", str(folder))
    emulator_build.kernel_library.cache_clear()
    assert emulator_build.kernel_library(SOURCE, False).parent == folder


@pytest.mark.parametrize(("command", "told"), [("true", "made no file"), ('g++ "', "not a command")])
def test_a_wrong_compiler_is_named(command: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", command)
    with pytest.raises(EmulatorError, match=told):
        emulator_build._run([*emulator_build._compiler.__wrapped__(), "-o", str(tmp_path / "a.so")], "a kernel")


@pytest.mark.parametrize(
    ("text", "capability"), [("9", (9, 0)), ("9.0", (9, 0)), ("9.0a", (9, 0)), (" 12.1 ", (12, 1)), ("", (8, 0))]
)
def test_a_capability_in_the_environment(text: str, capability: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_EMULATOR_CAPABILITY", text)
    assert capability_from_environment("CUFLASH_EMULATOR_CAPABILITY", "8.0") == capability


@pytest.mark.parametrize("text", ["hopper", "9.0.1", "-8.0", "8,0", "nine"])
def test_a_wrong_capability_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_EMULATOR_CAPABILITY", text)
    with pytest.raises(ArgumentError, match="CUFLASH_EMULATOR_CAPABILITY"):
        capability_from_environment("CUFLASH_EMULATOR_CAPABILITY", "8.0")
