"""The capture file: JSON lines, compressed with zstd, the first of which names the version of the format.

    {"capture": 1, "natterjack": "0.1.0", "prefix": "nj", "source": "wiretap", "redaction": "none", …}   the header
    {"t": 1700000000.25, "subject": "nj.v1.work.smol.normal", "schema": "work_item/1", "trace": …, "body": {…}}
    {"t": 1700000009.5, "note": "missing", "num_messages": 12, …}                                          a note

`zstdcat FILE | jq` reads it. A recorder that is killed leaves a file without its last lines and without the note `end`;
everything before them is read. Knows nothing of what the messages mean.
"""

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import orjson
import zstandard
from pydantic import BaseModel, ConfigDict, ValidationError

CAPTURE_VERSION = 1
COMPRESSION_LEVEL = 1
"""A recorder shares the machine with what it records."""
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
MAX_LINE_BYTES = 64 << 20
"""Far above what one message of the bus can hold: a longer line is not ours."""

Redaction = Literal["none", "text", "ids"]
Source = Literal["wiretap", "streams", "simulation"]


class CaptureError(Exception):
    """The file is no capture, or one that this version cannot use; the message says what to do."""

    exit_code = 2


class Header(BaseModel):
    """The first line: which version of the format, of which deployment, and what was left out on purpose.

    `source`: taken from live traffic, read from the streams afterwards, or written by a simulation. `engines` are those
    of the executors at the start, also where a filter left them out; empty: not known.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    capture: int = CAPTURE_VERSION
    natterjack: str
    started_s: float
    prefix: str
    source: Source = "wiretap"
    redaction: Redaction = "none"
    filters: tuple[str, ...] = ()
    label: str = ""
    engines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Captured:
    """One message: when it reached the recorder (Unix time), and everything about it.

    `answers` is the subject of the request that a reply answers; the reply's own subject is an inbox. `is_stored` marks
    what was read from a stream or bucket instead of being heard.
    """

    arrived_s: float
    subject: str
    body: Any
    schema: str | None = None
    trace: str | None = None
    reply: str | None = None
    answers: str | None = None
    is_stored: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)

    def to_line(self) -> dict[str, Any]:
        """Return the line; what is empty is left out."""
        line: dict[str, Any] = {"t": round(self.arrived_s, 6), "subject": self.subject}
        optional = {
            "schema": self.schema,
            "trace": self.trace,
            "reply": self.reply,
            "answers": self.answers,
            "stored": self.is_stored,
            "headers": dict(self.headers),
        }
        line.update({key: value for key, value in optional.items() if value})
        line["body"] = self.body
        return line


@dataclass(frozen=True, slots=True)
class Note:
    """Something that the recorder says: `missing`, `replayed`, `end`."""

    at_s: float
    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_line(self) -> dict[str, Any]:
        """Return the line."""
        return {"t": round(self.at_s, 6), "note": self.kind, **self.facts}


def is_capture(path: Path) -> bool:
    """Tell whether a file looks like a recording, of whatever version."""
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError:
        return False
    return start.startswith((ZSTD_MAGIC, b'{"capture"'))


class CaptureWriter:
    """Appends lines; use it as a context manager. One thread at a time."""

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self._header = header
        self._file: BinaryIO | None = None
        self._stream: zstandard.ZstdCompressionWriter | None = None
        self.num_lines = 0

    def __enter__(self) -> "CaptureWriter":
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Create the file and write its header; raises CaptureError."""
        try:
            self._file = self._path.open("wb")
        except OSError as error:
            raise CaptureError(f"Cannot write the recording {self._path}: {error.strerror}.") from None
        self._stream = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).stream_writer(self._file, closefd=False)
        self._write(self._header.model_dump(mode="json"))
        self.flush()

    def close(self) -> None:
        """Finish the file."""
        if self._stream is not None:
            self._stream.flush(zstandard.FLUSH_FRAME)
        if self._file is not None:
            self._file.close()

    def write(self, line: Captured | Note) -> None:
        """Append one line."""
        self._write(line.to_line())
        self.num_lines += 1

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._stream is None:
            raise ValueError("the writer is not open")
        self._stream.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def flush(self) -> None:
        """Make everything written so far readable, also if this process is killed."""
        if self._stream is not None and self._file is not None:
            self._stream.flush(zstandard.FLUSH_BLOCK)
            self._file.flush()


class Capture:
    """A capture file that is read from the start as often as it is iterated; only one line is in memory at a time.

    `num_unreadable` and `is_truncated` tell, after an iteration, what was wrong with the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_unreadable = 0
        self.is_truncated = False
        self.header = self._read_header()

    def __iter__(self) -> Iterator[Captured | Note]:
        self.num_unreadable, self.is_truncated = 0, False
        lines = self._lines()
        next(lines, None)
        for line in lines:
            try:
                yield _parse(orjson.loads(line))
            except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
                self.num_unreadable += 1

    def messages(self) -> Iterator[Captured]:
        """Yield the messages without the notes."""
        return (line for line in self if isinstance(line, Captured))

    def _read_header(self) -> Header:
        line = next(self._lines(), b"")
        try:
            raw = orjson.loads(line)
            version = raw["capture"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise CaptureError(f"{self.path} is not a recording: its first line has no 'capture' version.") from None
        if version not in UPGRADES:
            raise CaptureError(
                f"{self.path} has version {version!r} of the recording format; this version of natterjack reads "
                f"{', '.join(map(str, UPGRADES))}. Use the version that recorded it, or record again."
            )
        try:
            return Header.model_validate(UPGRADES[version](raw))
        except ValidationError:
            raise CaptureError(f"The header of {self.path} is damaged.") from None

    def _lines(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as file:
                is_compressed = file.peek(len(ZSTD_MAGIC)).startswith(ZSTD_MAGIC)
                source: Any = zstandard.ZstdDecompressor().stream_reader(file) if is_compressed else file
                yield from self._whole_lines(io.BufferedReader(source) if is_compressed else file)
        except OSError as error:
            raise CaptureError(f"Cannot read the recording {self.path}: {error.strerror}.") from None

    def _whole_lines(self, stream: Any) -> Iterator[bytes]:
        """Yield lines up to where the file breaks off."""
        try:
            while line := stream.readline(MAX_LINE_BYTES):
                if line.endswith(b"\n"):
                    yield line
                else:
                    self.is_truncated = True
        except zstandard.ZstdError:
            self.is_truncated = True


def _parse(line: dict[str, Any]) -> Captured | Note:
    if "note" in line:
        facts = {key: value for key, value in line.items() if key not in ("t", "note")}
        return Note(float(line["t"]), str(line["note"]), facts)
    return Captured(
        arrived_s=float(line["t"]),
        subject=str(line["subject"]),
        body=line["body"],
        schema=line.get("schema"),
        trace=line.get("trace"),
        reply=line.get("reply"),
        answers=line.get("answers"),
        is_stored=bool(line.get("stored")),
        headers=line.get("headers", {}),
    )


UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {CAPTURE_VERSION: lambda header: header}
"""Every version that can be read, with what makes its header today's."""
