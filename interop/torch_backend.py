"""torch's memory, devices and streams, as the eager path wants them; and CPU tensors as NumPy views."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np
import torch

from cuflash.architectures import Device
from cuflash.dtypes import dtype_of
from cuflash.eager import Eager
from cuflash.errors import DeviceError, UnsupportedError
from cuflash.interop.launcher import Run, launcher
from cuflash.overlap import shares_memory
from cuflash.plan import Plan
from cuflash.problem import ArraySpec

__all__ = [
    "TorchBackend",
    "as_numpy",
    "as_torch",
    "check_devices",
    "cuda_eager",
    "host_eager",
    "is_plain",
    "needs_no_operator",
    "transforms_are_active",
]

_PREPARED_LIMIT = 8192  # plans; a table that reaches it starts afresh
Prepared = tuple[Plan, Run, tuple[str, ...], Any]
_TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class TorchBackend:
    """CUDA tensors; results come from torch's caching allocator and launches go to torch's current stream."""

    def __init__(self) -> None:
        self._prepared: dict[tuple[int, int], Prepared] = {}
        self._zeros: dict[tuple[int, int, int], Any] = {}

    def key(self, array: Any) -> Any:
        return (array.shape, array.stride(), array.dtype, array.data_ptr() & 15, array.device.index)

    def spec(self, argument: str, array: Any) -> ArraySpec:
        dtype = dtype_of(argument, array.dtype)
        address = array.data_ptr()
        alignment = min(address & -address, 16) if address else 16
        return ArraySpec(tuple(array.shape), tuple(array.stride()), dtype.name, alignment)

    def device(self, arrays: dict[str, Any]) -> Device:
        check_devices(arrays)
        from cuflash.launch import device_of

        return device_of(arrays["q"].device.index)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        return like.new_empty(shape, dtype=_TORCH[dtype])

    def workspace(self, plan: Plan, like: Any) -> Any:
        words = -(-plan.workspace_bytes // 4)
        if not plan.zeroed:
            return self.empty((words,), "float32", like)
        stream = torch.cuda.current_stream(like.device)
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(words, dtype=torch.float32, device=like.device)  # a graph keeps memory of its own
        # Runs on one stream follow each other and leave zeros behind, so they can share.
        key = (stream.cuda_stream, like.device.index, words)
        if key not in self._zeros:
            self._zeros[key] = torch.zeros(words, dtype=torch.float32, device=like.device)
        return self._zeros[key]

    def contiguous(self, array: Any) -> Any:
        return array.contiguous()

    def overlaps(self, one: Any, other: Any) -> bool:
        return shares_memory(_extent(one), _extent(other))

    def writable(self, array: Any) -> bool:
        return True

    def run(self, plan: Plan, operands: dict[str, Any]) -> None:
        index = operands["q"].device.index
        entry = self._prepared.get((id(plan), index))
        if entry is None or entry[0] is not plan:
            entry = self._prepare(plan, index)
        _, run, names, _ = entry
        addresses = [operands[name].data_ptr() for name in names]
        stream = _raw_stream(index)
        if index == torch.cuda.current_device():
            run(addresses, stream, index)
            return
        with torch.cuda.device(index):
            run(addresses, stream, index)

    def _prepare(self, plan: Plan, index: int) -> Prepared:
        from cuflash.interop.cupy import prepared

        if len(self._prepared) >= _PREPARED_LIMIT:
            self._prepared.clear()
        entry = self._prepared[id(plan), index] = prepared(launcher(), plan, index)
        return entry


# What torch's own generated code asks; the public way makes an object for each answer.
_raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
cuda_eager = Eager(TorchBackend())


def host_eager() -> Eager:
    """The emulator, for CPU tensors.

    Raises:
        DeviceError: CUFLASH_TORCH_CPU does not ask for it.
    """
    if os.environ.get("CUFLASH_TORCH_CPU") != "emulator":
        remedy = "move it with .cuda(), or set CUFLASH_TORCH_CPU=emulator to run the kernels on the emulator"
        raise DeviceError("q.device", "cpu", "must be a CUDA device", remedy)
    from cuflash.host import eager

    return eager


def check_devices(arrays: dict[str, Any]) -> None:
    """Refuses tensors on two devices, or on one that has no kernels.

    Raises:
        DeviceError: names the tensor, both devices and the remedy.
        UnsupportedError: a sparse, nested or quantized tensor.
    """
    home = arrays["q"].device
    for name, array in arrays.items():
        if array.layout != torch.strided or array.is_nested or array.is_quantized:
            kind = "a nested" if array.is_nested else "a quantized" if array.is_quantized else f"a {array.layout}"
            raise UnsupportedError(name, f"{kind} tensor", "has no kernel yet", "pass a dense tensor")
        if array.device != home:
            remedy = f"move it with .to({str(home)!r})"
            raise DeviceError(f"{name}.device", str(array.device), f"must be q's device {home}", remedy)
    if home.type not in ("cuda", "cpu", "meta"):
        raise DeviceError("q.device", str(home), "must be a CUDA device", "move it with .cuda()")


def transforms_are_active() -> bool:
    """Whether a transform of torch.func surrounds the call."""
    return bool(torch._C._are_functorch_transforms_active())


def is_plain(tensors: Iterable[Any]) -> bool:
    """Whether nobody watches: tensors of torch's own type that hold data, under no transform, mode or compilation."""
    if torch.compiler.is_compiling() or transforms_are_active() or torch._C._len_torch_dispatch_stack():
        return False
    return all(type(x) is torch.Tensor and (x.is_cuda or x.is_cpu) and not x.is_neg() for x in tensors)


def needs_no_operator(tensors: Iterable[Any]) -> bool:
    """Whether a call may go straight to the kernels: plain CUDA tensors and nobody who watches or differentiates.

    The operator's way through torch's dispatcher takes longer than everything else on the host together.
    """
    if torch.compiler.is_compiling():
        return False
    grad = torch.is_grad_enabled()
    for x in tensors:
        if type(x) is not torch.Tensor or not x.is_cuda or (grad and x.requires_grad) or x.is_neg():
            return False
    watched = transforms_are_active() or torch._C._len_torch_dispatch_stack()
    return not watched and not torch.is_autocast_enabled("cuda")


def as_numpy(tensor: Any, argument: str = "tensor") -> Any:
    """A CPU tensor as a NumPy view; bfloat16, which torch does not hand over, by way of 16-bit integers.

    Raises:
        ArgumentTypeError: a dtype without a kernel, of which torch may know more than NumPy.
    """
    dtype_of(argument, tensor.dtype)
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def as_torch(array: np.ndarray[Any, Any]) -> Any:
    """The inverse of ``as_numpy``, without a copy."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _extent(tensor: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    size = tensor.element_size()
    return tensor.data_ptr(), tuple(tensor.shape), tuple(stride * size for stride in tensor.stride()), size
