"""How many of many requests are traced."""

import pytest

from services.console.trace_share import SMALLEST, TraceShare


@pytest.mark.parametrize(("rate", "share"), [(0, 1), (20, 1), (25, 1), (26, 0.5), (150, 0.125), (1e9, SMALLEST)])
def test_a_share_keeps_traces_near_the_limit(rate, share):
    assert TraceShare(20).adapt(rate) == share


def test_a_wavering_rate_does_not_change_the_share():
    share = TraceShare(20)
    share.adapt(60)
    assert {share.adapt(rate) for rate in (60, 80, 99, 45, 33, 70)} == {0.25}
    assert share.adapt(31) == 0.5
    assert share.adapt(5) == 1
