"""Who takes which executors, and who leaves the work to others."""

import pytest

from schemas.control import Registration
from services.scheduler.sharing import is_standing_by, may_take_one


@pytest.mark.parametrize(
    ("num_executors", "num_others", "share"), [(1, 0, 1), (4, 0, 4), (4, 1, 2), (3, 1, 2), (1, 3, 1), (0, 2, 0)]
)
def test_share_is_the_fair_one_rounded_up(num_executors: int, num_others: int, share: int) -> None:
    assert [n for n in range(6) if may_take_one(n, num_executors, num_others)] == list(range(share))


def test_only_a_scheduler_without_executors_beside_one_that_has_some_stands_by() -> None:
    def other(num_executors: float) -> Registration:
        return Registration(
            instance="scheduler-1",
            incarnation="a",
            role="scheduler",
            model="smol",
            state="ready",
            load={"num_executors": num_executors},
        )

    assert not is_standing_by(0, [])
    assert not is_standing_by(0, [other(0)])
    assert is_standing_by(0, [other(0), other(1)])
    assert not is_standing_by(1, [other(1)])
