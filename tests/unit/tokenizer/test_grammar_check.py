"""Grammars are compiled in a process of its own: what a client's grammar does to it is that request's error."""

import io
import json
import time
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher

from schemas.errors import InvalidParameter, Unavailable, UnsupportedParameter
from services.tokenizer import answering_process, grammar_worker
from services.tokenizer.grammar_check import GrammarCheck, GrammarSource
from services.tokenizer.vocabulary import byte_vocabulary

GOOD = GrammarSource(LLMatcher.grammar_from_regex("a+"), "guided_regex")
CRASHING = GrammarSource(LLMatcher.grammar_from_json_schema('{"const": -9223372036854775807}'), "guided_json")
ENDLESS = GrammarSource(
    LLMatcher.grammar_from_json_schema('{"type": "integer", "multipleOf": 20268282}'), "guided_json"
)
SLOW = GrammarSource(LLMatcher.grammar_from_json_schema('{"type": "integer", "multipleOf": 200003}'), "guided_json")


@pytest.fixture
def check() -> Iterator[GrammarCheck]:
    check = GrammarCheck(byte_vocabulary(), is_enabled=True)
    yield check
    check.close()


def cause_of(check: GrammarCheck, source: GrammarSource) -> str:
    with pytest.raises(InvalidParameter) as refused:
        check.check(source)
    assert refused.value.param == source.param
    return refused.value.message


@pytest.mark.parametrize("source", [CRASHING, ENDLESS, SLOW], ids=["crashing", "endless", "slow"])
def test_a_grammar_that_harms_its_compiler_is_refused_and_the_next_one_is_compiled(
    check: GrammarCheck, source: GrammarSource
) -> None:
    check.check(GOOD)
    began_s = time.monotonic()
    assert "too complex" in cause_of(check, source)
    check.check(GrammarSource(LLMatcher.grammar_from_regex("b+"), "guided_regex"))
    known_s = time.monotonic()
    assert "too complex" in cause_of(check, source), "the verdict is remembered"
    assert time.monotonic() - known_s < 1.0
    assert known_s - began_s < 30.0


def test_a_process_that_was_killed_between_two_grammars_costs_neither(check: GrammarCheck) -> None:
    check.check(GOOD)
    assert check._process.child is not None
    check._process.child.kill()
    check._process.child.wait()
    check.check(GrammarSource(LLMatcher.grammar_from_regex("d+"), "guided_regex"))


def test_a_compiler_that_does_not_start_is_an_error_that_may_pass(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering_process.sys, "executable", "/bin/false")
    with pytest.raises(Unavailable):
        check.check(GOOD)
    monkeypatch.undo()
    check.check(GOOD)


def test_one_that_is_closed_starts_again_when_it_is_asked(check: GrammarCheck) -> None:
    check.check(GOOD)
    check.close()
    assert check._process.child is None
    check.check(GrammarSource(LLMatcher.grammar_from_regex("e+"), "guided_regex"))


def test_too_long_a_grammar_and_one_too_many_options(check: GrammarCheck) -> None:
    assert "at most" in cause_of(check, GrammarSource("x" * 300_000, "guided_grammar"))
    with pytest.raises(UnsupportedParameter):
        GrammarCheck(byte_vocabulary(), is_enabled=False).check(GOOD)


def test_the_worker_answers_every_line() -> None:
    vocabulary = {"tokens": ["YQ==", "Yg==", ""], "special": [2], "ends": [2]}
    asked = [
        {"grammar": GOOD.text, "patterns": []},
        {"grammar": GOOD.text, "patterns": [["'pattern' at #", "("]]},
        {"grammar": LLMatcher.grammar_from_regex("c"), "patterns": []},
        {"grammar": LLMatcher.grammar_from_json_schema('{"not": {}}'), "patterns": []},
    ]
    lines = io.BytesIO(b"".join(json.dumps(line).encode() + b"\n" for line in (vocabulary, *asked)))
    limited: list[None] = []
    refusals = [answer["refusal"] for answer in grammar_worker.answers(iter(lines), lambda: limited.append(None))]
    assert len(limited) == len(asked)
    assert refusals[:2] == ["", ""]
    assert refusals[2].startswith("the 'pattern' at #: ")
    assert refusals[3] == "it accepts nothing"
    assert "not" in refusals[4]
