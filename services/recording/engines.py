"""Which engines stand behind a recording or a deployment: only the same ones promise the same tokens. Pure."""

from collections.abc import Iterable

from schemas.control import Registration
from services.recording.capture_file import Capture, Captured
from services.recording.message_kinds import kind_name, message_of


def engines_in(messages: Iterable[Captured]) -> frozenset[str]:
    """Return the engines that executors have registered."""
    registered = (c for c in messages if kind_name(c) == Registration.SCHEMA)
    return engines_of(r for captured in registered if (r := message_of(captured, Registration)) is not None)


def engines_of(registrations: Iterable[Registration]) -> frozenset[str]:
    """Return the engines of those that are executors and have loaded one."""
    return frozenset(r.capacity.engine for r in registrations if r.capacity is not None)


def recorded_engines(capture: Capture) -> frozenset[str]:
    """Return the engines of a recording; empty when it does not tell."""
    return frozenset(capture.header.engines) or engines_in(capture.messages())


def are_same(ours: frozenset[str], other: frozenset[str]) -> bool:
    """Tell whether tokens are to be equal: what is not known counts as the same."""
    return not ours or not other or ours == other
