"""The docstrings that people read as the map of the system say what the code says."""

import inspect
import re
from dataclasses import dataclass

import pytest

import schemas
from schemas import errors
from schemas.errors import NatterjackError
from schemas.subjects import Subjects

NAMES = Subjects()
SUBJECTS_OF: dict[str, tuple[str, ...]] = {
    "GenerateRequest": (NAMES.generate("model"),),
    "Accepted": ("(reply to GenerateRequest)",),
    "TokenizeRequest": (NAMES.tokenize("model"),),
    "TokenizeReply": ("(reply to TokenizeRequest)",),
    "DetokenizeRequest": (NAMES.detokenize("model"),),
    "DetokenizeReply": ("(reply to DetokenizeRequest)",),
    "WorkItem": (NAMES.work("model", "priority"),),
    "CacheCommand": (NAMES.cache("model"),),
    "CacheReply": ("(reply to CacheCommand)",),
    "StepPlan": (NAMES.plan("executor"),),
    "StepResult": (NAMES.result("executor"),),
    "TokenBatch": (NAMES.detok("tokenizer"),),
    "OutputFeedback": (NAMES.feedback("scheduler"),),
    "OutputChunk": (NAMES.out("request"), NAMES.live("request")),
    "StoredResponse": (NAMES.response("request"),),
    "DeadLetter": (NAMES.dead("request"),),
    "Cancel": (NAMES.cancel("request"),),
    "ControlRequest": (NAMES.control("role"),),
    "ControlReply": ("(reply to ControlRequest)",),
    "KeepTrace": (NAMES.keep_trace,),
    "SpanBatch": (NAMES.spans("role"),),
    "MetricSample": (NAMES.samples("role"),),
    "TraceQuery": (NAMES.trace(),),
    "TraceReply": ("(reply to TraceQuery)",),
    "Registration": (f"KV {NAMES.registry}",),
    "SchedulerLease": (f"KV {NAMES.leases}",),
    "HandedBack": (f"KV {NAMES.leases}",),
    "Pause": (f"KV {NAMES.leases}",),
    "CacheOwnership": (f"KV {NAMES.leases}",),
    "EffectiveConfig": (f"KV {NAMES.config}",),
}
NOT_A_MESSAGE_OF_THE_MAP = {
    "all_of",
    "work_of",
    "work_all",
    "out_all",
    "live_all",
    "response_all",
    "response_stream",
    "cancel_all",
    "spans_all",
    "samples_all",
    "dead_all",
    "dead_stream",
    "work_stream",
    "out_stream",
    "work_consumer",
    "former_work_consumer",
    "prefix",
}
"""Wildcards, streams and consumers: other views of the subjects in the map."""


@dataclass(frozen=True)
class Row:
    message: str
    subject: str
    route: str
    kind: str


def table() -> list[Row]:
    """Return the rows of the table in the docstring of `schemas`; columns are two spaces or more apart."""
    lines = [line.strip() for line in (schemas.__doc__ or "").splitlines()]
    start = next(number for number, line in enumerate(lines) if line.startswith("---")) + 1
    end = lines.index("", start)
    return [Row(*re.split(r"\s{2,}", line)) for line in lines[start:end]]


def test_every_message_stands_in_the_map_with_its_subject() -> None:
    found: dict[str, tuple[str, ...]] = {}
    for row in table():
        found[row.message] = (*found.get(row.message, ()), re.sub("[<>]", "", row.subject))
    assert found == SUBJECTS_OF


def test_the_map_names_every_message_class_and_no_other() -> None:
    from schemas import cache, control, generation, output, responses, step, telemetry, tokenization
    from schemas.codec import Message

    kinds = {
        name
        for module in (cache, control, generation, output, responses, step, telemetry, tokenization)
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, Message) and kind is not Message
    }
    assert kinds == {row.message for row in table()}


def test_every_subject_that_the_code_can_make_stands_in_the_map() -> None:
    subjects = {row.subject for row in table()}
    for name, member in inspect.getmembers(Subjects):
        if name.startswith("_") or name in NOT_A_MESSAGE_OF_THE_MAP:
            continue
        if isinstance(member, property):
            made = getattr(NAMES, name)
            made = made if made.startswith(NAMES.prefix + ".") else f"KV {made}"
        else:
            parameters = list(inspect.signature(member).parameters)[1:]
            made = member(NAMES, *(f"9{parameter}9" for parameter in parameters))
            made = re.sub(r"9(\w+?)9", r"<\1>", made)
        assert made in subjects, name


def test_streams_are_named_in_the_map() -> None:
    kinds = {row.message: row.kind for row in reversed(table())}
    assert NAMES.work_stream in kinds["WorkItem"]
    assert NAMES.out_stream in kinds["OutputChunk"]
    assert NAMES.dead_stream in kinds["DeadLetter"]


@pytest.mark.parametrize("name", ["a", "Q"])
def test_names_of_two_deployments_are_disjoint(name: str) -> None:
    one, other = Subjects("nj"), Subjects("nj-2")
    for attribute, member in inspect.getmembers(Subjects):
        if attribute.startswith("_") or attribute.endswith("work_consumer"):  # named within its stream
            continue
        if isinstance(member, property) or attribute == "prefix":
            assert getattr(one, attribute) != getattr(other, attribute)
        else:
            arguments = [name] * (len(inspect.signature(member).parameters) - 1)
            assert member(one, *arguments) != member(other, *arguments)


TREE_LINE = re.compile(
    r"^(?P<indent>[│ ]*)(?:├──|└──) (?P<name>\w+)\s+(?P<code>\w+)\s+(?P<status>\d{3})\s*(?P<yes>yes)?"
)


def error_tree() -> dict[str, tuple[str, str, int, bool]]:
    """Return, per class in the docstring of errors.py, its parent, code, HTTP status and whether it is retryable."""
    tree: dict[str, tuple[str, str, int, bool]] = {}
    top = ""
    for line in (errors.__doc__ or "").splitlines():
        if (match := TREE_LINE.match(line)) is None:
            continue
        is_child = "│" in match["indent"]
        parent = top if is_child else "NatterjackError"
        if not is_child:
            top = match["name"]
        tree[match["name"]] = (parent, match["code"], int(match["status"]), match["yes"] is not None)
    return tree


def classes_below(kind: type[NatterjackError]) -> set[type[NatterjackError]]:
    below = {child for child in kind.__subclasses__() if child.__module__ == errors.__name__}
    return below.union(*(classes_below(child) for child in below))


def test_every_error_class_stands_in_the_tree_with_code_status_and_retryability() -> None:
    actual = {
        kind.__name__: (kind.__bases__[0].__name__, kind.code, kind.http_status, kind.retryable)
        for kind in classes_below(NatterjackError)
    }
    assert error_tree() == actual


def test_every_error_can_be_read_back_by_its_code() -> None:
    assert set(errors.BY_CODE.values()) == classes_below(NatterjackError)
    assert all(code == kind.code for code, kind in errors.BY_CODE.items())
