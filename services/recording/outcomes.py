"""What became of each request of a recording: read out of the messages at the two ends of the path. Pure.

Only the request, its work item and its output count here; what happened in between is the business of `explanation`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from schemas.control import Cancel
from schemas.errors import Cancelled, ErrorBody
from schemas.generation import Accepted, WorkItem
from schemas.output import ChoiceDelta, OutputChunk, Usage
from services.recording.capture_file import Captured
from services.recording.message_kinds import error_of, kind_name, message_of


@dataclass(slots=True)
class ChoiceOutcome:
    """One choice as its client saw it, put together; tool calls without their ids, which follow from the request's."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    embedding: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: ChoiceDelta) -> None:
        """Take what one chunk adds; tokens that came before (a second writer after a takeover) count once."""
        known = len(self.token_ids) - delta.start
        self.token_ids.extend(delta.token_ids[max(known, 0) :])
        self.text += delta.text
        self.logprobs.extend(token.logprob for token in delta.logprobs or () if token.logprob is not None)
        self.prompt_logprobs.extend(token.logprob for token in delta.prompt if token.logprob is not None)
        self.embedding = delta.embedding or self.embedding
        for part in delta.tool_calls:
            call = self.calls.setdefault(part.index, {"name": "", "arguments": ""})
            call["name"], call["arguments"] = part.name or call["name"], call["arguments"] + part.arguments
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = delta.stop_reason if delta.stop_reason is not None else self.stop_reason


@dataclass(slots=True)
class Outcome:
    """One request from being asked to its end. Times are Unix seconds of arrival at whoever recorded.

    `asked` is the request's JSON as it was sent, for a wrong one is refused and no `GenerateRequest`. `cancelled_at` is
    the number of tokens, over all choices, that had been seen when it was first cancelled.
    """

    request_id: str
    subject: str = ""
    asked: Any = None
    asked_s: float | None = None
    work: WorkItem | None = None
    accepted: Accepted | None = None
    error: ErrorBody | None = None
    is_refused: bool = False
    is_final: bool = False
    choices: dict[int, ChoiceOutcome] = field(default_factory=dict)
    usage: Usage | None = None
    token_times: list[tuple[float, int]] = field(default_factory=list)
    ended_s: float | None = None
    cancelled_at: int | None = None
    cancelled_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Generated tokens over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices.values())

    @property
    def first_token_s(self) -> float | None:
        """When the first token came."""
        return self.token_times[0][0] if self.token_times else None

    def add_chunk(self, chunk: OutputChunk, at_s: float) -> None:
        """Take the next chunk of the request's output."""
        before = self.num_tokens
        for delta in chunk.choices:
            self.choices.setdefault(delta.index, ChoiceOutcome()).add(delta)
        if (new := self.num_tokens - before) > 0:
            self.token_times.append((at_s, new))
        if chunk.final:
            self.is_final, self.ended_s = True, at_s
            self.usage, self.error = chunk.usage, chunk.error

    def refuse(self, error: ErrorBody, at_s: float) -> None:
        """Take the coded error that came instead of an acceptance."""
        self.is_refused = self.is_final = True
        self.error, self.ended_s = error, at_s


class OutcomeReader:
    """Collects outcomes from messages in order of arrival."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._asked_by: dict[str, tuple[Captured, str | None]] = {}

    def see(self, captured: Captured) -> None:
        """Take one message."""
        match kind_name(captured):
            case "generate_request":
                self._see_request(captured)
            case "accepted":
                if (accepted := message_of(captured, Accepted)) is not None:
                    self._named(accepted.request_id, captured.subject).accepted = accepted
            case "error":
                self._see_refusal(captured)
            case "work_item":
                if (work := message_of(captured, WorkItem)) is not None:
                    self._of(work.request_id).work = work
            case "output_chunk":
                if (chunk := message_of(captured, OutputChunk)) is not None:
                    self._of(chunk.request_id).add_chunk(chunk, captured.arrived_s)
            case "cancel":
                if (cancel := message_of(captured, Cancel)) is not None:
                    self._see_cancel(cancel.request_id, captured.arrived_s)

    def in_order(self) -> list[Outcome]:
        """Return every request that was asked or has ended, in order of being asked."""
        known = [outcome for outcome in self.outcomes.values() if outcome.asked_s is not None or outcome.is_final]
        return sorted(known, key=lambda outcome: outcome.asked_s or outcome.ended_s or 0.0)

    def _of(self, request_id: str) -> Outcome:
        return self.outcomes.setdefault(request_id, Outcome(request_id))

    def _see_request(self, captured: Captured) -> None:
        """A request without an id gets one from its acceptance; one that is asked again was asked at first."""
        given = captured.body.get("request_id") if isinstance(captured.body, dict) else None
        request_id = given if isinstance(given, str) and given else None
        if captured.reply is not None:
            self._asked_by[captured.reply] = (captured, request_id)
        if request_id is not None:
            self._ask(self._of(request_id), captured)

    def _ask(self, outcome: Outcome, captured: Captured) -> None:
        if outcome.asked_s is None:
            outcome.subject, outcome.asked, outcome.asked_s = captured.subject, captured.body, captured.arrived_s

    def _named(self, request_id: str, inbox: str) -> Outcome:
        outcome = self._of(request_id)
        asked = self._asked_by.pop(inbox, None)
        if asked is not None:
            self._ask(outcome, asked[0])
        return outcome

    def _see_refusal(self, captured: Captured) -> None:
        asked, error = self._asked_by.pop(captured.subject, None), error_of(captured)
        if asked is None or error is None:
            return
        request, request_id = asked
        outcome = self._of(request_id or f"unnamed-{len(self.outcomes) + 1}")
        self._ask(outcome, request)
        if outcome.accepted is None and not outcome.is_final:
            outcome.refuse(error, captured.arrived_s)

    def _see_cancel(self, request_id: str, at_s: float) -> None:
        """Take the first cancellation; one heard after the end that it caused came before it all the same."""
        outcome = self._of(request_id)
        is_over = outcome.is_final and (outcome.error is None or outcome.error.code != Cancelled.code)
        if outcome.cancelled_at is None and not is_over:
            outcome.cancelled_at, outcome.cancelled_s = outcome.num_tokens, at_s


def read_outcomes(messages: Iterable[Captured]) -> list[Outcome]:
    """Return the outcomes of a whole recording."""
    reader = OutcomeReader()
    for captured in messages:
        reader.see(captured)
    return reader.in_order()
