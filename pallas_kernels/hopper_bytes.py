"""Eight-bit operands of Hopper's matrix unit that no copy provides: bytes are transposed in registers.

The matrix unit multiplies eight-bit numbers only if both operands are contiguous along the axis of the contraction. In
the product of weights and values, that axis is the slots, and stored values are contiguous along their dimensions. So
every thread reads four neighboring bytes of four slots, transposes these 4 x 4 bytes by eight permutations, and writes
four words, each of which holds one dimension of four slots. The weights of these slots are four bytes that one thread
computed. The slots of a block are therefore in another order in both operands (`reorder_slots`), which changes no sum.

Shared memory is addressed here as the matrix unit expects it: tiles of 8 rows, whose 16-byte chunks are exchanged such
that neither reads nor writes of a warp meet in a bank (the swizzle of `hopper.blocked`). Pallas has no such operation,
so that the functions consist of Mosaic GPU's operations; in an interpreter, they compute the same bytes in JAX.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

SLOTS = 128  # of a block: four slots for each of 32 groups of four threads
BYTE = 127  # the largest byte
LOW_PART = 254  # a number x in [-127, 127] is stored as a + b / 254 with bytes a and b
_ROUND = 1.5 * 2**23  # a float32 plus this number has its nearest integer in the lowest bits


def is_supported(width: int) -> bool:
    """Returns whether stored vectors of `width` bytes can be transposed."""
    return width in (64, 128, 256)


def reorder_slots(x: Array, axis: int) -> Array:
    """Returns `x` with an axis of `SLOTS` slots in the order of operands.

    Thread group 8 w + r of warp w holds slots 64 b + 16 w + 8 a + r at 32 w + 4 r + 2 b + a: the slots whose logits the
    matrix unit leaves in the registers of one thread.
    """
    shape = x.shape
    x = x.reshape(*shape[:axis], 2, 4, 2, 8, *shape[axis + 1 :])
    order = [*range(axis), axis + 1, axis + 3, axis, axis + 2, *range(axis + 4, x.ndim)]
    return x.transpose(order).reshape(shape)


def split_bytes(x: Float[Array, "*A"]) -> tuple[Array, Array]:
    """Splits numbers in [-127, 127] into bytes a and b with x = a + b / `LOW_PART`, rounded to 1 / 508."""
    high = jnp.round(x)
    return high.astype(jnp.int8), jnp.round((x - high) * LOW_PART).astype(jnp.int8)


def quantize_queries(parts: Any, scales: Any, queries: Any, factor: float, is_packed: bool, interpret: Any) -> None:
    """Splits queries into bytes relative to the largest number of each.

    Args:
        parts: Shared memory [2, N, D], int8, from `hopper.blocked`, for high and low bytes.
        scales: Shared memory [2, N], float32: the number per unit of a high byte, times `factor`; and the sum that is
            added to products of each query with packed keys, times `factor` (0 unless `is_packed`).
        queries: Shared memory [N, D] with the queries, bfloat16. Rows without a query may hold anything.
        is_packed: Whether keys are packed, and `parts` is swizzled for half of the dimensions.
        interpret: Whether the kernel is interpreted.
    """
    count, dim = queries.shape
    # Low codes stand for 2 c - 15 and are multiplied as c; high ones for 2 (c - 8) + 1.
    sums = (-15.0, 1.0) if is_packed else (0.0, 0.0)
    if interpret:
        x = queries[...].astype(jnp.float32)
        scale = jnp.max(jnp.abs(x), axis=1) / BYTE
        high, low = split_bytes(x / jnp.where(scale == 0, 1.0, scale)[:, None])
        parts[0], parts[1] = high, low
        rounded = high.astype(jnp.float32) + low.astype(jnp.float32) / LOW_PART
        added = jnp.sum(rounded * jnp.where(jnp.arange(dim) < dim // 2, *sums), axis=1)
        scales[0], scales[1] = scale * factor, scale * factor * added
        return
    tile = min(dim // 2 if is_packed else dim, 128)
    each = dim // 16  # elements of a thread: 16 threads share a query

    def write(build: "_Builder", out: Any, out_scales: Any, source: Any) -> None:
        lane = build.mask(build.thread, 15)
        first = build.multiply(lane, each)
        is_low = build.less(lane, 8)
        for row in range(0, count, 8):
            query = build.add(build.right_shift(build.thread, 4), row)
            at = build.add(build.address(source), build.multiply(query, 2 * dim), build.multiply(first, 2))
            x = [half for i in range(each // 2) for half in build.load_bfloat16(at, 4 * i)]
            peak = build.reduce_lanes(build.maximum, functools.reduce(build.maximum, map(build.absolute, x)))
            inverse = build.inverse(peak, float(BYTE))
            pairs = [build.split_float(build.scale(one, inverse)) for one in x]
            numbers = [build.join_parts(*pair) for pair in pairs]
            total = build.scale(functools.reduce(build.sum, numbers), build.choose(is_low, *sums))
            total = build.reduce_lanes(build.sum, total)
            scale = build.scale(peak, build.constant(factor / BYTE))
            at = build.add(build.address(out_scales), build.multiply(query, 4))
            build.store(at, 0, build.bits(scale))
            build.store(at, 4 * count, build.bits(build.scale(total, scale)))
            # Rows of eight queries are a tile for every `tile` columns.
            columns = build.mask(first, tile - 1)
            tile_start = build.multiply(build.right_shift(first, tile.bit_length() - 1), 8 * tile)
            chunk = build.exclusive_or(build.right_shift(columns, 4), build.exchange(build.mask(query, 7), tile))
            at = build.add(
                build.address(out), row * dim, tile_start, build.multiply(build.mask(query, 7), tile),
                build.left_shift(chunk, 4), build.mask(columns, 15),
            )  # fmt: skip
            for part in (0, 1):
                for word in range(each // 4):
                    words = [pair[part] for pair in pairs[4 * word : 4 * word + 4]]
                    build.store(at, part * count * dim + 4 * word, build.lowest_bytes(words))

    types = _swizzled(tile), plgpu.RefType(), plgpu.RefType()
    _inline(write, types)(parts, scales, queries)


def unpack_nibbles(x: Array) -> tuple[Array, Array]:
    """Splits packed codes c of four bits: low ones are c, high ones are 16 (c - 8), which takes no shift."""
    return x & jnp.int8(0x0F), (x ^ jnp.int8(-128)) & jnp.int8(-16)


def store_weights(ref: Any, weights: Float[Array, "128 N"], interpret: Any) -> None:
    """Writes weights as the operand of a product with `transpose_block`: high bytes of all queries, then low bytes.

    Args:
        ref: Shared memory [2 N, 128], int8, from `hopper.blocked`.
        weights: The weights in [-127, 127], in registers of layout `WGMMA`.
        interpret: Whether the kernel is interpreted.
    """
    queries = weights.shape[1]
    if interpret:
        for part, x in enumerate(split_bytes(weights)):
            ref[pl.ds(part * queries, queries)] = reorder_slots(x, 0).T
        return

    def write(build: "_Builder", weights: Any, out: Any) -> None:
        registers = weights.registers.reshape(2, queries // 8, 2)  # slots + 64, queries + 8, slots + 8
        # The thread holds queries 2 c and 2 c + 1 of every eight.
        addresses = [build.slot_address(out, build.add(build.multiply(build.column, 2), j)) for j in (0, 1)]
        for tile in range(queries // 8):
            for j, address in enumerate(addresses):
                parts = [build.split_float(build.element(registers[b, tile, a], j)) for b in (0, 1) for a in (0, 1)]
                for part, words in enumerate(zip(*parts, strict=True)):
                    word = build.lowest_bytes(words)
                    build.store(address, (part * queries + tile * 8) * SLOTS, word)

    _inline(write, (plgpu.Layout.WGMMA, _swizzled(SLOTS)))(weights, ref)


def transpose_block(ref: Any, block: Any, is_packed: bool, interpret: Any) -> None:
    """Writes the transposed bytes of a block of values.

    Args:
        ref: Shared memory [D, 128], int8, from `hopper.blocked`.
        block: The block in shared memory, [128, W], int8, from `hopper.blocked`.
        is_packed: Whether bytes hold two codes: then D = 2 W, and rows are the results of `unpack_nibbles`.
        interpret: Whether the kernel is interpreted.
    """
    width = block.shape[1]
    if interpret:
        x = reorder_slots(block[...], 0).T
        for part, rows in enumerate(unpack_nibbles(x) if is_packed else (x,)):
            ref[pl.ds(part * width, width)] = rows
        return
    tile = min(width, 128)  # columns that are swizzled together

    def write(build: "_Builder", source: Any, out: Any) -> None:
        # Slot 64 b + 16 w + 8 a + r is row r of tile 2 w + a + 8 b, whose chunks are exchanged by r.
        exchange = build.exchange(build.row, tile)
        read = build.add(
            build.address(source), build.multiply(build.warp, 16 * width), build.multiply(build.row, tile),
            build.multiply(build.column, 4),
        )  # fmt: skip
        # The thread writes dimensions 16 chunk + 4 c + i.
        writes = [build.slot_address(out, build.add(build.multiply(build.column, 4), i)) for i in range(4)]
        for chunk in range(width // 16):
            first_column, in_tile = divmod(16 * chunk, tile)
            at = build.add(read, build.left_shift(build.exclusive_or(exchange, in_tile // 16), 4))
            words = [build.load(at, (8 * b + a) * 8 * width + first_column * 8 * tile) for b in (0, 1) for a in (0, 1)]
            for i, word in enumerate(build.transpose_bytes(words)):
                place = chunk * 16 * SLOTS
                if not is_packed:
                    build.store(writes[i], place, word)
                    continue
                build.store(writes[i], place, build.mask(word, 0x0F0F0F0F))
                high = build.mask(build.exclusive_or(word, 0x80808080), 0xF0F0F0F0)
                build.store(writes[i], place + width * SLOTS, high)

    _inline(write, (_swizzled(tile), _swizzled(SLOTS)))(block, ref)


def _swizzled(columns: int) -> Any:
    """Returns the type of int8 references from `hopper.blocked` whose rows are cut into `columns` columns."""
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    return plgpu.RefType((tiling((8, columns)), swizzling(columns)))


def _inline(write: Callable[..., None], arg_types: Sequence[Any]) -> Callable[..., Any]:
    """Returns a function of Pallas that emits the operations of `write`, which takes a `_Builder` first."""

    @plgpu.inline_mgpu(arg_types=tuple(arg_types))
    def emit(_context: Any, *arguments: Any) -> None:
        write(_Builder(), *arguments)

    return emit


class _Builder:
    """Emits 32-bit operations of a thread.

    Attributes:
        thread: The thread of the warpgroup.
        warp: w, its warp.
        row: r, the thread's group of four in its warp.
        column: c, the thread in this group.
    """

    def __init__(self) -> None:
        # Modules of JAX's compiler, which are imported where a GPU kernel is compiled.
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm

        self._utils, self._ir, self._arith, self._llvm = utils, ir, arith, llvm
        self._i32, self._f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        self.thread = self.mask(utils.thread_idx(), 127)
        self.warp, lane = self.right_shift(self.thread, 5), self.mask(self.thread, 31)
        self.row, self.column = self.right_shift(lane, 2), self.mask(lane, 3)

    def _value(self, x: Any) -> Any:
        """Returns a constant for a Python number of at most 32 bits, and other values unchanged."""
        if not isinstance(x, int):
            return x
        return self._utils.c(x - 2**32 if x >= 2**31 else x, self._i32)

    def add(self, first: Any, *others: Any) -> Any:
        for other in others:
            first = self._arith.addi(first, self._value(other))
        return first

    def multiply(self, x: Any, factor: int) -> Any:
        return self._arith.muli(x, self._value(factor))

    def mask(self, x: Any, bits: int) -> Any:
        return self._arith.andi(x, self._value(bits))

    def exclusive_or(self, x: Any, other: Any) -> Any:
        return self._arith.xori(x, self._value(other))

    def left_shift(self, x: Any, bits: int) -> Any:
        return self._arith.shli(x, self._value(bits))

    def right_shift(self, x: Any, bits: int) -> Any:
        return self._arith.shrui(x, self._value(bits))

    def address(self, ref: Any) -> Any:
        """Returns the address of a reference in shared memory."""
        return self._llvm.ptrtoint(self._i32, self._utils.memref_ptr(ref))

    def exchange(self, row: Any, tile: int) -> Any:
        """Returns the number that is combined with the chunks of a row of a tile of `tile` bytes per row."""
        return self.right_shift(row, {64: 1, 128: 0}[tile])

    def slot_address(self, ref: Any, row: Any) -> Any:
        """Returns the address of the thread's four slots in a row of `SLOTS` bytes."""
        chunk = self.add(self.multiply(self.warp, 2), self.right_shift(self.row, 2))
        chunk = self.exclusive_or(chunk, self.exchange(self.mask(row, 7), SLOTS))
        in_row = self.add(self.left_shift(chunk, 4), self.multiply(self.mask(self.row, 3), 4))
        return self.add(self.address(ref), self.multiply(row, SLOTS), in_row)

    def _pointer(self, address: Any, offset: int) -> Any:
        return self._llvm.inttoptr(self._ir.Type.parse("!llvm.ptr<3>"), self.add(address, offset))

    def load(self, address: Any, offset: int) -> Any:
        return self._llvm.load(self._i32, self._pointer(address, offset))

    def store(self, address: Any, offset: int, word: Any) -> None:
        self._llvm.store(word, self._pointer(address, offset))

    def permute(self, low: Any, high: Any, selector: int) -> Any:
        """Returns four bytes: each digit of `selector` names one, 0 to 3 of the word `low` and 4 to 7 of `high`."""
        text = f"prmt.b32 $0, $1, $2, 0x{selector:04x};"
        return self._llvm.inline_asm(self._i32, [low, high], text, "=r,r,r")

    def transpose_bytes(self, words: Sequence[Any]) -> list[Any]:
        """Returns the columns of the 4 x 4 bytes whose rows are `words`."""
        pairs = [(self.permute(a, b, 0x5140), self.permute(a, b, 0x7362)) for a, b in (words[:2], words[2:])]
        halves = zip(*pairs, strict=True)
        return [self.permute(low, high, selector) for low, high in halves for selector in (0x5410, 0x7632)]

    def lowest_bytes(self, words: Sequence[Any]) -> Any:
        """Returns a word of the lowest bytes of four words."""
        first, second = (self.permute(a, b, 0x0040) for a, b in (words[:2], words[2:]))
        return self.permute(first, second, 0x5410)

    def constant(self, x: float) -> Any:
        return self._utils.c(x, self._f32)

    def bits(self, x: Any) -> Any:
        return self._arith.bitcast(self._i32, x)

    def element(self, vector: Any, index: int) -> Any:
        return self._llvm.extractelement(vector, self._value(index))

    def split_float(self, x: Any) -> tuple[Any, Any]:
        """Returns words whose lowest bytes are the results of `split_bytes` of a float32 number `x`."""
        arith = self._arith
        high = arith.addf(x, self.constant(_ROUND))
        rest = arith.subf(x, arith.subf(high, self.constant(_ROUND)))
        low = arith.addf(arith.mulf(rest, self.constant(float(LOW_PART))), self.constant(_ROUND))
        return self.bits(high), self.bits(low)

    def join_parts(self, high: Any, low: Any) -> Any:
        """Returns the number that the words `high` and `low` of `split_float` stand for."""
        arith, round_ = self._arith, self.constant(_ROUND)
        high, low = (arith.subf(arith.bitcast(self._f32, word), round_) for word in (high, low))
        return arith.addf(high, arith.mulf(low, self.constant(1 / LOW_PART)))

    def load_bfloat16(self, address: Any, offset: int) -> tuple[Any, Any]:
        """Returns the two bfloat16 numbers at `address` plus `offset` bytes as float32."""
        word = self.load(address, offset)
        low, high = self.left_shift(word, 16), self.mask(word, 0xFFFF0000)
        return self._arith.bitcast(self._f32, low), self._arith.bitcast(self._f32, high)

    def less(self, x: Any, bound: int) -> Any:
        return self._arith.cmpi(self._arith.CmpIPredicate.ult, x, self._value(bound))

    def choose(self, condition: Any, first: float, second: float) -> Any:
        return self._arith.select(condition, self.constant(first), self.constant(second))

    def absolute(self, x: Any) -> Any:
        return self._arith.bitcast(self._f32, self.mask(self.bits(x), 0x7FFFFFFF))

    def maximum(self, x: Any, y: Any) -> Any:
        return self._arith.maximumf(x, y)

    def sum(self, x: Any, y: Any) -> Any:
        return self._arith.addf(x, y)

    def scale(self, x: Any, factor: Any) -> Any:
        return self._arith.mulf(x, factor)

    def inverse(self, x: Any, numerator: float) -> Any:
        """Returns numerator / x, or 0 where x is below 1e-30."""
        zero = self._arith.cmpf(self._arith.CmpFPredicate.OLT, x, self.constant(1e-30))
        quotient = self._arith.divf(self.constant(numerator), self._arith.select(zero, self.constant(1.0), x))
        return self._arith.select(zero, self.constant(0.0), quotient)

    def reduce_lanes(self, combine: Callable[[Any, Any], Any], x: Any) -> Any:
        """Returns the numbers `x` of 16 neighboring threads, combined by `combine`."""
        for distance in (1, 2, 4, 8):
            x = combine(x, self._utils.shfl_bfly(x, distance))
        return x
