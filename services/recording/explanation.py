"""The story of one request, told from the messages of a recording: when, who to whom, and what was decided. Pure.

`narrate` keeps the order of arrival; what a message says of other requests is left out. The words for each kind of
message are in `narration`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.recording.capture_file import Captured
from services.recording.message_kinds import kind_name
from services.recording.narration import Teller, describe, route
from services.recording.request_tracker import RequestTracker


@dataclass(frozen=True, slots=True)
class Event:
    """One message of the request. `is_steady`: one of many like it, a decoding step without news."""

    at_s: float
    schema: str
    route: str
    text: str
    is_steady: bool = False


@dataclass(slots=True)
class Story:
    """Everything about one request, and what stands out."""

    request_id: str
    events: list[Event] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)
    num_preemptions: int = 0
    num_takeovers: int = 0
    num_cached: int = 0


def narrate(messages: Iterable[Captured], request_id: str) -> Story:
    """Return the story of a request; without events when the recording does not know it."""
    tracker, teller, story = RequestTracker(), Teller(request_id), Story(request_id)
    for captured in messages:
        if request_id not in tracker.requests_of(captured):
            continue
        for text, is_steady in describe(captured, tracker, teller):
            schema = captured.schema or "?"
            story.events.append(Event(captured.arrived_s, schema, route(captured, tracker), text, is_steady))
        trace = captured.trace.split("-")[1] if captured.trace and captured.trace.count("-") == 3 else None
        is_own = kind_name(captured) in ("generate_request", "work_item")
        if trace is not None and is_own and trace not in story.traces:
            story.traces.append(trace)
    story.num_preemptions, story.num_takeovers = teller.num_preemptions, teller.num_takeovers
    story.num_cached = teller.num_cached
    return story


def as_text(story: Story, *, is_brief: bool) -> str:
    """Return the story for a terminal; briefly, with steady decoding steps drawn together."""
    if not story.events:
        return f"Nothing of {story.request_id} is known here."
    start_s = story.events[0].at_s
    width = max(len(event.route) for event in story.events)
    lines = [f"Request {story.request_id}" + (f", trace {', '.join(story.traces)}" if story.traces else "")]
    num_steady = 0
    for event in story.events:
        if is_brief and event.is_steady:
            num_steady += 1
            continue
        lines += _gathered(num_steady)
        num_steady = 0
        at = f"{event.at_s - start_s:+10.4f} s"
        lines.append(f"{at}  {event.schema:20} {event.route:{width}}  {event.text}")
    return "\n".join([*lines, *_gathered(num_steady), _closing(story)])


def _gathered(num_steady: int) -> list[str]:
    return [f"{'':12}  … {num_steady} messages of steady decoding"] if num_steady else []


def _closing(story: Story) -> str:
    took_s = story.events[-1].at_s - story.events[0].at_s
    facts = [f"{len(story.events)} messages in {took_s:.3f} s", f"{story.num_cached} prompt tokens from cache"]
    facts.append(f"{story.num_preemptions} preemptions, {story.num_takeovers} takeovers")
    return "; ".join(facts) + "."
