"""Reading a GGUF file: header, metadata and memory-mapped tensors.

Owns the container format (little-endian GGUF versions 2 and 3, specified in ggml's docs/gguf.md). Knows
nothing of what the tensors mean. The header is walked once in pure Python: long arrays (a vocabulary) are
skipped, and decoded only when asked for, which opens a 49k-token file in tens of milliseconds.

Every number in the file is distrusted: counts, lengths and offsets are checked against the file's size before
use.
"""

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as dequantize_blocks
from numpy.typing import NDArray

from engine_core.errors import ModelFileError, UnsupportedModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4
DEFAULT_ALIGNMENT = 32
REMEDY = "download or convert the model again"

STRING, ARRAY = 8, 9
SCALAR_FORMATS: dict[int, str] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
"""Value type of the format → struct format."""

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class MetadataArray:
    """An array in the metadata, not decoded yet: `GgufFile.array_values` decodes it."""

    item_type: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file.

    `shape` is outermost first (a linear layer's weight is [out, in]), the reverse of the order in the file.
    `read` returns the raw bytes: as they are in the file, or made of it anew by each call.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    read: Callable[[], NDArray[np.uint8]]

    @property
    def data(self) -> NDArray[np.uint8]:
        """The raw bytes, uint8 [size_bytes]; read-only where they are memory-mapped."""
        return self.read()

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of `data`, known without reading it."""
        block_values, block_bytes = GGML_QUANT_SIZES[self.type]
        return self.num_values // block_values * block_bytes

    def dequantized(self) -> NDArray[np.float32]:
        """The values as float32 of `shape`; read-only and still memory-mapped when the file holds float32.

        Raises UnsupportedModelError for a type that cannot be dequantised.
        """
        block_values, block_bytes = GGML_QUANT_SIZES[self.type]
        row_bytes = self.shape[-1] // block_values * block_bytes
        try:
            values = dequantize_blocks(self.data.reshape(-1, row_bytes), self.type)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"tensor {self.name} has type {self.type.name}, which cannot be read; convert it to Q8_0"
            ) from error
        return np.ascontiguousarray(values, dtype=np.float32).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open file. The mapping lives as long as this object or any tensor taken from it.

    A checkpoint in another format is presented as one, without a mapping: weights/checkpoint.py.
    """

    path: Path
    version: int
    metadata: Mapping[str, Scalar | MetadataArray]
    tensors: Mapping[str, GgufTensor]
    mapping: mmap.mmap | None

    def tensor(self, name: str) -> GgufTensor:
        """The tensor called `name`; ModelFileError when the file has none."""
        try:
            return self.tensors[name]
        except KeyError:
            raise ModelFileError(f"{self.path}: tensor {name} is missing; {REMEDY}") from None

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer of the metadata; ModelFileError when it is absent (without default) or no integer."""
        value = self.metadata.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise ModelFileError(f"{self.path}: metadata {key} is {value!r}, not an integer; {REMEDY}")

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number of the metadata as float; ModelFileError as for `integer`."""
        value = self.metadata.get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        raise ModelFileError(f"{self.path}: metadata {key} is {value!r}, not a number; {REMEDY}")

    def text(self, key: str, default: str | None = None) -> str:
        """A string of the metadata; ModelFileError as for `integer`."""
        value = self.metadata.get(key, default)
        if isinstance(value, str):
            return value
        raise ModelFileError(f"{self.path}: metadata {key} is {value!r}, not a string; {REMEDY}")

    def array_values(self, key: str) -> list[Scalar]:
        """The items of an array of scalars or strings; ModelFileError when `key` is absent or not such an
        array.
        """
        value = self.metadata.get(key)
        if not isinstance(value, MetadataArray) or value.item_type == ARRAY or self.mapping is None:
            raise ModelFileError(f"{self.path}: metadata {key} is not an array of plain values; {REMEDY}")
        cursor = HeaderCursor(self.path, self.mapping, value.offset)
        return [cursor.scalar(value.item_type) for _ in range(value.count)]


class HeaderCursor:
    """Reads values one after another; every read is checked against the end of the file."""

    def __init__(self, path: Path, buffer: mmap.mmap, offset: int = 0) -> None:
        self.path = path
        self.buffer = buffer
        self.offset = offset
        self.size_bytes = len(buffer)

    def corrupt(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {what} (at byte {self.offset}); {REMEDY}")

    def advance(self, size_bytes: int) -> int:
        """Skip `size_bytes` and return where they began."""
        begin = self.offset
        if size_bytes > self.size_bytes - begin:
            raise self.corrupt("the file ends inside its header: truncated or corrupt")
        self.offset = begin + size_bytes
        return begin

    def number(self, number_format: str) -> int | float | bool:
        begin = self.advance(struct.calcsize(number_format))
        value: int | float | bool = struct.unpack_from(number_format, self.buffer, begin)[0]
        return value

    def count(self, number_format: str = "<Q", item_bytes: int = 1) -> int:
        """A count of items that each take at least `item_bytes` of what is left of the file."""
        value = int(self.number(number_format))
        if value * item_bytes > self.size_bytes - self.offset:
            raise self.corrupt(f"a count of {value} exceeds what the file can hold: truncated or corrupt")
        return value

    def string(self) -> str:
        length = self.count()
        begin = self.advance(length)
        try:
            return self.buffer[begin : begin + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.corrupt("a name or string is not valid UTF-8") from error

    def scalar(self, value_type: int) -> Scalar:
        if value_type == STRING:
            return self.string()
        if value_type not in SCALAR_FORMATS:
            raise self.corrupt(f"unknown metadata value type {value_type}")
        return self.number(SCALAR_FORMATS[value_type])

    def value(self, value_type: int, depth: int = 0) -> Scalar | MetadataArray:
        """A metadata value; an array is skipped and described."""
        if value_type != ARRAY:
            return self.scalar(value_type)
        if depth == MAX_ARRAY_DEPTH:
            raise self.corrupt("metadata arrays are nested too deeply")
        item_type = int(self.number("<I"))
        scalar_format = SCALAR_FORMATS.get(item_type)
        count = self.count(item_bytes=struct.calcsize(scalar_format) if scalar_format else 8)
        array = MetadataArray(item_type, count, self.offset)
        if scalar_format:
            self.advance(count * struct.calcsize(scalar_format))
        elif item_type == STRING:
            self.skip_strings(count)
        else:
            for _ in range(count):
                self.value(item_type, depth + 1)
        return array

    def skip_strings(self, count: int) -> None:
        """Skip a vocabulary: the one loop of the header whose speed matters, hence its bare form."""
        unpack, buffer, offset = struct.Struct("<Q").unpack_from, self.buffer, self.offset
        last_start = self.size_bytes - 8
        for _ in range(count):
            if offset > last_start:
                raise self.corrupt("the file ends inside an array of strings: truncated or corrupt")
            offset += 8 + unpack(buffer, offset)[0]
        self.advance(offset - self.offset)


def open_gguf(path: Path) -> GgufFile:
    """Map the file and read its header.

    Raises ModelFileError (missing, not GGUF, truncated, corrupt) or UnsupportedModelError (version, byte
    order, a tensor type newer than this program).
    """
    mapping = map_file(path)
    cursor = HeaderCursor(path, mapping)
    version = read_version(cursor)
    # The smallest tensor record is name length, dimension count, one dimension, type and offset; the smallest
    # pair of metadata is key length, type and value.
    tensor_count = cursor.count(item_bytes=32)
    metadata = read_metadata(cursor, cursor.count(item_bytes=13))
    tensors = read_tensors(cursor, tensor_count, metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    return GgufFile(path, version, metadata, tensors, mapping)


def map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelFileError(f"{path}: no such model file; check the path or download the model") from error
    except ValueError as error:  # mmap's word for an empty file
        raise ModelFileError(f"{path}: the model file is empty; {REMEDY}") from error
    except OSError as error:
        raise ModelFileError(f"{path}: the model file cannot be read ({error.strerror})") from error


def read_version(cursor: HeaderCursor) -> int:
    begin = cursor.advance(4)
    if cursor.buffer[begin : begin + 4] != MAGIC:
        raise ModelFileError(f"{cursor.path}: not a GGUF file; give the path of a .gguf model")
    version = int(cursor.number("<I"))
    if version in VERSIONS:
        return version
    swapped = struct.unpack(">I", struct.pack("<I", version))[0]
    reason = "is big-endian" if swapped in VERSIONS else f"has GGUF version {version}"
    raise UnsupportedModelError(f"{cursor.path}: the file {reason}; convert the model to little-endian GGUF version 3")


def read_metadata(cursor: HeaderCursor, count: int) -> dict[str, Scalar | MetadataArray]:
    metadata: dict[str, Scalar | MetadataArray] = {}
    for _ in range(count):
        key = cursor.string()
        if key in metadata:
            raise cursor.corrupt(f"metadata {key} occurs twice")
        metadata[key] = cursor.value(int(cursor.number("<I")))
    return metadata


def read_tensors(cursor: HeaderCursor, count: int, alignment: Scalar | MetadataArray) -> dict[str, GgufTensor]:
    """Read the tensor table and cut each tensor's bytes out of the mapping."""
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        raise cursor.corrupt(f"general.alignment is {alignment!r}, not a positive multiple of 8")
    records = [read_tensor_record(cursor) for _ in range(count)]
    data_begin = -(-cursor.offset // alignment) * alignment
    whole = np.frombuffer(cursor.buffer, dtype=np.uint8)
    tensors: dict[str, GgufTensor] = {}
    for name, tensor_type, shape, offset in records:
        block_values, block_bytes = GGML_QUANT_SIZES[tensor_type]
        size_bytes = math.prod(shape) // block_values * block_bytes
        begin = data_begin + offset
        if name in tensors:
            raise cursor.corrupt(f"tensor {name} occurs twice")
        if offset % alignment:
            raise cursor.corrupt(f"tensor {name} is not aligned to {alignment} bytes")
        if begin + size_bytes > len(whole):
            raise ModelFileError(
                f"{cursor.path}: truncated: tensor {name} ends at byte {begin + size_bytes}, "
                f"the file at {len(whole)}; {REMEDY}"
            )
        tensors[name] = GgufTensor(
            name, tensor_type, shape, partial(whole.__getitem__, slice(begin, begin + size_bytes))
        )
    return tensors


def read_tensor_record(cursor: HeaderCursor) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
    """One line of the tensor table: name, type, shape (outermost first), offset within the data."""
    name = cursor.string()
    num_dimensions = int(cursor.number("<I"))
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.corrupt(f"tensor {name} has {num_dimensions} dimensions")
    shape = tuple(int(cursor.number("<Q")) for _ in range(num_dimensions))[::-1]
    type_number = int(cursor.number("<I"))
    offset = int(cursor.number("<Q"))
    try:
        tensor_type = GGMLQuantizationType(type_number)
    except ValueError as error:
        raise UnsupportedModelError(
            f"{cursor.path}: tensor {name} has the unknown type {type_number}; convert the model to Q8_0"
        ) from error
    if min(shape) < 1 or shape[-1] % GGML_QUANT_SIZES[tensor_type][0]:
        raise cursor.corrupt(f"tensor {name} of type {tensor_type.name} cannot have shape {list(shape)}")
    return name, tensor_type, shape, offset
