"""Records what a GPU answers to the primitive cases: python tests/golden/record.py golden.npz [--full everything.npz]

Needs CuPy, NumPy and an sm_90 GPU. Each case runs in a worker process, so one that fails or hangs costs itself only.
Long exact answers are kept as SHA-256 of their bytes; --full keeps them whole, to look into a disagreement.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

import primitives
from primitive_case import Array, Case, Map

CUDA_SRC = Path(__file__).resolve().parent.parent.parent / "cuda_src"
PATIENCE = 30.0  # seconds for one case, its compilation included
START = 60.0  # and for a worker to begin
HASHED_FROM = 1024  # bytes

_DTYPES = {"float16": 6, "float32": 7, "bfloat16": 9, "uint16": 1}  # of the driver's CUtensorMapDataType
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


def all_cases() -> list[Case]:
    """In a fixed order."""
    return [*primitives.lean(), *primitives.hopper()]


def encode(one: Map, address: int) -> bytes:
    """A tensor map from the driver."""
    rank = len(one.dims)
    storage = (ctypes.c_uint64 * 24)()
    aligned = (ctypes.addressof(storage) + 63) & ~63
    status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        ctypes.c_int(_DTYPES[one.dtype]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address + one.byte_offset),
        (ctypes.c_uint64 * rank)(*one.dims),
        (ctypes.c_uint64 * max(rank - 1, 1))(*one.strides_bytes),
        (ctypes.c_uint32 * rank)(*one.box),
        (ctypes.c_uint32 * rank)(*([1] * rank)),
        ctypes.c_int(0),
        ctypes.c_int(_SWIZZLES[one.swizzle]),
        ctypes.c_int(0),
        ctypes.c_int(0),
    )
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled answered {status}")
    return ctypes.string_at(aligned, 128)


def run_on_gpu(case: Case) -> Array:
    """What the kernel leaves in ``out``."""
    import cupy

    options = ("--std=c++20", "-arch=sm_90a", f"-I{CUDA_SRC}")
    kernel = cupy.RawModule(code=case.source(), options=options).get_function(case.symbol)
    held = {name: cupy.asarray(np.ascontiguousarray(array)) for name, array in case.operands().items()}
    raw = case.params(lambda name: held[name].data.ptr, lambda one: encode(one, held[one.operand].data.ptr))
    if case.shared_bytes > 48 * 1024:
        kernel.max_dynamic_shared_size_bytes = case.shared_bytes
    params = np.frombuffer(raw, np.dtype((np.void, len(raw))))[0]
    kernel((case.grid,), (case.threads,), (params,), shared_mem=case.shared_bytes)
    cupy.cuda.Device().synchronize()
    return cupy.asnumpy(held["out"])


def work(pipe: Connection, first: int) -> None:
    """A worker: answers every case from ``first`` on."""
    import cupy

    cupy.cuda.Device(0).use()
    pipe.send(None)
    for case in all_cases()[first:]:
        try:
            pipe.send(run_on_gpu(case))
        except Exception as error:  # whatever it is, the parent prints it and goes on with a fresh context
            pipe.send(f"{type(error).__name__}: {error}")
            return


class Worker:
    """A process that answers cases in order from one on."""

    def __init__(self, first: int) -> None:
        context: Any = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, first), daemon=True)
        self.process.start()
        theirs.close()
        self.receive(START)

    def receive(self, seconds: float) -> Any:
        """The next answer; a text says what went wrong."""
        try:
            return self.pipe.recv() if self.pipe.poll(seconds) else f"no answer in {seconds:g} seconds"
        except EOFError:
            return "the worker died"

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def record() -> tuple[dict[str, Array], list[str]]:
    """Answers by case, and the names of those that failed."""
    cases = all_cases()
    answers: dict[str, Array] = {}
    failed: list[str] = []
    worker = Worker(0)
    for index, case in enumerate(cases):
        began = time.perf_counter()
        answer = worker.receive(PATIENCE)
        if isinstance(answer, np.ndarray):
            answers[case.name] = answer
            print(f"[{index + 1}/{len(cases)}] {case.name} {time.perf_counter() - began:.2f} s", flush=True)
            continue
        failed.append(case.name)
        print(f"[{index + 1}/{len(cases)}] {case.name} FAILED: {str(answer)[:2000]}", flush=True)
        worker.stop()
        if index + 1 < len(cases):
            worker = Worker(index + 1)
    worker.stop()
    return answers, failed


def digest(answer: Array) -> Array:
    """SHA-256 of an answer's bytes."""
    return np.frombuffer(hashlib.sha256(np.ascontiguousarray(answer).tobytes()).digest(), np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--full", type=Path)
    arguments = parser.parse_args()
    answers, failed = record()
    exact = {case.name: case.exact for case in all_cases()}
    kept = {
        name: digest(answer) if exact[name] and answer.nbytes >= HASHED_FROM else answer
        for name, answer in answers.items()
    }
    np.savez_compressed(arguments.path, **kept)
    if arguments.full:
        np.savez_compressed(arguments.full, **answers)
    print(f"{len(answers)} answers, {arguments.path.stat().st_size} bytes; failed: {', '.join(failed) or 'none'}")


if __name__ == "__main__":
    main()
