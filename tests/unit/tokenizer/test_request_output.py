"""From tokens to chunks: what they say does not depend on how they came, nor on a writer's death in between."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import Cancelled
from schemas.generation import OutputSpec
from schemas.output import NewTokens, OutputChunk, Usage
from schemas.step import TokenLogprob
from services.tokenizer.request_output import MAX_CHUNK_TOKENS, RequestOutput, TokensMissing, TokensUnsound
from services.tokenizer.vocabulary import BYTE_VOCABULARY_END as END
from services.tokenizer.vocabulary import byte_vocabulary

BYTES = byte_vocabulary()


def output_of(epoch: int = 1, **spec: Any) -> RequestOutput:
    fields = {"request_id": "r", "model": "smol", "created_s": 5.0, "num_prompt_tokens": 3, **spec}
    return RequestOutput(OutputSpec(**fields), epoch, BYTES)


def tokens(text: str | bytes, start: int = 0, **fields: Any) -> NewTokens:
    raw = text.encode() if isinstance(text, str) else text
    return NewTokens(**{"request_id": "r", "epoch": 1, "start": start, "token_ids": tuple(raw), **fields})


@dataclass
class Read:
    """One choice as a client puts it together."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finishes: list[tuple[str, Any]] = field(default_factory=list)


def read(chunks: list[OutputChunk], n: int = 1) -> list[Read]:
    choices = [Read() for _ in range(n)]
    for chunk in chunks:
        for delta in chunk.choices:
            choice = choices[delta.index]
            assert delta.start == len(choice.token_ids)
            assert not choice.finishes
            choice.token_ids += delta.token_ids
            choice.text += delta.text
            choice.logprobs += delta.logprobs or ()
            if delta.finish_reason is not None:
                choice.finishes.append((delta.finish_reason, delta.stop_reason))
    assert [chunk.final for chunk in chunks[:-1]] == [False] * (len(chunks) - 1)
    return choices


def drain(output: RequestOutput) -> list[OutputChunk]:
    chunks: list[OutputChunk] = []
    while (chunk := output.take_chunk()) is not None:
        chunks.append(chunk)
    return chunks


def test_what_came_since_the_last_chunk_is_in_the_next_one() -> None:
    output = output_of()
    assert output.take_chunk() is None
    output.feed(tokens("He"))
    output.feed(tokens("llo", 2))
    chunk = output.take_chunk()
    assert chunk is not None
    assert (chunk.choices[0].start, chunk.choices[0].text, chunk.final) == (0, "Hello", False)
    assert (chunk.request_id, chunk.model, chunk.created_s, chunk.epoch) == ("r", "smol", 5.0, 1)
    assert output.take_chunk() is None
    output.feed(tokens("!", 5))
    chunk = output.take_chunk()
    assert chunk is not None
    assert (chunk.choices[0].start, chunk.choices[0].text) == (5, "!")


def test_repeated_tokens_are_skipped() -> None:
    output = output_of()
    output.feed(tokens("Hello"))
    output.feed(tokens("Hell"))
    output.feed(tokens("lo!", 3))
    output.feed(tokens("", 2))
    assert read(drain(output))[0].text == "Hello!"


def test_gap_is_noticed_and_changes_nothing() -> None:
    output = output_of()
    output.feed(tokens("He"))
    with pytest.raises(TokensMissing):
        output.feed(tokens("o", 4))
    output.feed(tokens("llo", 2))
    assert read(drain(output))[0].text == "Hello"


@pytest.mark.parametrize(
    "news",
    [
        tokens("a", index=2),
        tokens("a", index=-1),
        tokens("a", start=-1),
        tokens("", token_ids=(-1,)),
        tokens("ab", logprobs=(TokenLogprob(logprob=-1),)),
    ],
)
def test_unsound_tokens_change_nothing(news: NewTokens) -> None:
    output = output_of(n=2)
    with pytest.raises(TokensUnsound):
        output.feed(news)
    assert output.take_chunk() is None


def test_length_ends_the_choice_once_and_shows_what_was_held_back() -> None:
    output = output_of(stop=("lo!",))
    output.feed(tokens("Hello"))
    assert output.take_chunk().choices[0].text == "Hel"  # type: ignore[union-attr]
    output.feed(tokens("", 5, finish_reason="length"))
    output.feed(tokens("", 5, finish_reason="length"))
    chunk = output.take_chunk()
    assert chunk is not None
    assert (chunk.choices[0].text, chunk.choices[0].finish_reason, chunk.final) == ("lo", "length", True)
    assert chunk.usage == Usage(prompt_tokens=3, completion_tokens=5)
    assert output.take_chunk() is None


def test_models_own_end_is_counted_but_no_text() -> None:
    output = output_of(skip_special_tokens=False)
    output.feed(tokens("", token_ids=(72, 105, END), finish_reason="stop", stop_token=True))
    [chunk] = drain(output)
    assert (chunk.choices[0].text, chunk.choices[0].token_ids) == ("Hi", (72, 105, END))
    assert (chunk.choices[0].finish_reason, chunk.choices[0].stop_reason) == ("stop", None)
    assert chunk.usage is not None
    assert chunk.usage.completion_tokens == 3


@pytest.mark.parametrize(("include", "text"), [(False, "H"), (True, "Hi")])
def test_stop_token_of_the_request_is_the_reason(include: bool, text: str) -> None:
    output = output_of(include_stop=include)
    output.feed(tokens("Hi", finish_reason="stop", stop_token=True))
    assert read(drain(output)) == [Read([72, 105], text, [], [("stop", 105)])]


@pytest.mark.parametrize(("include", "text"), [(False, "one, two, "), (True, "one, two, three")])
def test_stop_string_in_the_middle_of_a_batch_ends_at_its_last_token(include: bool, text: str) -> None:
    output = output_of(stop=("three",), include_stop=include)
    assert output.feed(tokens("one, two, three, four, five", finish_reason="length"))
    assert output.num_tokens(0) == len("one, two, three")
    [choice] = read(chunks := drain(output))
    assert (choice.text, choice.finishes) == (text, [("stop", "three")])
    assert chunks[-1].usage == Usage(prompt_tokens=3, completion_tokens=15)
    assert bytes(choice.token_ids) == b"one, two, three"


def test_stop_is_told_again_when_tokens_keep_coming() -> None:
    output = output_of(stop=("b",), n=2)
    assert output.feed(tokens("ab"))
    assert output.feed(tokens("c", 2))
    assert output.num_tokens(0) == 2
    assert not output.feed(tokens("x", index=1))


def test_first_text_comes_with_the_first_token() -> None:
    output = output_of(stop=("ZZZZZZZZZZ",))
    output.feed(tokens("o"))
    chunk = output.take_chunk()
    assert chunk is not None
    assert chunk.choices[0].text == "o"


def test_stop_that_the_last_broken_character_completes_is_found() -> None:
    output = output_of(stop=("\ufffd",))
    output.feed(tokens(b"a\xf0\x9f", finish_reason="length"))
    assert read(drain(output))[0].finishes == [("stop", "\ufffd")]


def test_unfinished_character_at_the_end_is_not_lost() -> None:
    output = output_of()
    output.feed(tokens(b"a\xf0\x9f", finish_reason="length"))
    assert read(drain(output)) == [Read([97, 0xF0, 0x9F], "a\ufffd", [], [("length", None)])]


def test_logprobs_show_real_bytes_and_join_to_the_text() -> None:
    output = output_of(num_logprobs=2)
    raw = "é😀".encode()
    logprobs = tuple(
        TokenLogprob(logprob=-float(i), top=((token, -float(i)), (END, -9.0))) for i, token in enumerate(raw)
    )
    output.feed(tokens(raw, logprobs=logprobs, finish_reason="length"))
    [choice] = read(drain(output))
    assert b"".join(bytes(entry.token_bytes) for entry in choice.logprobs).decode() == choice.text == "é😀"
    assert [entry.logprob for entry in choice.logprobs] == [-float(i) for i in range(6)]
    assert choice.logprobs[0].token == "\ufffd"
    assert [top.token for top in choice.logprobs[0].top] == ["\ufffd", "<end>"]


@pytest.mark.parametrize(("include", "shown"), [(False, ["H", "i"]), (True, ["H", "i", "<end>"])])
def test_logprobs_leave_out_the_end_token_unless_it_is_wanted(include: bool, shown: list[str]) -> None:
    output = output_of(num_logprobs=0, include_stop=include)
    logprobs = (TokenLogprob(logprob=-1.0),) * 3
    output.feed(tokens("", token_ids=(72, 105, END), logprobs=logprobs, finish_reason="stop", stop_token=True))
    [choice] = read(drain(output))
    assert [entry.token for entry in choice.logprobs] == shown
    assert (choice.text, choice.token_ids) == ("Hi", [72, 105, END])


def test_logprobs_are_none_unless_asked_for() -> None:
    output = output_of()
    output.feed(tokens("a"))
    assert drain(output)[0].choices[0].logprobs is None


def test_choices_keep_their_own_text_and_end_once_each() -> None:
    output = output_of(n=3)
    output.feed(tokens("b", index=1))
    output.feed(tokens("a", index=0, finish_reason="length"))
    first = output.take_chunk()
    assert first is not None
    assert [delta.index for delta in first.choices] == [0, 1]
    assert not first.final
    output.feed(tokens("c", index=2, finish_reason="stop"))
    output.feed(tokens("", 1, index=1, finish_reason="stop"))
    chunks = [first, *drain(output)]
    choices = read(chunks, 3)
    assert [choice.text for choice in choices] == ["a", "b", "c"]
    assert [len(choice.finishes) for choice in choices] == [1, 1, 1]
    assert chunks[-1].usage == Usage(prompt_tokens=3, completion_tokens=3)


def test_error_ends_the_request_with_what_was_said_until_then() -> None:
    output = output_of()
    output.feed(tokens("He"))
    output.fail(Cancelled("gone").body())
    [chunk] = drain(output)
    assert (chunk.choices[0].text, chunk.final) == ("He", True)
    assert chunk.error is not None
    assert chunk.error.code == "cancelled"
    assert output.take_chunk() is None


def test_error_before_any_token_is_an_empty_final_chunk() -> None:
    output = output_of()
    output.fail(Cancelled("gone").body())
    [chunk] = drain(output)
    assert (chunk.choices, chunk.final) == ((), True)


def test_error_after_the_end_of_every_choice_is_no_error() -> None:
    output = output_of()
    output.feed(tokens("a", finish_reason="length"))
    output.fail(Cancelled("late").body())
    [chunk] = drain(output)
    assert (chunk.final, chunk.error) == (True, None)
    output.fail(Cancelled("later").body())
    assert output.take_chunk() is None


def test_much_that_waits_goes_into_bounded_chunks_of_which_the_last_is_final() -> None:
    output = output_of(n=3)
    for index in range(3):
        output.feed(tokens(b"x" * 1000, index=index, finish_reason="length"))
    chunks = drain(output)
    assert max(sum(len(delta.token_ids) for delta in chunk.choices) for chunk in chunks) < 2 * MAX_CHUNK_TOKENS
    assert [choice.text for choice in read(chunks, 3)] == ["x" * 1000] * 3
    assert chunks[-1].final


def test_much_that_waits_before_an_error_is_said_before_it() -> None:
    output = output_of()
    output.feed(tokens(b"x" * 300))
    output.fail(Cancelled("gone").body())
    chunks = drain(output)
    assert read(chunks)[0].text == "x" * 300
    assert [chunk.error is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_cached_tokens_are_those_of_the_first_token() -> None:
    output = output_of()
    output.feed(tokens("a", num_cached=2))
    output.feed(tokens("b", 1, num_cached=99))
    chunk = drain(output)[-1]
    assert chunk.usage is not None
    assert chunk.usage.cached_tokens == 2
    resumed = output_of(2)
    resumed.restore([chunk])
    resumed.feed(tokens("c", 2, num_cached=50, finish_reason="length"))
    usage = drain(resumed)[-1].usage
    assert usage is not None
    assert usage.cached_tokens == 2


def test_log_that_has_lost_its_beginning_is_continued_behind_its_end() -> None:
    first = output_of()
    chunks = []
    for start, text in ((0, "abc"), (3, "def"), (6, "g")):
        first.feed(tokens(text, start))
        chunks += drain(first)
    resumed = output_of(2)
    resumed.restore(chunks[1:])
    assert resumed.num_tokens(0) == 7
    resumed.feed(tokens("abcdefgh", finish_reason="length"))
    [chunk] = drain(resumed)
    assert (chunk.choices[0].start, chunk.choices[0].text) == (7, "h")


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_output_is_the_same_however_tokens_come_and_whoever_dies(data: st.DataObject) -> None:
    spec = {
        "n": data.draw(st.integers(1, 3)),
        "stop": tuple(data.draw(st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3))),
        "include_stop": data.draw(st.booleans()),
    }
    alphabet = st.sampled_from([*"abé😀".encode(), 0xFF, END])
    generated = [tuple(data.draw(st.lists(alphabet, min_size=1, max_size=20))) for _ in range(spec["n"])]

    def feed_all(output: RequestOutput, index: int, begin: int, end: int) -> None:
        is_end = end >= len(generated[index])
        fields = {"finish_reason": "length"} if is_end else {}
        output.feed(tokens(b"", begin, index=index, **fields, token_ids=generated[index][begin:end]))

    undisturbed = output_of(**spec)
    for index in range(spec["n"]):
        feed_all(undisturbed, index, 0, 99)
    expected = read(drain(undisturbed), spec["n"])

    log: list[OutputChunk] = []
    output, epoch = output_of(**spec), 1
    for action in [*data.draw(st.lists(st.sampled_from(["feed", "take", "die", "end"]), max_size=25)), "end"]:
        if action == "die":  # what was taken is stored; what waits dies with the writer
            epoch += 1
            log.append(output.chunk().model_copy(update={"usage": None}))
            output = output_of(epoch, **spec)
            output.restore(log)
        elif action == "take":
            log += [chunk] if (chunk := output.take_chunk()) is not None else []
        else:
            for index in [data.draw(st.integers(0, spec["n"] - 1))] if action == "feed" else range(spec["n"]):
                begin = data.draw(st.integers(0, output.num_tokens(index)))
                end = begin + data.draw(st.integers(0, 8)) if action == "feed" else 99
                feed_all(output, index, begin, end)
        if log and log[-1].final:
            break
    log += drain(output)
    assert read(log, spec["n"]) == expected
    assert log[-1].usage is not None
    assert log[-1].usage.completion_tokens == sum(len(choice.token_ids) for choice in expected)
