"""What open pages are sent: everything at first, then every second what is new. Knows neither HTTP nor the bus."""

import asyncio
from collections.abc import AsyncIterator, Callable

import orjson

from services.console.overview import History, Overview
from services.console.trace_ring import Trace, TraceRing
from services.console.waterfall import request_line

SHOWN_REQUESTS = 100
"""Rows of the page's list; older requests are found by their id."""


class Live:
    """One deployment's news for any number of pages; each gets every second's news, or everything if it fell behind."""

    def __init__(self, traces: TraceRing, history: History) -> None:
        self._traces = traces
        self._history = history
        self._overview: Overview | None = None
        self._trace_share = 1.0
        self._num_pages = 0
        self._second = 0
        self._tick = b""
        self._ticked = asyncio.Event()

    def tick(self, overview: Overview, trace_share: float = 1.0) -> None:
        """Publish a second; `trace_share` is the part of all requests whose traces come."""
        self._history.add(overview.point)
        self._overview, self._trace_share = overview, trace_share
        self._second += 1
        changed = self._traces.take_changed(SHOWN_REQUESTS)
        if self._num_pages:
            self._tick = _event("tick", {**self._head(overview), "requests": _lines(changed)})
        ticked, self._ticked = self._ticked, asyncio.Event()
        ticked.set()

    async def events(self, is_over: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Yield server-sent events until `is_over`."""
        seen = 0
        self._num_pages += 1
        try:
            while not is_over():
                ticked, second, overview = self._ticked, self._second, self._overview
                if overview is None or second == seen:
                    await ticked.wait()
                    continue
                event = self._tick if seen and second == seen + 1 else self._everything(overview)
                seen = second
                yield event
        finally:
            self._num_pages -= 1

    def _everything(self, overview: Overview) -> bytes:
        points = [point.model_dump() for point in self._history.points]
        requests = _lines(list(self._traces.newest(SHOWN_REQUESTS)))
        return _event("hello", {**self._head(overview), "history": points, "requests": requests})

    def _head(self, overview: Overview) -> dict[str, object]:
        return {
            "overview": overview.model_dump(),
            "requests_held": len(self._traces),
            "spans_dropped": self._traces.num_dropped,
            "trace_share": self._trace_share,
        }


def _lines(traces: list[Trace]) -> list[dict[str, object]]:
    return [request_line(trace).as_json() for trace in traces]


def _event(name: str, data: dict[str, object]) -> bytes:
    """JSON has no line ends, so one `data:` line holds it."""
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"
