"""When each request of a benchmark is sent. Pure.

The gaps are gamma distributed with mean 1/rate: shape 1 is a Poisson process, below 1 bursts, above 1 ever more even.
"""

import math
import random


def arrival_times(num_requests: int, rate_per_s: float, burstiness: float, seed: int) -> list[float]:
    """Return seconds after the start, rising; all 0 for an infinite rate.

    The times are scaled so that the last request comes at exactly num_requests / rate: runs with other seeds then offer
    the same load. Raises ValueError for a rate or a burstiness that is not positive.
    """
    if not rate_per_s > 0 or not burstiness > 0:
        raise ValueError("The request rate and the burstiness must be positive.")
    if math.isinf(rate_per_s) or num_requests == 0:
        return [0.0] * num_requests
    if math.isinf(burstiness):
        return [(number + 1) / rate_per_s for number in range(num_requests)]
    rng = random.Random(seed)  # noqa: S311 (to be drawn again, not to be secret)
    times, now = [], 0.0
    for _ in range(num_requests):
        now += rng.gammavariate(burstiness, 1.0)
        times.append(now)
    scale = num_requests / rate_per_s / now if now > 0 else 0.0
    return [time * scale for time in times]
