"""The metadata of a GGUF file: its header without the tensors. Knows the container, not what the values mean.

The format is that of ggml's docs/gguf.md, little-endian, versions 2 and 3. Every count and length is checked against
the size of the file before it is used, so a corrupt file is an error at once, whatever it claims to hold.
"""

import mmap
import struct
from pathlib import Path

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value type → struct format."""

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]


class MetadataError(ValueError):
    """The file is no GGUF file, or its header is corrupt or cut off."""


def read_metadata(path: Path) -> dict[str, Value]:
    """Return every entry by name; raises MetadataError, OSError."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:  # nothing can be mapped
            raise MetadataError("the file is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data).metadata()


class _Cursor:
    """Reads one value after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._offset = 0

    def metadata(self) -> dict[str, Value]:
        if self._data[: len(MAGIC)] != MAGIC:
            raise MetadataError("it does not begin as a GGUF file")
        self._offset = len(MAGIC)
        version = self._integer("I")
        if version not in VERSIONS:
            raise MetadataError(f"its version {version} is not supported")
        self._integer("Q")  # the number of tensors, which follow the metadata
        entries: dict[str, Value] = {}
        for _ in range(self._integer("Q")):
            name = self._string()
            entries[name] = self._value(self._integer("I"))
        return entries

    def _value(self, kind: int) -> Value:
        if kind != ARRAY:
            return self._items(kind, 1)[0]
        item_kind = self._integer("I")
        return self._items(item_kind, self._integer("Q"))

    def _items(self, kind: int, count: int) -> list[Scalar]:
        if kind == STRING:
            return [self._string() for _ in range(count)]
        if kind not in SCALAR_FORMATS:
            raise MetadataError(f"it holds a value of the unknown type {kind}")
        return self._numbers(SCALAR_FORMATS[kind], count)

    def _numbers(self, number_format: str, count: int) -> list[Scalar]:
        begin = self._advance(count * struct.calcsize(number_format))
        return list(struct.unpack_from(f"<{count}{number_format}", self._data, begin))

    def _integer(self, number_format: str) -> int:
        return int(self._numbers(number_format, 1)[0])

    def _string(self) -> str:
        begin = self._advance(8)
        length = int.from_bytes(self._data[begin : begin + 8], "little")
        begin = self._advance(length)
        try:
            return self._data[begin : begin + length].decode("utf-8")
        except UnicodeDecodeError:
            raise MetadataError("one of its strings is not UTF-8") from None

    def _advance(self, num_bytes: int) -> int:
        """Skip `num_bytes` and return where they begin."""
        begin, end = self._offset, self._offset + num_bytes
        if end > len(self._data):
            raise MetadataError("it ends inside its header")
        self._offset = end
        return begin
