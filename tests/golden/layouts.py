"""Where elements lie: swizzled slabs, wgmma operands, register fragments; plain NumPy, apart from the emulator."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
_CODES = {0: 0, 128: 1, 64: 2, 32: 3}  # of a descriptor


def swizzle(offset: Array, span: int) -> Array:
    """Byte offsets after the exchange of 16-byte chunks within spans of 32, 64 or 128 bytes; 0 leaves them alone."""
    bits = {0: 0, 32: 1, 64: 3, 128: 7}[span]
    return offset ^ (((offset >> 7) & bits) << 4)


def slabs(matrix: Array, span: int, base: int = 0) -> Array:
    """Bytes of a [rows, columns] matrix cut into slabs of ``span`` bytes a row, slab after slab, each swizzled.

    ``base`` is where the first slab begins, modulo 1024: the pattern is one of addresses.
    """
    rows = matrix.shape[0]
    width = span // matrix.itemsize
    flat = np.concatenate([matrix[:, c : c + width].ravel() for c in range(0, matrix.shape[1], width)])
    raw = flat.view(np.uint8)
    image = np.zeros_like(raw)
    offsets = np.arange(raw.size)
    image[swizzle(offsets + base, span) - base] = raw
    assert raw.size == rows * matrix.shape[1] * matrix.itemsize
    return image


class Operand(NamedTuple):
    """An operand of wgmma: its bytes in shared memory, its descriptor at address 0, what a step of k adds to that."""

    image: Array
    descriptor: int
    step: int


def operand(matrix: Array, span: int, transposed: bool) -> Operand:
    """``matrix`` is [rows, depth]; transposed means that its rows lie contiguous, [depth, rows], in whole slabs.

    Otherwise its depth is one slab at most.
    """
    depth = matrix.shape[1]
    if span == 0:
        return _cores(matrix, transposed)
    if transposed:
        rest = -matrix.shape[0] % (span // 2)
        image = slabs(np.ascontiguousarray(np.pad(matrix, ((0, rest), (0, 0))).T), span)
        leading, stride, step = depth * span, 8 * span, 16 * span
    else:
        assert depth * 2 <= span, "steps within one slab"
        image = slabs(matrix, span)
        leading, stride, step = 16, 8 * span, 32
    return Operand(image, _descriptor(leading, stride, span), step // 16)


def _cores(matrix: Array, transposed: bool) -> Operand:
    """Unswizzled: 8x8 matrices of 128 bytes, [depth / 8, rows / 8, 8, 8]; the last two are [row, k], or [k, row]."""
    rows, depth = matrix.shape
    cores = matrix.reshape(rows // 8, 8, depth // 8, 8).transpose(2, 0, 1, 3)
    if transposed:
        cores = cores.transpose(0, 1, 3, 2)
    along_depth, along_rows = rows // 8 * 128, 128
    image = np.ascontiguousarray(cores).ravel().view(np.uint8)
    return Operand(image, _descriptor(along_depth, along_rows, 0), 2 * along_depth // 16)


def _descriptor(leading: int, stride: int, span: int) -> int:
    value = leading // 16 << 16 | stride // 16 << 32 | _CODES[span] << 62
    return value - (1 << 64) if value >> 63 else value


def wgmma_rows(n: int) -> tuple[Array, Array]:
    """Row and column of accumulator i of thread t, each [128, n / 2]."""
    t, i = np.meshgrid(np.arange(128), np.arange(n // 2), indexing="ij")
    lane = t % 32
    return t // 32 * 16 + lane // 4 + i // 2 % 2 * 8, i // 4 * 8 + lane % 4 * 2 + i % 2


def wgmma_a_registers(a: Array) -> Array:
    """A [64, depth] of 16-bit elements as registers: [depth / 16, 128, 4] of uint32."""
    bits = a.view(np.uint16).astype(np.uint32)
    t, r = np.meshgrid(np.arange(128), np.arange(4), indexing="ij")
    row, k = t // 32 * 16 + t % 32 // 4 + r % 2 * 8, t % 4 * 2 + r // 2 * 8
    steps = [bits[row, k + s] | bits[row, k + s + 1] << 16 for s in range(0, a.shape[1], 16)]
    return np.stack(steps).astype(np.uint32)


def mma_registers(a: Array, b: Array, c: Array) -> tuple[Array, Array, Array]:
    """Fragments of mma.sync: a [16, k], b [k, 8], c [16, 8] by lane; k is 16 for two-byte elements and 8 for floats."""
    lane = np.arange(32)[:, None]
    g, t = lane // 4, lane % 4
    r4, r2 = np.arange(4)[None], np.arange(2)[None]
    c_registers = c[g + r4 // 2 * 8, t * 2 + r4 % 2]
    if a.itemsize == 4:
        a_bits, b_bits = a.view(np.uint32), b.view(np.uint32)
        return a_bits[g + r4 % 2 * 8, t + r4 // 2 * 4], b_bits[t + r2 * 4, g], c_registers
    a_bits, b_bits = a.view(np.uint16).astype(np.uint32), b.view(np.uint16).astype(np.uint32)
    row, k = g + r4 % 2 * 8, t * 2 + r4 // 2 * 8
    k_b = t * 2 + r2 * 8
    return a_bits[row, k] | a_bits[row, k + 1] << 16, b_bits[k_b, g] | b_bits[k_b + 1, g] << 16, c_registers


def box(tensor: Array, start: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """The box of a tensor at ``start``, outermost dimension first; zero outside the tensor."""
    result = np.zeros(shape, tensor.dtype)
    inside_box, inside_tensor = [], []
    for begin, side, extent in zip(start, shape, tensor.shape, strict=True):
        low, high = min(max(begin, 0), extent), min(max(begin + side, 0), extent)
        inside_box.append(slice(low - begin, max(high - begin, low - begin)))
        inside_tensor.append(slice(low, max(high, low)))
    if all(s.stop > s.start for s in inside_tensor):
        result[tuple(inside_box)] = tensor[tuple(inside_tensor)]
    return result
