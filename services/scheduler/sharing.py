"""How schedulers share the executors: each leases its part, and one without any leaves the work to others. Pure.

Whoever leases an executor keeps it; a share only limits what is taken anew. A scheduler that has lost its executors to
others (it was stopped, or cut off) also holds requests that the queue has given to them.
"""

from collections.abc import Iterable

from schemas.control import Registration


def may_take_one(num_held: int, num_executors: int, num_others: int) -> bool:
    """Tell whether a scheduler that drives `num_held` executors should take one more, beside other schedulers."""
    return num_held < -(-num_executors // (num_others + 1))


def is_standing_by(num_held: int, others: Iterable[Registration]) -> bool:
    """Tell whether this scheduler drives nothing while another one does: then it takes no work, and keeps none."""
    return num_held == 0 and any(other.load.get("num_executors", 0) > 0 for other in others)
