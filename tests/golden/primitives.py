"""The cases whose answers a GPU has given once: every form of every data-moving and multiplying primitive."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from layouts import mma_registers, operand, slabs, wgmma_a_registers
from primitive_case import Array, Case, Map

SWIZZLES = (0, 32, 64, 128)


def _random(name: str) -> np.random.Generator:
    return np.random.default_rng(list(name.encode()))


def halves(name: str, shape: tuple[int, ...], element: str = "float16") -> Array:
    """Small integers, so that every product and sum is exact; bfloat16 as bits."""
    values = _random(name).integers(-4, 5, shape).astype(np.float32)
    return to_element(values, element)


def to_element(values: Array, element: str) -> Array:
    """float32 to the 16-bit type; bfloat16 as uint16, by cutting the low half (exact for small integers)."""
    if element == "float16":
        return values.astype(np.float16)
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_element(bits: Array) -> Array:
    """Back to float32."""
    if bits.dtype == np.float16:
        return bits.astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def matrix_loads() -> Iterator[Case]:
    for tiles in (2, 4):
        for transposed in ("false", "true"):
            name = f"ldmatrix_x{tiles}_{transposed}"
            image = _random(name).integers(0, 65536, 512).astype(np.uint16)
            lanes = (_random(name).permutation(64)[:32] * 16).astype(np.uint32)
            out = np.zeros((32, tiles), np.uint32)
            yield Case(
                name, "memory", f"load_matrix<{tiles}, {transposed}>", (image, lanes), out, (1024,), (), 32, 1, 1024
            )


def matrix_stores() -> Iterator[Case]:
    for transposed in ("false", "true"):
        name = f"stmatrix_x4_{transposed}"
        image = np.zeros(512, np.uint16)
        lanes = (_random(name).permutation(64)[:32] * 16).astype(np.uint32)
        registers = _random(name).integers(0, 2**32, (32, 4), dtype=np.uint64).astype(np.uint32)
        entry = f"store_matrix<{transposed}>"
        yield Case(name, "memory", entry, (image, lanes, registers), image.copy(), (1024,), (), 32, 1, 1024)


def products() -> Iterator[Case]:
    for element in ("float16", "bfloat16", "float"):
        name = f"mma_{element}"
        depth = 8 if element == "float" else 16
        a, b = (_random(name + x).integers(-4, 5, (16, depth)).astype(np.float32) for x in "ab")
        c = _random(name + "c").integers(-9, 10, (16, 8)).astype(np.float32)
        if element != "float":
            a, b = to_element(a, element), to_element(b, element)
        inputs = tuple(np.ascontiguousarray(x) for x in mma_registers(a, np.ascontiguousarray(b.T[:, :8]), c))
        yield Case(name, "registers", f"multiply<{element}>", inputs, np.zeros((32, 4), np.float32))


def awkward_floats() -> Array:
    """Every exponent, ties of both 16-bit roundings, subnormals, infinities and NaN."""
    exponents = np.arange(0, 256, dtype=np.uint32) << 23
    fractions = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7FFFFF])
    bits = (exponents[:, None] | fractions[None].astype(np.uint32)).ravel()
    return np.concatenate([bits, bits | 0x80000000]).astype(np.uint32).view(np.float32)


def conversions() -> Iterator[Case]:
    values = awkward_floats()
    grid = -(-values.size // 128)
    for element in ("float16", "bfloat16"):
        out = np.zeros((values.size, 4), np.uint32)
        numbers = (values.size,)
        yield Case(f"convert_{element}", "registers", f"convert<{element}>", (values,), out, numbers, (), 128, grid)


def approximations() -> Iterator[Case]:
    name = "approximate"
    random = _random(name)
    spread = np.exp2(random.uniform(-130, 130, 400)) * random.choice([-1, 1], 400)
    special = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 0.5, 2.0, -126.0, -127.0, -149.5, 127.0, 128.0, 1e-40]
    values = np.concatenate([random.uniform(-20, 20, 400), spread, special])
    values = np.clip(values, -3e38, 3e38, where=np.isfinite(values), out=values).astype(np.float32)
    out = np.zeros((values.size, 4), np.float32)
    grid = -(-values.size // 128)
    yield Case(name, "registers", "approximate", (values,), out, (values.size,), (), 128, grid, exact=False)


def exchanges() -> Iterator[Case]:
    values = _random("exchange").integers(0, 2**32, 64, dtype=np.uint64).astype(np.uint32)
    values[32:] |= 1
    yield Case("exchange", "registers", "exchange", (values,), np.zeros((64, 4), np.uint32), (5, 7), (), 64)
    yield Case("identify", "registers", "identify", (), np.zeros((3 * 64, 8), np.uint32), (), (), 64, 3, 1024)
    x = np.array([1.5, -2.0, np.nan, np.inf, -np.inf, 0.0, -0.0, 3.0] * 4, np.float32)
    yield Case("compare", "registers", "compare", (x,), np.zeros((32, 4), np.float32), exact=False)


def copies() -> Iterator[Case]:
    for size in (4, 8, 16):
        name = f"cp_async_{size}"
        data = _random(name).integers(1, 256, 64 * size).astype(np.uint8)
        valid = (np.arange(64) % (size + 1)).astype(np.int32)
        yield Case(
            name, "memory", f"copy_async<{size}>", (data, valid), np.zeros(64 * size, np.uint8), (), (), 64, 1, 1024
        )
    data = _random("groups").integers(0, 256, 3 * 64 * 16).astype(np.uint8)
    yield Case("cp_async_groups", "memory", "copy_async_groups", (data,), np.zeros_like(data), (), (), 64, 1, data.size)


def memory() -> Iterator[Case]:
    for name, size in (("float16", 2), ("float", 4), ("u32x2", 8), ("f32x2", 8), ("u32x4", 16), ("f32x4", 16)):
        data = _random(name).integers(0, 256, 64 * size).astype(np.uint8)
        out = np.zeros_like(data)
        yield Case(f"round_trip_{name}", "memory", f"round_trip<{name}>", (data,), out, (), (), 64, 1, 64 * size)
    for width in (1, 2, 4):
        x = _random("reduce").integers(-8, 9, 64).astype(np.float32)
        out = np.zeros(8, np.float32)
        yield Case(f"reduce_{width}", "memory", f"reduce<{width}>", (x,), out, (), (), 64)
    values = np.arange(96, dtype=np.uint32)
    yield Case("reverse", "memory", "reverse", (values,), np.zeros((96, 2), np.uint32), (0, 17), (), 96, 1, 384)
    values = np.arange(5 * 64, dtype=np.uint32)
    yield Case("hand_over", "memory", "hand_over", (values,), np.zeros_like(values), (5,), (), 128, 1, 512)


def lean() -> Iterator[Case]:
    """What a GPU of any age since sm_80 runs."""
    for group in (matrix_loads, products, conversions, approximations, exchanges, copies, memory):
        yield from group()


# --- sm_90 -----------------------------------------------------------------------------------------------------------


def _tensor_map(name: str, tensor: Array, sides: tuple[int, ...], span: int) -> Map:
    """Over a C-contiguous tensor; ``sides`` outermost first."""
    dtype = "bfloat16" if tensor.dtype == np.uint16 else str(tensor.dtype)
    return Map(name, dtype, tensor.shape[::-1], tensor.strides[-2::-1], sides[::-1], span)


def box_load(name: str, tensor: Array, start: tuple[int, ...], sides: tuple[int, ...], span: int) -> Case:
    """``start`` and ``sides`` outermost first."""
    out = np.zeros(int(np.prod(sides)) * tensor.itemsize, np.uint8)
    one = _tensor_map("in0", tensor, sides, span)
    shared = -(-out.size // 1024) * 1024 + 16
    entry = f"load_box<{tensor.ndim}>"
    rest = (0,) * (5 - tensor.ndim)
    return Case(name, "hopper", entry, (tensor,), out, (out.size, *start[::-1], *rest, out.size), (one,), 64, 1, shared)


def box_store(name: str, tensor: Array, data: Array, start: tuple[int, ...], span: int, reduce: bool) -> Case:
    """``data`` is what the box shall hold, before the swizzle."""
    image = slabs(data.reshape(-1, data.shape[-1]), span) if span else data.ravel().view(np.uint8)
    one = _tensor_map("out", tensor, data.shape, span)
    entry = f"store_box<{tensor.ndim}, {str(reduce).lower()}>"
    return Case(name, "hopper", entry, (image,), tensor, (image.size, *start[::-1]), (one,), 64, 1, image.size)


def tensor_loads() -> Iterator[Case]:
    flat = _random("flat").integers(0, 65536, (40, 72)).astype(np.uint16)
    starts = {
        "inside": (3, 8),
        "right": (0, 56),
        "below": (33, 0),
        "above": (-5, 0),
        "left": (2, -8),
        "outside": (64, 0),
    }
    for span in SWIZZLES:
        width = (span or 128) // 2
        for where, start in starts.items():
            yield box_load(f"tma_load_2d_{span}_{where}", flat, start, (16, width), span)
    deep = _random("deep").integers(0, 65536, (2, 3, 4, 5, 16)).astype(np.uint16)
    for rank in (3, 4, 5):
        tensor = deep.reshape(-1, *deep.shape[6 - rank :])
        for where, shift in (("inside", 0), ("low", -1), ("high", 1)):
            start = (*(shift * (1 + d % 2) for d in range(rank - 1)), 8 * shift)
            sides = (2, 2, 3, 2, 16)[5 - rank :]
            yield box_load(f"tma_load_{rank}d_{where}", tensor, start, sides, 32)


def tensor_stores() -> Iterator[Case]:
    for span in SWIZZLES:
        name = f"tma_store_2d_{span}"
        tensor = np.full((20, 72), 7, np.uint16)
        data = _random(name).integers(0, 65536, (16, (span or 128) // 2)).astype(np.uint16)
        yield box_store(name, tensor, data, (9, 48), span, False)
    deep = np.full((2, 3, 4, 5, 16), 7, np.uint16)
    for rank in (3, 4, 5):
        name = f"tma_store_{rank}d"
        tensor = deep.reshape(-1, *deep.shape[6 - rank :])
        data = _random(name).integers(0, 65536, (2, 2, 3, 2, 16)[5 - rank :]).astype(np.uint16)
        yield box_store(name, tensor, data, (1,) * (rank - 1) + (0,), 32, False)
    for rank in (2, 3, 4, 5):
        name = f"tma_reduce_{rank}d"
        tensor = np.ones((2, 3, 4, 5, 8), np.float32).reshape(-1, *(3, 4, 5, 8)[5 - rank :])
        data = _random(name).integers(-9, 10, (2, 2, 2, 2, 8)[5 - rank :]).astype(np.float32)
        yield box_store(name, tensor, data, (1,) * (rank - 1) + (4,), 32, True)
    for element in ("float16", "bfloat16"):
        name = f"tma_reduce_{element}"
        data = halves(name, (8, 32), element)
        yield box_store(name, halves(name + "out", (12, 40), element), data, (6, 16), 64, True)


def lines() -> Iterator[Case]:
    data = _random("line").integers(-9, 10, 260).astype(np.float32)
    for reduce in ("false", "true"):
        numbers = (data.nbytes,)
        yield Case(
            f"bulk_{reduce}", "hopper", f"bulk_line<{reduce}>", (data,), np.zeros_like(data), numbers, (), 64, 1, 2080
        )
    yield Case("phases", "hopper", "phases", (), np.zeros(64, np.uint32), (), (), 64, 1, 16)
    yield Case("trade_registers", "hopper", "trade_registers", (), np.zeros(12, np.uint32), (), (), 384)


def warpgroup_product(element: str, n: int, span: int, trans_a: int, trans_b: int, registers: bool = False) -> Case:
    """One tile of 64 x n with as much depth as one slab holds."""
    name = f"wgmma_{element}_n{n}_{span}_{'r' if registers else trans_a}{trans_b}"
    depth = (span or 64) // 2
    a, b = halves(name + "a", (64, depth), element), halves(name + "b", (n, depth), element)
    left, right = operand(a, span, bool(trans_a)), operand(b, span, bool(trans_b))
    begin = -(-left.image.size // 1024) * 1024
    shared = np.zeros(-(-(begin + right.image.size) // 1024) * 1024, np.uint8)
    shared[: left.image.size] = left.image
    shared[begin : begin + right.image.size] = right.image
    numbers = (shared.size, depth // 16, left.descriptor, right.descriptor + begin // 16, left.step, right.step)
    entry = f"product<{element}, {n}, {2 if registers else trans_a}, {trans_b}>"
    inputs = (shared, wgmma_a_registers(a)) if registers else (shared,)
    out = np.zeros((128, n // 2), np.float32)
    return Case(name, "wgmma", entry, inputs, out, numbers, (), 128, 1, shared.size)


def warpgroup_products() -> Iterator[Case]:
    for span in SWIZZLES:
        for trans_b in (0, 1):
            for trans_a in (0, 1):
                yield warpgroup_product("float16", 64, span, trans_a, trans_b)
            yield warpgroup_product("bfloat16", 128, span, 0, trans_b, registers=True)
    for n in (8, 24, 80, 96, 192, 256):
        yield warpgroup_product("bfloat16", n, 64 if n % 64 else 128, 0, n // 8 % 2 ^ 1)
        yield warpgroup_product("float16", n, 128, 0, 0, registers=True)


def hopper() -> Iterator[Case]:
    """What needs sm_90a."""
    for group in (matrix_stores, tensor_loads, tensor_stores, lines, warpgroup_products):
        yield from group()
