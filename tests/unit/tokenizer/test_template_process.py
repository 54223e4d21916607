"""A chat template has a process of its own: one that never ends, or grows, fails its request and no other."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import InvalidParameter, Unavailable
from services.tokenizer import template_process, template_worker
from services.tokenizer.template_process import TemplateProcess

Start = Callable[[str], TemplateProcess]

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi é 😀 \ud800"}]}
SWITCHED = "{{% if evil %}}{evil}{{% endif %}}{{{{ messages[0].content }}}}"
"""A template that does harm only when it is asked to."""
LOOPS = "{% for a in range(n) %}{% for b in range(n) %}{% for c in range(n) %}{% endfor %}{% endfor %}{% endfor %}"


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(template_process, "MAX_CPU_S", 0.3)
    started: list[TemplateProcess] = []

    def begin(source: str) -> TemplateProcess:
        process = TemplateProcess(source)
        started.append(process)
        process.start()
        return process

    yield begin
    for process in started:
        process.close()


def reason_of(process: TemplateProcess, **values: Any) -> str:
    with pytest.raises(InvalidParameter, match="chat template refuses") as refused:
        process.render({**HELLO, **values})
    assert refused.value.param == "messages"
    return refused.value.message


def test_text_is_that_of_this_process(start: Start) -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ m | tojson }}{% endfor %}{{ eos_token }}"
    values = {**HELLO, "eos_token": "</s>"}
    assert start(source).render(values) == template_worker.rendered(template_worker.compiled(source), values)


@pytest.mark.parametrize(
    ("evil", "reason"),
    [
        (LOOPS.replace("(n)", "(99999)"), "more time"),
        (LOOPS, "more time"),
        ("{{ (n ** n) ** n }}", "more time"),
        ("{{ 'x' * n ** 2 }}", "more memory"),
        ("{% set ns = namespace(x='x') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "memory"),
        ("{% for a in range(n) %}{{ 'x' * 1000 }}{% endfor %}", "more than 4000000 characters"),
        ("{{ range(n * n) | list }}", "range"),
    ],
    ids=["loops", "loops over a value", "power", "repetition", "doubling", "output", "range"],
)
def test_a_template_that_goes_too_far_is_refused_and_the_next_rendering_works(
    start: Start, evil: str, reason: str
) -> None:
    process = start(SWITCHED.format(evil=evil))
    began = time.monotonic()
    assert reason in reason_of(process, evil=True, n=99999)
    assert time.monotonic() - began < template_process.ANSWER_TIMEOUT_S + 5
    assert process.render(HELLO) == HELLO["messages"][0]["content"]


def test_what_does_not_answer_is_given_up(start: Start, monkeypatch: Any) -> None:
    process = start(SWITCHED.format(evil=LOOPS))
    monkeypatch.setattr(template_process, "ANSWER_TIMEOUT_S", 0.05)
    assert "more time" in reason_of(process, evil=True, n=99999)


def test_a_busy_template_lets_nobody_wait_for_ever(start: Start, monkeypatch: Any) -> None:
    process = start(SWITCHED.format(evil=LOOPS))
    slow = threading.Thread(target=reason_of, args=(process,), kwargs={"evil": True, "n": 99999})
    slow.start()
    while not process._lock.locked():
        time.sleep(0.001)
    monkeypatch.setattr(template_process, "ANSWER_TIMEOUT_S", 0.01)
    with pytest.raises(Unavailable, match="busy"):
        process.render(HELLO)
    slow.join(20)


def test_a_process_that_was_killed_between_two_conversations_costs_neither(start: Start) -> None:
    process = start("{{ messages[0].role }}")
    assert process.render(HELLO) == "user"
    assert process._process.child is not None
    process._process.child.kill()
    process._process.child.wait()
    assert process.render(HELLO) == "user"


def test_values_that_are_nested_too_deeply_are_refused(start: Start) -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert "nested too deeply" in reason_of(start("x"), deep=deep)


def test_the_refusal_is_the_templates_own(start: Start) -> None:
    assert "roles must alternate" in reason_of(start("{{ raise_exception('roles must alternate') }}"))


@pytest.mark.parametrize("source", ["{% for x in %}", "{{ x", "{{ x | nofilter }}"])
def test_wrong_syntax_is_found_at_the_start(start: Start, source: str) -> None:
    with pytest.raises(ValueError, match="chat template has an error"):
        start(source)


def test_a_template_that_never_compiles_is_given_up(start: Start) -> None:
    with pytest.raises(Unavailable, match="did not compile"):
        start("{{ '%1000000000d' % 1 ~ (9 ** 9 ** 9) }}")


def test_the_process_knows_no_secrets(start: Start, monkeypatch: Any) -> None:
    monkeypatch.setenv("NATTERJACK_SECRET", "hidden")
    process = start("x")
    assert process._process.child is not None
    process.render(HELLO)
    environment = Path(f"/proc/{process._process.child.pid}/environ").read_bytes()
    assert b"NATTERJACK_SECRET" not in environment


def test_a_worker_answers_line_by_line() -> None:
    lines = [{"source": "{{ 1 / x }}", "max_cpu_s": 9}, {"x": 2}, {"x": 0}]
    answers = list(template_worker.answers(json.dumps(line).encode() for line in lines))
    assert answers[:2] == [{}, {"text": "0.5"}]
    assert "division" in answers[2]["error"]
    (failed,) = template_worker.answers(iter([json.dumps({"source": "{{", "max_cpu_s": 9}).encode()]))
    assert failed["error"]
