"""Reads GGUF files, the container of llama.cpp: metadata and quantized tensors, in one file or split into several.

The reader of the `gguf` package creates one NumPy array per string, which takes ten seconds or more for the
vocabulary of a model. This one parses the header in a fraction of a second and checks every size against the file.
Quantized blocks are dequantized by the `gguf` package.

Reference:
    https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import concurrent.futures
import dataclasses
import functools
import math
import mmap
import os
import pathlib
import re
import struct
from collections.abc import Mapping
from typing import Any

import gguf
import ml_dtypes
import numpy as np

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_MAX_SPLIT_FILES = 9999
_SPLIT_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PLAIN_DTYPES: dict[gguf.GGMLQuantizationType, tuple[Any, str]] = {
    gguf.GGMLQuantizationType.F64: (np.float64, "F64"),
    gguf.GGMLQuantizationType.F32: (np.float32, "F32"),
    gguf.GGMLQuantizationType.F16: (np.float16, "F16"),
    gguf.GGMLQuantizationType.BF16: (ml_dtypes.bfloat16, "BF16"),
}
_CHUNK_BYTES = 2**19  # of quantized blocks that one thread dequantizes at a time; the values fit into its cache


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """An unread tensor of a GGUF file.

    Attributes:
        shape: shape in NumPy's order; quantized blocks span parts of the last axis.
        quantization: ggml's type of the values.
        data: the bytes in the file, uint8 [rows, bytes per row].
    """

    shape: tuple[int, ...]
    quantization: gguf.GGMLQuantizationType
    data: np.ndarray

    @property
    def dtype(self) -> str:
        """The dtype of `read` as safetensors names it; "F32" for quantized values."""
        return _PLAIN_DTYPES.get(self.quantization, (None, "F32"))[1]

    def read(self, dtype: np.typing.DTypeLike = np.float32) -> np.ndarray:
        """Returns the values.

        Args:
            dtype: dtype into which quantized values are dequantized.

        Raises:
            ValueError: if the `gguf` package cannot dequantize the type.
        """
        if self.quantization in _PLAIN_DTYPES:
            return self.data.view(_PLAIN_DTYPES[self.quantization][0]).reshape(self.shape)
        rows = max(1, _CHUNK_BYTES // self.data.shape[1])
        values = np.empty((len(self.data), self.shape[-1]), dtype)
        chunks = [slice(start, start + rows) for start in range(0, len(self.data), rows)]
        try:
            for _ in _threads().map(functools.partial(self._dequantize, values), chunks):
                pass
        except NotImplementedError as error:
            raise ValueError(f"the quantization {self.quantization.name} is not supported: {error}") from error
        return values.reshape(self.shape)

    def select(self, index: int) -> "QuantizedTensor":
        """Returns one entry along the first axis, such as one expert."""
        rows = math.prod(self.shape[1:-1])
        return dataclasses.replace(self, shape=self.shape[1:], data=self.data[index * rows : (index + 1) * rows])

    def _dequantize(self, values: np.ndarray, rows: slice) -> None:
        """Dequantizes some rows into `values`; the caller reports values that are not finite."""
        with np.errstate(all="ignore"):  # a thread has its own state
            values[rows] = gguf.quants.dequantize(self.data[rows], self.quantization)


@dataclasses.dataclass(frozen=True, eq=False)
class GGUFFile:
    """The content of a GGUF file.

    Attributes:
        path: path of the file; the first one if it is split.
        metadata: values by key: integers, floats, booleans, strings, lists of strings and one-dimensional arrays.
        tensors: tensors by ggml's names.
    """

    path: pathlib.Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, QuantizedTensor]


def read_gguf(path: str | os.PathLike) -> GGUFFile:
    """Parses the header of a GGUF file and maps its tensors; reads no tensor values.

    Args:
        path: path of the file; of the first file if it is split ("NAME-00001-of-00003.gguf").

    Returns:
        The content.

    Raises:
        FileNotFoundError: if the file or one of its splits does not exist.
        ValueError: if a file is damaged, is not a GGUF file, or is not the first of a split.
    """
    path = pathlib.Path(path)
    first = _read_single(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or not 0 <= count <= _MAX_SPLIT_FILES:
        raise ValueError(f"{path}: split.count={count!r} must be an integer from 0 to {_MAX_SPLIT_FILES}")
    if count <= 1:
        return first
    tensors = dict(first.tensors)
    for part_path in _other_parts(path, count):
        part = _read_single(part_path)
        if repeated := sorted(tensors.keys() & part.tensors.keys()):
            raise ValueError(f"{part.path} repeats {len(repeated)} tensors of another file, such as {repeated[0]}")
        tensors |= part.tensors
    return dataclasses.replace(first, tensors=tensors)


def _other_parts(path: pathlib.Path, count: int) -> list[pathlib.Path]:
    """Returns the paths of all parts of a split file but the first.

    They are searched next to the first one and, if this is a link, next to its target.

    Args:
        path: path of the first part.
        count: number of parts.

    Raises:
        ValueError: if the path is not that of the first part.
    """
    target, parts = path.resolve(), list[pathlib.Path]()
    for first in dict.fromkeys((path, target)):
        match = _SPLIT_NAME.fullmatch(first.name)
        if match is None or int(match["count"]) != count:
            continue
        prefix = match["prefix"]
        if int(match["number"]) != 1:
            raise ValueError(f"{path} is not the first of {count} files; pass {prefix}-00001-of-{count:05}.gguf")
        parts = [first.with_name(f"{prefix}-{number:05}-of-{count:05}.gguf") for number in range(2, count + 1)]
        if all(part.exists() for part in parts):
            break
    if not parts:
        raise ValueError(f"{path} is one of {count} files; its name must end in -00001-of-{count:05}.gguf")
    return parts


def _read_single(path: pathlib.Path) -> GGUFFile:
    """Parses one file.

    Returns:
        The content.

    Raises:
        FileNotFoundError: if it does not exist.
        ValueError: if it is damaged or not a GGUF file.
    """
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is not a GGUF file: it is empty")
    with path.open("rb") as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header = _Header(buffer)
    try:
        return header.parse(path)
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        reason = "it ends too early" if isinstance(error, struct.error) else error
        raise ValueError(f"{path} is not a valid GGUF file: {reason}") from error


class _Header:
    """A cursor over the header of a file."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer, self._position = buffer, 0

    def parse(self, path: pathlib.Path) -> GGUFFile:
        if self._bytes(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not supported; supported: 2 and 3, little-endian")
        num_tensors, num_keys = self._count(24), self._count(13)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        start = -(-self._position // alignment) * alignment
        tensors = {name: self._tensor(name, shape, kind, start + offset) for name, shape, kind, offset in entries}
        return GGUFFile(path, metadata, tensors)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Returns name, shape, type and offset of a tensor."""
        name, dimensions = self._string(), self._scalar("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"the tensor {name!r} has {dimensions} dimensions; supported: 1 to {_MAX_DIMENSIONS}")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))[::-1]
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> QuantizedTensor:
        try:
            quantization = gguf.GGMLQuantizationType(kind)
            block, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
        except (KeyError, ValueError):
            raise ValueError(
                f"the tensor {name!r} has the unknown type {kind}; a newer gguf package may know it"
            ) from None
        if 0 in shape or shape[-1] % block:
            raise ValueError(f"the tensor {name!r} has shape {list(shape)}; its rows must consist of blocks of {block}")
        row_bytes = shape[-1] // block * block_bytes
        rows = math.prod(shape[:-1])
        if offset + rows * row_bytes > len(self._buffer):
            raise ValueError(f"the tensor {name!r} of shape {list(shape)} exceeds the end of the file")
        data = np.frombuffer(self._buffer, np.uint8, rows * row_bytes, offset).reshape(rows, row_bytes)
        return QuantizedTensor(shape, quantization, data)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"the metadata type {kind} is unknown")
        kind = self._scalar("I")
        if kind == _STRING:
            return [self._string() for _ in range(self._count(8))]
        if kind not in _SCALARS:
            raise ValueError(f"arrays of the metadata type {kind} are not supported")
        dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
        count = self._count(dtype.itemsize)
        return np.frombuffer(self._bytes(count * dtype.itemsize), dtype)

    def _string(self) -> str:
        return self._bytes(self._count(1)).decode("utf-8")

    def _count(self, item_bytes: int) -> int:
        """Returns a count whose items, of at least `item_bytes`, fit into the remaining file."""
        count = self._scalar("Q")
        if count * item_bytes > len(self._buffer) - self._position:
            raise ValueError(f"it declares {count} items at byte {self._position}, more than the file can hold")
        return count

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._buffer, self._position)
        self._position += struct.calcsize(f"<{code}")
        return value

    def _bytes(self, count: int) -> bytes:
        data = self._buffer[self._position : self._position + count]
        if len(data) != count:
            raise ValueError("it ends too early")
        self._position += count
        return data


@functools.cache
def _threads() -> concurrent.futures.ThreadPoolExecutor:
    """Returns the threads that dequantize; NumPy releases the interpreter lock in its loops."""
    return concurrent.futures.ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="dequantize")
