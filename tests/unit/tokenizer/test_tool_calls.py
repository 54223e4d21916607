"""Tool calls in text: however the text is cut, the same content, the same calls, arguments that join to JSON."""

import json

from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.tool_calls import Read, ToolCallReader
from tests.unit.tokenizer.test_request_output import drain, output_of, tokens

TWO_CALLS = (
    'Sure.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa\\"}ris {", "days": 3}}\n</tool_call>'
    '\n<tool_call>\n{"name": "now", "arguments": {"zone": [{}, "]"], "n": 7}}\n</tool_call>'
)
EXPECTED = [("get_weather", {"city": 'Pa"}ris {', "days": 3}), ("now", {"zone": [{}, "]"], "n": 7})]


def joined(reads: list[Read]) -> tuple[str, list[tuple[str, str]]]:
    calls: list[list[str]] = []
    for call in (call for read in reads for call in read.calls):
        if call.name is not None:
            assert call.index == len(calls)
            assert call.id is not None
            calls.append([call.name, ""])
        calls[call.index][1] += call.arguments
    return "".join(read.content for read in reads), [(name, arguments) for name, arguments in calls]


def read_in(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    reader = ToolCallReader("r", 0)
    return joined([*(reader.feed(piece) for piece in pieces), reader.flush()])


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[begin:end] for begin, end in zip(edges, edges[1:], strict=False)]


@given(st.lists(st.integers(0, 500), max_size=30))
def test_calls_are_the_same_however_the_text_is_cut(places: list[int]) -> None:
    content, calls = read_in(cut(TWO_CALLS, places))
    assert content == "Sure."
    assert [(name, json.loads(arguments)) for name, arguments in calls] == EXPECTED


def test_calls_come_as_the_text_does_character_by_character() -> None:
    content, calls = read_in(list(TWO_CALLS))
    assert content == "Sure."
    assert [(name, json.loads(arguments)) for name, arguments in calls] == EXPECTED


@given(st.text(alphabet="<tool_call>/ \nx"), st.lists(st.integers(0, 500), max_size=10))
def test_text_without_a_call_comes_back_unchanged(text: str, places: list[int]) -> None:
    if "<tool_call>" not in text:
        assert read_in(cut(text, places)) == (text, [])


def test_only_what_may_become_a_call_is_held_back() -> None:
    reader = ToolCallReader("r", 0)
    shown = [reader.feed(piece).content for piece in ("a <", "b <tool", "_x", "<tool_cal")]
    assert shown == ["a ", "<b ", "<tool_x", ""]
    assert reader.flush().content == "<tool_cal"


def test_a_call_that_is_cut_short_keeps_what_came() -> None:
    begun = '<tool_call>\n{"name": "now", "arguments": {"n": 12'
    assert read_in([begun]) == ("", [("now", '{"n": 12')])
    assert read_in([begun[:20]]) == ("", [])


def test_ids_differ_between_calls_and_follow_from_the_request() -> None:
    def ids(request: str, index: int) -> list[str | None]:
        return [call.id for call in ToolCallReader(request, index).feed(TWO_CALLS).calls if call.name]

    assert ids("r", 0) == ids("r", 0)
    assert len({*ids("r", 0), *ids("r", 1), *ids("s", 0)}) == 6


def test_an_answer_with_calls_finishes_with_them_unless_it_is_cut() -> None:
    for reason, expected in (("stop", "tool_calls"), ("length", "length")):
        output = output_of(reads_tool_calls=True)
        output.feed(tokens(TWO_CALLS, finish_reason=reason))
        deltas = [delta for chunk in drain(output) for delta in chunk.choices]
        assert deltas[-1].finish_reason == expected
        assert "".join(delta.text for delta in deltas) == "Sure."
    output = output_of(reads_tool_calls=True)
    output.feed(tokens("No <to", finish_reason="stop"))
    [chunk] = drain(output)
    assert (chunk.choices[0].text, chunk.choices[0].finish_reason) == ("No <to", "stop")


def test_a_second_writer_goes_on_in_the_middle_of_a_call() -> None:
    for split in range(1, len(TWO_CALLS)):
        first = output_of(reads_tool_calls=True)
        first.feed(tokens(TWO_CALLS[:split]))
        stored = drain(first)
        second = output_of(2, reads_tool_calls=True)
        second.restore(stored)
        second.feed(tokens(TWO_CALLS[split:], start=split, finish_reason="stop"))
        deltas = [delta for chunk in [*stored, *drain(second)] for delta in chunk.choices]
        content, calls = joined([Read(delta.text, list(delta.tool_calls)) for delta in deltas])
        assert content == "Sure."
        assert [(name, json.loads(arguments)) for name, arguments in calls] == EXPECTED
