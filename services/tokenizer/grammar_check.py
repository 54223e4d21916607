"""Whether a grammar can be followed: compiled as the executor will, in a process of its own, with limits.

A compiler of clients' grammars is native code that some inputs keep busy for minutes and others crash. So it runs in a
child process (`grammar_worker.py`), which is killed when it takes too long and started again when it is gone. Knows
nothing of requests; to be called from a thread.
"""

import base64
import json
import logging
import threading
from dataclasses import dataclass

from schemas.errors import InvalidParameter, Unavailable, UnsupportedParameter
from services.tokenizer import grammar_worker
from services.tokenizer.answering_process import AnsweringProcess
from services.tokenizer.vocabulary import Vocabulary

log = logging.getLogger(__name__)

MAX_GRAMMAR_CHARS = 256_000
MAX_CAUSE_CHARS = 500
MAX_CACHED = 256
MAX_CPU_S = 0.5
"""The executor compiles an accepted grammar once more, between two steps: usual ones take about a millisecond."""
ANSWER_TIMEOUT_S = 5.0
START_TIMEOUT_S = 20.0
TOO_COMPLEX = "it is too complex"


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar in llguidance's form, and the option that asks for it.

    `patterns` are the regular expressions in a schema, each with its place, so that one that is wrong can be named.
    """

    text: str
    param: str
    patterns: tuple[tuple[str, str], ...] = ()


def refused(param: str, cause: str) -> InvalidParameter:
    """Return the error of a grammar that cannot be followed."""
    return InvalidParameter(f"{param} cannot be honoured: {cause[:MAX_CAUSE_CHARS].strip()}", param=param)


class GrammarCheck:
    """Asks the child process, one grammar at a time, and remembers its verdicts."""

    def __init__(self, vocabulary: Vocabulary, *, is_enabled: bool) -> None:
        self._vocabulary = vocabulary
        self._is_enabled = is_enabled
        self._verdicts: dict[str, str] = {}
        self._lock = threading.Lock()
        self._process = AnsweringProcess(grammar_worker.__file__)

    def check(self, source: GrammarSource) -> None:
        """Raise InvalidParameter with the cause if the grammar cannot be honoured, Unavailable without a compiler."""
        if not self._is_enabled:
            raise UnsupportedParameter(
                f"Structured output is switched off here (tokenizer.structured_output), so {source.param!r} cannot "
                "be honoured.",
                param=source.param,
            )
        if len(source.text) > MAX_GRAMMAR_CHARS:
            raise InvalidParameter(
                f"The grammar of {source.param} has {len(source.text)} characters; at most {MAX_GRAMMAR_CHARS} are "
                "allowed.",
                param=source.param,
            )
        with self._lock:
            verdict = self._verdicts.get(source.text)
            if verdict is None:
                verdict = self._verdicts[source.text] = self._ask(source)
                if len(self._verdicts) > MAX_CACHED:
                    del self._verdicts[next(iter(self._verdicts))]
        if verdict:
            raise refused(source.param, verdict)

    def close(self) -> None:
        """End the child process; a grammar that is being compiled ends first."""
        with self._lock:
            self._process.end()

    # ---- the child process

    def _ask(self, source: GrammarSource) -> str:
        """Return why the grammar is refused, or nothing."""
        if not self._process.is_running:
            self._start()
        question = json.dumps({"grammar": source.text, "patterns": source.patterns}).encode()
        answer = self._process.ask(question, ANSWER_TIMEOUT_S)
        if answer is None:
            log.warning("a grammar of %d characters was too much for its compiler", len(source.text))
            return TOO_COMPLEX
        refusal: str = answer["refusal"]
        return refusal or (TOO_COMPLEX if answer["cpu_s"] > MAX_CPU_S else "")

    def _start(self) -> None:
        vocabulary = self._vocabulary
        words = {
            "tokens": [base64.b64encode(text).decode() for text in vocabulary.token_bytes],
            "special": sorted(vocabulary.special_token_ids),
            "ends": list(vocabulary.end_token_ids),
        }
        self._process.start()
        if self._process.ask(json.dumps(words).encode(), START_TIMEOUT_S) is None:
            raise Unavailable("Grammars cannot be checked: their compiler did not start.")
