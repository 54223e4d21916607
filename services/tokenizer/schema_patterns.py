"""Regular expressions of JSON schemas, as the grammar engine is to read them. Pure; knows no schema.

JSON Schema means ECMA-262's notation (https://262.ecma-international.org/15.0/#sec-patterns), the grammar engine reads
that of Rust's `regex` crate. What both write differently is written in the engine's way here; what one of them lacks,
and what would silently mean something else, is refused.
"""

import re

ECMA_DOT = r"[^\n\r\u2028\u2029]"
ESCAPED_LETTERS = frozenset("dDwWsStnrvfcxupPkbB0123456789")
"""Letters and digits that mean something after a backslash in both notations, or that the engine refuses by itself."""
BRACED_ESCAPE = re.compile(r"\\[pP]\{\w+(?:=\w+)?\}|\\u\{[0-9A-Fa-f]+\}")
IN_CLASS_ESCAPED = frozenset("[&~")
"""Plain characters within ECMA's [...], operators within Rust's."""

YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
LEAP_YEAR = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"  # Gregorian, without year 0
)
DATE = (
    f"(?:{YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{LEAP_YEAR}-02-29)"
)
CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{CLOCK})"
FORMAT_PATTERNS = {"date": f"^{DATE}$", "time": f"^{TIME}$", "date-time": f"^{DATE}T{TIME}$"}
"""Formats of RFC 3339 whose own grammar in the engine takes days that do not exist; no leap seconds."""


class PatternRefused(ValueError):
    """The pattern cannot be followed; the message says why."""


def engine_pattern(pattern: str) -> str:
    """Return an ECMA-262 pattern as the grammar engine reads it; raises PatternRefused."""
    return "".join(_Translation(pattern).parts())


class _Translation:
    """One pass over a pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def parts(self) -> list[str]:
        """Return the translated pieces in order."""
        translated: list[str] = []
        while self._at < len(self._pattern):
            character = self._pattern[self._at]
            match character:
                case "\\":
                    translated.append(self._escape())
                case "[":
                    translated += self._character_class()
                case ".":
                    translated.append(ECMA_DOT)
                    self._at += 1
                case _:
                    self._check_plain()
                    translated.append(character)
                    self._at += 1
        return translated

    def _check_plain(self) -> None:
        rest = self._pattern[self._at :]
        if rest.startswith("(?") and not re.match(r"\(\?(?:[:=!]|<[=!]|<[A-Za-z_]\w*>)", rest):
            raise PatternRefused("inline flags and other groups than (?:…) and (?<name>…) are not supported")
        if re.match(r"[*+?}][*+]|\?\?\?", rest):
            raise PatternRefused(f"nothing to repeat before {rest[1]!r}")

    def _escape(self) -> str:
        if braced := BRACED_ESCAPE.match(self._pattern, self._at):
            self._at = braced.end()
            return braced[0]
        escaped = self._pattern[self._at + 1 : self._at + 2]
        self._at += 2
        if not escaped:
            raise PatternRefused("it ends with a backslash")
        if escaped.isalnum() and escaped not in ESCAPED_LETTERS:
            raise PatternRefused(f"the escape \\{escaped} is not supported")
        if escaped in "<>":  # words' ends in Rust
            return escaped
        return "\\" + escaped

    def _character_class(self) -> list[str]:
        opening = "[^" if self._pattern.startswith("[^", self._at) else "["
        translated = [opening]
        self._at += len(opening)
        if self._pattern.startswith("]", self._at):
            raise PatternRefused("an empty character class is not supported")
        while self._at < len(self._pattern):
            character = self._pattern[self._at]
            if character == "\\":
                translated.append(self._escape())
                continue
            if self._pattern.startswith("--", self._at):
                raise PatternRefused("'--' in a character class is not supported")
            self._at += 1
            translated.append("\\" + character if character in IN_CLASS_ESCAPED else character)
            if character == "]":
                return translated
        raise PatternRefused("a character class is not closed")
