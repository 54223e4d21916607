"""Stop strings against a reference that sees the whole text at once."""

import time
from itertools import combinations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.tokenizer.stop_strings import StopStrings

short = st.text(alphabet="abc", min_size=1, max_size=5)
stop_lists = st.lists(short, min_size=0, max_size=6).map(tuple)


def whole(text: str, stops: tuple[str, ...], include_stop: bool) -> tuple[str, str | None]:
    """The stop that is complete first ends the text; of those complete at the same place, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


def in_pieces(pieces: list[str], stops: tuple[str, ...], include_stop: bool) -> tuple[list[str], str | None]:
    """The deltas of `pieces`, the last of them what comes at the end, and the stop that matched."""
    matcher = StopStrings(stops).matcher()
    deltas = [matcher.feed(piece, include_stop=include_stop) for piece in pieces]
    return [*deltas, matcher.flush()], matcher.matched


def split(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]


@settings(max_examples=500, deadline=None)
@given(
    text=st.text(alphabet="abcd", max_size=24),
    stops=stop_lists,
    cuts=st.lists(st.integers(0, 24), max_size=8),
    include_stop=st.booleans(),
)
@example(text="acd", stops=("ab", "cd"), cuts=[], include_stop=False)
@example(text="aab", stops=("ab",), cuts=[1, 2], include_stop=True)
@example(text="abcabd", stops=("abd",), cuts=[4], include_stop=False)
def test_any_split_gives_what_the_whole_text_gives(
    text: str, stops: tuple[str, ...], cuts: list[int], include_stop: bool
) -> None:
    deltas, matched = in_pieces(split(text, cuts), stops, include_stop)
    assert ("".join(deltas), matched) == whole(text, stops, include_stop)


def test_every_split_of_one_text_across_pieces_finds_the_stop() -> None:
    text, stops = "alpha beta gam", ("beta g", "a g", "zzz")
    for count in range(4):
        for cuts in combinations(range(len(text)), count):
            deltas, matched = in_pieces(split(text, list(cuts)), stops, False)
            assert ("".join(deltas), matched) == ("alpha ", "beta g")


@settings(max_examples=400, deadline=None)
@given(text=st.text(alphabet="abcd", max_size=16), stops=stop_lists)
def test_exactly_what_may_still_become_a_stop_is_held_back(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopStrings(stops).matcher()
    shown = ""
    for number, character in enumerate(text, start=1):
        shown += matcher.feed(character, include_stop=False)
        if matcher.matched is not None:
            return
        seen = text[:number]
        held = seen[len(shown) :]
        candidates = [length for length in range(len(seen) + 1) if any(s.startswith(seen[-length:]) for s in stops)]
        expected = max((length for length in candidates if length), default=0)
        assert held == seen[len(seen) - expected :]


def test_first_delta_comes_with_the_first_piece() -> None:
    matcher = StopStrings(("ZZZZZZZZZZ",)).matcher()
    assert matcher.feed("ordinary", include_stop=False) == "ordinary"


def test_nothing_comes_after_a_match() -> None:
    matcher = StopStrings(("stop",)).matcher()
    assert matcher.feed("a stop and more", include_stop=True) == "a stop"
    assert (matcher.feed("more", include_stop=True), matcher.flush()) == ("", "")


def test_stops_of_any_script_are_found() -> None:
    deltas, matched = in_pieces(list("日本語😀e\u0301の"), ("😀e\u0301",), False)
    assert ("".join(deltas), matched) == ("日本語", "😀e\u0301")


def test_cost_does_not_grow_with_the_number_of_stops() -> None:
    def seconds(num_stops: int) -> float:
        stops = StopStrings(tuple(f"stop number {number:04d}" for number in range(num_stops)))
        best = float("inf")
        for _ in range(5):
            matcher, begin = stops.matcher(), time.perf_counter()
            for _ in range(2_000):
                matcher.feed(" stop number", include_stop=False)
            best = min(best, time.perf_counter() - begin)
        return best

    assert seconds(2_000) < 4 * seconds(1)


def test_worst_case_text_costs_a_constant_per_character() -> None:
    matcher = StopStrings(tuple("a" * length + "b" for length in range(1, 1024, 16))).matcher()
    begin = time.perf_counter()
    for _ in range(3_000):
        matcher.feed("aaaa", include_stop=False)
    assert time.perf_counter() - begin < 2.0
