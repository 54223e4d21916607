"""What a recording keeps: kinds of messages, and single requests. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from services.recording.capture_file import Captured
from services.recording.message_kinds import ERROR_SCHEMA, KINDS, kind_name
from services.recording.request_tracker import RequestTracker

REQUEST = "request="


class FilterError(Exception):
    """A filter that means nothing; the message lists what there is."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Filters:
    """Kinds and request ids to keep; an empty set keeps all."""

    kinds: frozenset[str] = frozenset()
    requests: frozenset[str] = frozenset()

    def wants(self, kind: str) -> bool:
        """Tell whether messages of this kind are kept."""
        return not self.kinds or kind in self.kinds

    def keeps(self, captured: Captured, tracker: RequestTracker) -> bool:
        """Tell whether a message is kept; `tracker` must see every message, kept or not."""
        if self.requests and not self.requests.intersection(tracker.requests_of(captured)):
            return False
        return self.wants(kind_name(captured))


def parse_filters(texts: Iterable[str]) -> Filters:
    """Return the filters written as `KIND` or `request=ID`, several in one text separated by commas."""
    kinds: set[str] = set()
    requests: set[str] = set()
    for text in (part.strip() for given in texts for part in given.split(",")):
        if text.startswith(REQUEST) and text != REQUEST:
            requests.add(text.removeprefix(REQUEST))
        elif text in KINDS or text == ERROR_SCHEMA:
            kinds.add(text)
        else:
            known = ", ".join([*KINDS, ERROR_SCHEMA])
            raise FilterError(f"Unknown filter {text!r}: write request=ID, or a kind of message: {known}.")
    return Filters(frozenset(kinds), frozenset(requests))
