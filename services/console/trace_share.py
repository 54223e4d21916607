"""Which part of the requests is traced for the console, so that its cost is bounded however many pass. Pure.

Up to `max_per_s` requests a second all are. Beyond, every second, fourth, eighth … one: the console tells its share in
its heartbeat, and every instance chooses by the trace's id, so that all choose the same. Steps by factors of two, with
some slack, keep a wavering rate from changing the choice, which would tear the traces of that moment apart.
"""

SMALLEST = 2.0**-16
SLACK = 1.25


class TraceShare:
    """The share for now: 1 or a negative power of two."""

    def __init__(self, max_per_s: float) -> None:
        self._max_per_s = max_per_s
        self.value = 1.0

    def adapt(self, requests_per_s: float) -> float:
        """Return the share for this rate of requests."""
        while self.value > SMALLEST and requests_per_s * self.value > self._max_per_s * SLACK:
            self.value /= 2
        while self.value < 1 and requests_per_s * self.value * 2 <= self._max_per_s / SLACK:
            self.value *= 2
        return self.value
