"""What a child process printed: the last lines in memory, all of it (bounded) in a file."""

from collections import deque
from pathlib import Path

KEPT_LINES = 200
MAX_FILE_BYTES = 16 << 20
MAX_LINE_BYTES = 16 << 10


class ChildLog:
    """One child's output over all its lives. The file starts anew at a limit; one older file is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._rest = b""
        self._file = path.open("ab")

    def write(self, data: bytes) -> None:
        """Take what the child printed; what comes after the end is dropped."""
        if self._file.closed:
            return
        if self._file.tell() + len(data) > MAX_FILE_BYTES:
            self._file.close()
            self.path.replace(self.path.with_suffix(".log.1"))
            self._file = self.path.open("ab")
        self._file.write(data)
        self._file.flush()
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-MAX_LINE_BYTES:]
        self._lines.extend(line[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip() for line in lines)

    def tail(self, num_lines: int) -> list[str]:
        """Return the last lines that are not empty."""
        lines = [*self._lines, self._rest.decode("utf-8", "replace").rstrip()]
        return [line for line in lines if line.strip()][-num_lines:]

    def forget(self) -> None:
        """Drop the lines in memory, so that a new life's last words are its own."""
        self._lines.clear()
        self._rest = b""

    def close(self) -> None:
        """Close the file."""
        self._file.close()
