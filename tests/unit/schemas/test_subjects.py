"""Names are injective and legal, whatever models and requests are called."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.subjects import Subjects, is_prefix, raw_of, subject_token

anything = st.text() | st.text(alphabet=st.characters())
tricky = st.text(alphabet="aA.=*> /2DE-_é\ud800?", max_size=6)


@given(anything | tricky, anything | tricky)
def test_two_names_never_share_a_token(one: str, other: str) -> None:
    assert (subject_token(one) == subject_token(other)) == (one == other)


@given(anything | tricky)
def test_token_is_one_legal_subject_and_key_token(raw: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_=-]+", subject_token(raw))


@given(st.text())
def test_name_can_be_read_back_from_its_token(raw: str) -> None:
    assert raw_of(subject_token(raw)) == raw


def test_plain_names_stay_readable() -> None:
    assert subject_token("SmolLM2-135M_q4") == "SmolLM2-135M_q4"
    assert subject_token("org/model.v1") == "org=2Fmodel=2Ev1"


@given(tricky, tricky)
def test_wildcards_cover_their_subjects_only(model: str, request: str) -> None:
    subjects = Subjects("nj")
    assert subjects.work(model, "low").startswith(subjects.work_of(model).removesuffix("*"))
    assert len(subjects.live(request).split(".")) == 4


@pytest.mark.parametrize("prefix", ["nj", "a", "team-1_x", "a" * 32])
def test_prefix_is_accepted(prefix: str) -> None:
    assert is_prefix(prefix)


@pytest.mark.parametrize("prefix", ["", "1a", "Nj", "a.b", "a*", "a b", "a" * 33, "é", "nj\n"])
def test_prefix_is_refused(prefix: str) -> None:
    assert not is_prefix(prefix)
