"""Restart pauses grow, are bounded, and run out."""

from services.supervisor.backoff import Backoff
from services.supervisor.settings import RestartSettings

SETTINGS = RestartSettings(initial_s=1, max_s=5, limit=5, window_s=100)


def test_pauses_double_up_to_the_longest():
    backoff = Backoff(SETTINGS)
    assert [backoff.next_pause_s(float(now)) for now in range(5)] == [1, 2, 4, 5, 5]


def test_more_restarts_than_the_limit_within_the_window_are_refused():
    backoff = Backoff(SETTINGS)
    for now in range(5):
        backoff.next_pause_s(float(now))
    assert backoff.next_pause_s(6.0) is None
    assert backoff.num_recent == 5


def test_restarts_outside_the_window_are_forgotten():
    backoff = Backoff(SETTINGS)
    for now in range(5):
        backoff.next_pause_s(float(now))
    assert backoff.next_pause_s(200.0) == 1


def test_a_limit_of_none_allows_no_restart():
    assert Backoff(RestartSettings(limit=0)).next_pause_s(0.0) is None
