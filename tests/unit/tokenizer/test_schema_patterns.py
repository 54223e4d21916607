"""ECMA-262's regular expressions as the grammar engine reads them."""

import pytest
from llguidance import LLMatcher

from services.tokenizer.schema_patterns import FORMAT_PATTERNS, PatternRefused, engine_pattern
from tests.unit.tokenizer.grammars import accepts


def matches(pattern: str, text: str) -> bool:
    return accepts(LLMatcher.grammar_from_regex(engine_pattern(pattern)), text)


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (".", "a", "\r"),
        (".", "😀", "\u2028"),
        ("[.]", ".", "a"),
        (r"\.", ".", "a"),
        ("[[a]", "[", "]"),
        ("[[:alpha:]]", "a]", "a"),
        ("[a&&b]", "&", "c"),
        ("[~-]", "~", "a"),
        ("[^[]", "a", "["),
        (r"[\]\\]", "]", "a"),
        (r"a\<b\>", "a<b>", "ab"),
        (r"\p{Lu}+", "AB", "a"),
        (r"\p{Script=Greek}", "α", "a"),
        (r"\u{1F600}", "😀", "u"),
        (r"\u00e9\x41", "éA", "eA"),
        ("(?<year>[0-9])", "1", "a"),
        ("(?:a|b)", "a", "c"),
        ("a{2}b{1,}c*?", "aab", "ab"),
        ("", "", "a"),
    ],
)
def test_patterns_mean_what_they_mean_in_ecma_script(pattern: str, right: str, wrong: str) -> None:
    assert matches(pattern, right)
    assert not matches(pattern, wrong)


@pytest.mark.parametrize(
    "pattern",
    [
        "(?i)a",
        "(?P<n>a)",
        "(?x: a)",
        "a*+",
        "a++",
        "a{2}*",
        "a???",
        "[]",
        "[^]",
        "[a",
        "a\\",
        r"\A",
        r"\z",
        r"\Q",
        "[a--b]",
    ],
)
def test_what_only_one_notation_knows_is_refused(pattern: str) -> None:
    with pytest.raises(PatternRefused):
        engine_pattern(pattern)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("date", "2024-02-29", "2023-02-29"),
        ("date", "2000-02-29", "1900-02-29"),
        ("date", "0001-01-01", "0000-01-01"),
        ("date", "0004-02-29", "0000-02-29"),
        ("date", "2024-12-31", "2024-11-31"),
        ("time", "23:59:59Z", "23:59:60Z"),
        ("time", "00:00:00.5+01:30", "24:00:00Z"),
        ("time", "12:00:00-23:59", "12:00:00"),
        ("date-time", "2024-02-29T12:00:00Z", "2023-02-29T12:00:00Z"),
        ("date-time", "2024-02-28T12:00:00Z", "2024-02-28 12:00:00Z"),
    ],
)
def test_dates_and_times_exist(name: str, right: str, wrong: str) -> None:
    pattern = FORMAT_PATTERNS[name].removeprefix("^").removesuffix("$")
    assert matches(pattern, right)
    assert not matches(pattern, wrong)
