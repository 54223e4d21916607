"""Reads tool calls out of text that comes in pieces: what is content, what each call's name and arguments are. Pure.

The text follows the grammar of tool_format.py. Arguments are passed on as they come; content is held back only while it
may still become the beginning of a call.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Literal

from schemas.output import ToolCallDelta
from services.tokenizer.tool_format import ARGUMENTS_BEGIN, BODY_BEGIN, CLOSE, OPEN

HEADER = re.compile(rf'\s*{re.escape(BODY_BEGIN)}("(?:[^"\\]|\\.)*"){re.escape(ARGUMENTS_BEGIN)}')


@dataclass(slots=True)
class Read:
    """What a piece of text adds."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class ToolCallReader:
    """Reads one choice's text; ids of calls follow from the request, so that a second writer gives the same ones."""

    def __init__(self, request_id: str, index: int) -> None:
        self._source = f"{request_id}/{index}"
        self._state: Literal["content", "header", "arguments", "end"] = "content"
        self._buffer = ""
        self._depth = 0
        self._in_string = self._is_escaped = False
        self.num_calls = 0

    def feed(self, text: str) -> Read:
        """Take more text."""
        self._buffer += text
        read = Read()
        while self._step(read):
            pass
        return read

    def flush(self) -> Read:
        """Return what was held back: the text has ended."""
        held, self._buffer = self._buffer, ""
        return Read(held if self._state == "content" and (held.strip() or not self.num_calls) else "")

    def _step(self, read: Read) -> bool:
        """Go on by one state; False when more text is needed."""
        match self._state:
            case "content":
                return self._read_content(read)
            case "header":
                return self._read_header(read)
            case "arguments":
                return self._read_arguments(read)
            case "end":
                return self._skip_end()

    def _read_content(self, read: Read) -> bool:
        begin = self._buffer.find(OPEN)
        shown = self._buffer[: begin if begin >= 0 else len(self._buffer) - _overlap(self._buffer)]
        if shown.strip() or not self.num_calls:  # between calls there is only white space
            read.content += shown
        if begin < 0:
            self._buffer = self._buffer[len(shown) :]
            return False
        self._buffer = self._buffer[begin + len(OPEN) :]
        self._state = "header"
        return True

    def _read_header(self, read: Read) -> bool:
        match = HEADER.match(self._buffer)
        if match is None:
            return False
        self._buffer = self._buffer[match.end() :]
        digest = hashlib.blake2s(f"{self._source}/{self.num_calls}".encode()).hexdigest()[:24]
        read.calls.append(ToolCallDelta(index=self.num_calls, id=f"call_{digest}", name=json.loads(match[1])))
        self.num_calls += 1
        self._state, self._depth = "arguments", 0
        return True

    def _read_arguments(self, read: Read) -> bool:
        """The arguments end with the brace that closes their first one."""
        for position, character in enumerate(self._buffer):
            self._count(character)
            if character == "}" and self._depth == 0 and not self._in_string:
                self._pass_on(read, position + 1)
                self._state = "end"
                return True
        self._pass_on(read, len(self._buffer))
        return False

    def _count(self, character: str) -> None:
        if self._in_string:
            self._in_string = self._is_escaped or character != '"'
            self._is_escaped = character == "\\" and not self._is_escaped
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1

    def _pass_on(self, read: Read, length: int) -> None:
        arguments, self._buffer = self._buffer[:length], self._buffer[length:]
        if not arguments:
            return
        if read.calls:
            last = read.calls.pop()
            read.calls.append(last.model_copy(update={"arguments": last.arguments + arguments}))
        else:
            read.calls.append(ToolCallDelta(index=self.num_calls - 1, arguments=arguments))

    def _skip_end(self) -> bool:
        end = self._buffer.find(CLOSE)
        if end < 0:
            return False
        self._buffer = self._buffer[end + len(CLOSE) :]
        self._state = "content"
        return True


def _overlap(text: str) -> int:
    """Length of the longest end of `text` that a call may begin with."""
    return next((size for size in range(min(len(OPEN) - 1, len(text)), 0, -1) if text.endswith(OPEN[:size])), 0)
