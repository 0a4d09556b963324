"""XLA's FFI call frame through ctypes, for handlers written in Python: only the leading, stable fields of each struct.

The layout is that of xla/ffi/api/c_api.h, the same in every jaxlib from 0.5 on; tests/interop compares it with the
installed header where a C compiler is there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["CallFrame", "Failure", "Handler", "buffers", "handler", "plan_words", "stream_of"]

FAILED_PRECONDITION, INTERNAL = 9, 13  # absl status codes
_METADATA = 1  # extension type
_ARRAY = 1  # attribute type
_COMMAND_BUFFER_COMPATIBLE = 1
_DTYPES = {1: np.bool_, 4: np.int32, 6: np.uint8, 10: np.float16, 11: np.float32, 16: ml_dtypes.bfloat16}
Pointer = ctypes.c_void_p


class Failure(Exception):
    """An error with the status code that XLA is to report."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(text)


class Extension(ctypes.Structure):
    """XLA_FFI_Extension_Base."""


Extension._fields_ = [("struct_size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.POINTER(Extension))]


def _struct(name: str, *fields: tuple[str, Any]) -> Any:
    """A struct that starts as all of XLA's do."""
    head = [("struct_size", ctypes.c_size_t), ("extension", ctypes.POINTER(Extension))]
    return type(name, (ctypes.Structure,), {"_fields_": [*head, *fields]})


Version = _struct("Version", ("major", ctypes.c_int), ("minor", ctypes.c_int))
Buffer = _struct(
    "Buffer",
    ("dtype", ctypes.c_int),
    ("data", Pointer),
    ("rank", ctypes.c_int64),
    ("dims", ctypes.POINTER(ctypes.c_int64)),
)
List = _struct("List", ("size", ctypes.c_int64), ("types", Pointer), ("items", ctypes.POINTER(ctypes.POINTER(Buffer))))
ErrorCreate = _struct("ErrorCreate", ("message", ctypes.c_char_p), ("code", ctypes.c_int))
StreamGet = _struct("StreamGet", ("context", Pointer), ("stream", Pointer))


class Metadata(ctypes.Structure):
    """XLA_FFI_Metadata, leading fields."""

    _fields_ = [("struct_size", ctypes.c_size_t), ("version", Version), ("traits", ctypes.c_uint32)]


class MetadataExtension(ctypes.Structure):
    """XLA_FFI_Metadata_Extension."""

    _fields_ = [("base", Extension), ("metadata", ctypes.POINTER(Metadata))]


class Array(ctypes.Structure):
    """XLA_FFI_Array."""

    _fields_ = [("dtype", ctypes.c_int), ("size", ctypes.c_size_t), ("data", Pointer)]


Attributes = _struct(
    "Attributes",
    ("size", ctypes.c_int64),
    ("types", ctypes.POINTER(ctypes.c_int)),
    ("names", Pointer),
    ("values", ctypes.POINTER(Pointer)),
)
Api = _struct(
    "Api",
    ("version", Version),
    ("internal", Pointer),
    ("error_create", ctypes.CFUNCTYPE(Pointer, ctypes.POINTER(ErrorCreate))),
    ("error_message", Pointer),
    ("error_destroy", Pointer),
    ("handler_register", Pointer),
    ("stream_get", ctypes.CFUNCTYPE(Pointer, ctypes.POINTER(StreamGet))),
)
CallFrame = _struct(
    "CallFrame",
    ("api", ctypes.POINTER(Api)),
    ("context", Pointer),
    ("stage", ctypes.c_int),
    ("arguments", List),
    ("results", List),
    ("attributes", Attributes),
)
Handler = ctypes.CFUNCTYPE(Pointer, ctypes.POINTER(CallFrame))


def handler(run: Callable[[Any], None], *, records: bool) -> Any:
    """``run(frame)`` as a C function. Exceptions become XLA errors; the caller must keep the result alive for ever.

    ``records`` says that every call queues the same device work, so that XLA may record it into a CUDA graph.
    """

    def body(pointer: Any) -> int | None:
        frame = pointer.contents
        try:
            if frame.extension and frame.extension.contents.type == _METADATA:
                metadata = ctypes.cast(frame.extension, ctypes.POINTER(MetadataExtension)).contents.metadata.contents
                metadata.version.major, metadata.version.minor = 0, 1
                metadata.traits = _COMMAND_BUFFER_COMPATIBLE if records else 0
                return None
            run(frame)
        except Failure as failure:
            return _error(frame, failure.code, str(failure))
        except BaseException as error:  # nothing may unwind through C
            return _error(frame, INTERNAL, f"cuflash: {type(error).__name__}: {error}")
        return None

    return Handler(body)


def _error(frame: Any, code: int, text: str) -> int | None:
    message = text.encode()
    request = ErrorCreate(ctypes.sizeof(ErrorCreate), None, message, code)
    pointer: int | None = frame.api.contents.error_create(ctypes.byref(request))
    return pointer


def buffers(frame: Any) -> list[Any]:
    """Arguments, then results."""
    found = []
    for part in (frame.arguments, frame.results):
        found += [part.items[i].contents for i in range(part.size)]
    return found


def plan_words(frame: Any) -> bytes:
    """The bytes of the call's one attribute, the plan."""
    if frame.attributes.size != 1 or frame.attributes.types[0] != _ARRAY:
        raise Failure(INTERNAL, "cuflash: the call carries no plan")
    array = ctypes.cast(frame.attributes.values[0], ctypes.POINTER(Array)).contents
    return ctypes.string_at(array.data, array.size * 8)


def stream_of(frame: Any) -> int:
    """The CUDA stream that the program runs on."""
    request = StreamGet(ctypes.sizeof(StreamGet), None, frame.context, None)
    if frame.api.contents.stream_get(ctypes.byref(request)):
        raise Failure(INTERNAL, "cuflash: XLA gives no stream")
    return request.stream or 0


def as_numpy(buffer: Any) -> Any:
    """A host buffer as a NumPy array over the same memory."""
    dtype = np.dtype(_DTYPES[buffer.dtype])
    shape = tuple(buffer.dims[i] for i in range(buffer.rank))
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return np.empty(shape, dtype)
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(buffer.data)
    return np.frombuffer(raw, dtype).reshape(shape)
