"""A process of its own that renders a chat template: whatever a template does to it, only it suffers.

Run as a script, isolated and with nothing in its environment: it knows the standard library and Jinja, nothing of
ours. On its standard input come JSON lines: first the template's source and a time limit, then the values of one
rendering at a time; every line is answered with one line. The kernel ends it when a rendering takes too much time, and
refuses it memory beyond a limit; the parent ends it by closing the input, or by killing it.

Jinja's sandbox keeps a template from reaching anything. It does not bound it: nested loops, a power of a big number or
a text of many times its size run as long as they like, most of them inside one call that no thread could interrupt.
"""

import datetime
import json
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MEMORY_BYTES = 1 << 30
MAX_PROMPT_CHARS = 4_000_000

RENDERING_ERRORS = (
    TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError,
)  # fmt: skip
"""What a template may raise over a conversation that it was not written for."""


def compiled(source: str) -> Template:
    """Return the template in a sandbox that can change nothing; raises TemplateError for wrong syntax."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    environment.filters["tojson"] = _to_json
    return environment.from_string(source)


def rendered(template: Template, values: dict[str, Any]) -> str:
    """Return the text; raises RENDERING_ERRORS, ValueError also for a text that is too long."""
    pieces: list[str] = []
    room = MAX_PROMPT_CHARS
    for piece in template.generate(values):
        room -= len(piece)
        if room < 0:
            raise ValueError(f"its text has more than {MAX_PROMPT_CHARS} characters")
        pieces.append(piece)
    return "".join(pieces)


def answers(lines: Iterator[bytes]) -> Iterator[dict[str, str]]:
    """Yield one answer per line: an error, or for every line but the first a text."""
    first = json.loads(next(lines))
    max_cpu_s = float(first["max_cpu_s"])
    _limit_cpu(max_cpu_s)
    try:
        template = compiled(first["source"])
    except RENDERING_ERRORS as error:
        yield {"error": str(error)}
        return
    finally:
        _limit_cpu(0)
    yield {}
    for line in lines:
        yield _answer(template, json.loads(line), max_cpu_s)


def _answer(template: Template, values: dict[str, Any], max_cpu_s: float) -> dict[str, str]:
    _limit_cpu(max_cpu_s)
    try:
        return {"text": rendered(template, values)}
    except MemoryError:
        return {"error": "it takes more memory than a template may have"}
    except RENDERING_ERRORS as error:
        return {"error": str(error)}
    finally:
        _limit_cpu(0)


def _limit_cpu(seconds: float) -> None:
    """Let the kernel end this process after so much more time of its own, wherever it is; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.datetime.now().strftime(format_)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Templates are written for this signature; Jinja's own filter escapes characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def main() -> None:
    """Answer until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for answer in answers(iter(sys.stdin.buffer)):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
