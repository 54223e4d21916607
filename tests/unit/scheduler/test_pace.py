"""Prompt chunks settle where steps keep the target, whatever the engine's speed, and come back after a slow moment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.pace import Pace

BLOCK_SIZE = 16
MOST = 512


def duration_s(num_tokens: int, decode_s: float, token_s: float) -> float:
    return decode_s + num_tokens * token_s


@given(st.floats(0.0, 0.09), st.floats(1e-5, 5e-3))
def test_chunks_settle_at_the_target(decode_s: float, token_s: float) -> None:
    pace = Pace(0.1, BLOCK_SIZE, MOST)
    for _ in range(200):
        chunk = pace.max_prompt_tokens
        pace.learn(chunk, duration_s(chunk, decode_s, token_s))
    assert duration_s(chunk, decode_s, token_s) <= 0.1 * 1.01 or chunk == BLOCK_SIZE
    next_larger = chunk + 2 * BLOCK_SIZE
    assert duration_s(next_larger, decode_s, token_s) > 0.1 or next_larger > MOST


def test_one_slow_step_is_made_up_for() -> None:
    pace = Pace(0.1, BLOCK_SIZE, MOST)
    pace.learn(MOST, 5.0)
    assert pace.max_prompt_tokens == BLOCK_SIZE
    for _ in range(8):
        pace.learn(pace.max_prompt_tokens, pace.max_prompt_tokens * 1e-4)
    assert pace.max_prompt_tokens == MOST


def test_the_short_end_of_a_prompt_says_nothing_against_long_chunks() -> None:
    pace = Pace(0.1, BLOCK_SIZE, MOST)
    pace.learn(3, 0.05)
    assert pace.max_prompt_tokens == MOST


@pytest.mark.parametrize(("num_tokens", "took_s"), [(0, 9.0), (64, 0.0)])
def test_steps_without_prompts_or_times_teach_nothing(num_tokens: int, took_s: float) -> None:
    pace = Pace(0.1, BLOCK_SIZE, MOST)
    pace.learn(num_tokens, took_s)
    assert pace.max_prompt_tokens == MOST


def test_a_budget_below_a_block_still_lets_prompts_get_on() -> None:
    assert Pace(0.1, BLOCK_SIZE, 3).max_prompt_tokens == BLOCK_SIZE
