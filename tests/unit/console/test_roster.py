"""How instances are shown, by what was heard of them."""

import pytest

from services.console.roster import Roster
from tests.unit.console.console_traffic import registration


def shown(roster, now_s):
    return {
        member.registration.instance: (member.is_ready, member.health, member.state) for member in roster.members(now_s)
    }


@pytest.fixture
def roster():
    roster = Roster()
    roster.heard(registration(), "executor-0", 0.0)
    return roster


def test_who_beats_and_is_ready_is_well(roster):
    assert shown(roster, 1.0) == {"executor-0": (True, "ok", "ready")}


def test_silence_is_bad_within_seconds_and_remembered_for_a_minute(roster):
    assert shown(roster, 2.9)["executor-0"][1] == "ok"
    assert shown(roster, 3.5)["executor-0"] == (False, "bad", "silent for 4 s")
    assert shown(roster, 30.0)["executor-0"] == (False, "bad", "gone for 30 s")
    assert shown(roster, 71.0) == {}


def test_a_death_is_told_while_it_restarts_and_a_moment_longer(roster):
    roster.heard(registration(state="starting", stage="loading", progress=0.5, incarnation="b"), "executor-0", 1.5)
    assert shown(roster, 1.6)["executor-0"] == (False, "bad", "died, loading 50%")
    roster.heard(registration(incarnation="b"), "executor-0", 2.0)
    assert shown(roster, 2.0)["executor-0"] == (True, "bad", "died, ready again")
    roster.heard(registration(incarnation="b"), "executor-0", 6.0)
    assert shown(roster, 6.0)["executor-0"] == (True, "ok", "ready, died 4 s ago")
    roster.heard(registration(incarnation="b"), "executor-0", 90.0)
    assert shown(roster, 90.0)["executor-0"] == (True, "ok", "ready")


def test_a_first_start_and_a_restart_in_order_are_no_deaths(roster):
    roster.heard(registration("gateway-0", "starting", stage="connecting"), "gateway-0", 0.0)
    assert shown(roster, 0.0)["gateway-0"] == (False, "busy", "connecting")
    roster.heard(registration(state="draining"), "executor-0", 1.0)
    assert shown(roster, 1.0)["executor-0"] == (False, "busy", "draining")
    roster.heard(registration(incarnation="b"), "executor-0", 2.0)
    assert shown(roster, 2.0)["executor-0"] == (True, "ok", "ready")


def test_a_failed_start_is_bad_and_a_leave_in_order_is_gone_at_once(roster):
    roster.heard(registration(state="failed"), "executor-0", 1.0)
    assert shown(roster, 1.0)["executor-0"] == (False, "bad", "failed")
    roster.heard(None, "executor-0", 1.5)
    assert shown(roster, 1.5) == {}
