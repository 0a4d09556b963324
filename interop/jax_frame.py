"""XLA's FFI call frame through ctypes, for handlers written in Python: only the leading, stable fields of each struct.

The layout is that of xla/ffi/api/c_api.h, the same in every jaxlib from 0.5 on; tests/interop compares it with the
installed header where a C compiler is there.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["CallFrame", "Failure", "Handler", "buffers", "call_of", "handler", "plan_words", "stream_of"]

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
Handler = ctypes.CFUNCTYPE(Pointer, Pointer)

# The same fields as machine words, read from one view of all memory: an object per struct costs ten times as much.
_memory = memoryview((ctypes.c_char * (2**63 - 1)).from_address(0)).cast("B")
_STREAM_GETTER = ctypes.PYFUNCTYPE(Pointer, Pointer)  # keeps Python's lock: the answer is there at once
_WORD = 8


def _word(*fields: Any) -> int:
    return sum(field.offset for field in fields) // _WORD


_read_frame = struct.Struct(f"{ctypes.sizeof(CallFrame) // _WORD}Q").unpack_from
_read_array = struct.Struct(f"{ctypes.sizeof(Array) // _WORD}Q").unpack_from
_read_word, _read_int = struct.Struct("Q").unpack_from, struct.Struct("i").unpack_from
_EXTENSION, _API, _CONTEXT = (_word(getattr(CallFrame, name)) for name in ("extension", "api", "context"))
_SIZES = [_word(getattr(CallFrame, name), List.size) for name in ("arguments", "results")]
_ITEMS = _word(List.items) - _word(List.size)
_NUM_ATTRIBUTES, _TYPES, _VALUES = (
    _word(CallFrame.attributes, getattr(Attributes, name)) for name in ("size", "types", "values")
)
_DATA = Buffer.data.offset
_request = struct.Struct("4Q")  # StreamGet


def handler(run: Callable[[int], None], *, records: bool) -> Any:
    """``run(address of the call frame)`` as a C function; exceptions become XLA errors. Keep the result alive for ever.

    ``records`` says that every call queues the same device work, so that XLA may record it into a CUDA graph.
    """

    def body(address: int) -> int | None:
        try:
            extended = _read_word(_memory, address + _WORD * _EXTENSION)[0]
            if not (extended and _answers_metadata(CallFrame.from_address(address), records)):
                run(address)
        except Failure as failure:
            return _error(address, failure.code, str(failure))
        except BaseException as error:  # nothing may unwind through C
            return _error(address, INTERNAL, f"cuflash: {type(error).__name__}: {error}")
        return None

    return Handler(body)


def _answers_metadata(frame: Any, records: bool) -> bool:
    if frame.extension.contents.type != _METADATA:
        return False
    metadata = ctypes.cast(frame.extension, ctypes.POINTER(MetadataExtension)).contents.metadata.contents
    metadata.version.major, metadata.version.minor = 0, 1
    metadata.traits = _COMMAND_BUFFER_COMPATIBLE if records else 0
    return True


def _error(address: int, code: int, text: str) -> int | None:
    message = text.encode()
    request = ErrorCreate(ctypes.sizeof(ErrorCreate), None, message, code)
    pointer: int | None = CallFrame.from_address(address).api.contents.error_create(ctypes.byref(request))
    return pointer


def buffers(address: int) -> list[Any]:
    """Arguments, then results, as structs."""
    frame = CallFrame.from_address(address)
    return [part.items[i].contents for part in (frame.arguments, frame.results) for i in range(part.size)]


def plan_words(address: int) -> bytes:
    """The bytes of the call's one attribute, the plan."""
    return _plan_words(_read_frame(_memory, address))


def call_of(address: int) -> tuple[bytes, list[int], int]:
    """What a GPU call needs: the plan's bytes, the addresses of arguments and results, the program's stream."""
    frame = _read_frame(_memory, address)
    operands: list[int] = []
    for size in _SIZES:
        items = frame[size + _ITEMS]
        places = range(items, items + _WORD * frame[size], _WORD)
        operands += [_read_word(_memory, _read_word(_memory, place)[0] + _DATA)[0] for place in places]
    return _plan_words(frame), operands, stream_of(frame)


def _plan_words(frame: Sequence[int]) -> bytes:
    if frame[_NUM_ATTRIBUTES] != 1 or _read_int(_memory, frame[_TYPES])[0] != _ARRAY:
        raise Failure(INTERNAL, "cuflash: the call carries no plan")
    _, size, data = _read_array(_memory, _read_word(_memory, frame[_VALUES])[0])
    return _memory[data : data + size * _WORD].tobytes()


def stream_of(frame: Sequence[int]) -> int:
    """The CUDA stream that the program runs on."""
    request = ctypes.create_string_buffer(_request.size)
    _request.pack_into(request, 0, _request.size, 0, frame[_CONTEXT], 0)
    if _stream_getter(_read_word(_memory, frame[_API] + Api.stream_get.offset)[0])(request):
        raise Failure(INTERNAL, "cuflash: XLA gives no stream")
    stream: int = _request.unpack_from(request)[3]
    return stream


@cache
def _stream_getter(pointer: int) -> Any:
    return _STREAM_GETTER(pointer)


def as_numpy(buffer: Any) -> Any:
    """A host buffer as a NumPy array over the same memory."""
    dtype = np.dtype(_DTYPES[buffer.dtype])
    shape = tuple(buffer.dims[i] for i in range(buffer.rank))
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return np.empty(shape, dtype)
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(buffer.data)
    return np.frombuffer(raw, dtype).reshape(shape)
