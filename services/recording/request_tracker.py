"""Which requests a message concerns: steps name sequences and replies name nothing, so both are remembered. Pure."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from services.recording.capture_file import Captured
from services.recording.message_kinds import kind_name

MAX_REMEMBERED = 100_000
"""Sequences and replies of so long ago are no longer told apart; far more than run at a time."""

Place = tuple[str, int, int]
"""Executor, epoch, sequence."""


class RequestTracker:
    """Follows a recording from its beginning."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[Place, str] = OrderedDict()
        self._replies: OrderedDict[str, tuple[dict[str, Any], tuple[str, ...]]] = OrderedDict()

    def requests_of(self, captured: Captured) -> tuple[str, ...]:
        """Return the ids of the requests that the message concerns, each once; none for a deployment's own affairs."""
        if not isinstance(captured.body, dict):
            return ()
        found = tuple(dict.fromkeys(name for name in self._find(captured) if isinstance(name, str) and name))
        if captured.reply and kind_name(captured) in ("generate_request", "cache_command"):
            _remember(self._replies, captured.reply, (captured.body, found))
        return found

    def request_at(self, executor: str, epoch: int, sequence: int) -> str | None:
        """Return the request that a sequence of an executor's epoch belongs to."""
        return self._sequences.get((executor, epoch, sequence))

    def question_of(self, captured: Captured) -> dict[str, Any]:
        """Return the body of the request that a reply answers; empty when that was not seen."""
        return self._replies.get(captured.subject, ({}, ()))[0]

    def _find(self, captured: Captured) -> Iterable[Any]:
        body = captured.body
        match kind_name(captured):
            case "cache_command":
                return self._of_cache(body)
            case "step_plan":
                executor = executor_of(captured.subject)
                for new in body.get("new", ()):
                    self._note(executor, body, new.get("sequence"), new.get("request_id"))
                numbers = [*body.get("drop", ()), *(run.get("sequence") for run in body.get("run", ()))]
                return self._named(executor, body, numbers)
            case "step_result":
                executor = executor_of(captured.subject)
                return self._named(executor, body, [token.get("sequence") for token in body.get("sampled", ())])
            case "token_batch":
                opened = [item.get("spec", {}).get("request_id") for item in body.get("opened", ())]
                rest = [*body.get("tokens", ()), *body.get("failed", ())]
                return opened + [item.get("request_id") for item in rest]
            case "handed_back":
                return [*body.get("request_ids", ())]
            case "output_feedback":
                return [item.get("request_id") for item in body.get("items", ())]
            case "cache_reply" | "error":
                return self._replies.get(captured.subject, ({}, ()))[1]
            case _:
                return (body.get("request_id"),)

    def _of_cache(self, body: dict[str, Any]) -> list[str]:
        executor, operations = str(body.get("executor")), body.get("operations", ())
        for operation in operations:
            if operation.get("op") == "acquire":
                self._note(executor, body, operation.get("sequence"), operation.get("request_id"))
        return self._named(executor, body, [operation.get("sequence") for operation in operations])

    def _note(self, executor: str, body: dict[str, Any], sequence: Any, request_id: Any) -> None:
        _remember(self._sequences, (executor, body.get("epoch", 0), sequence), request_id)

    def _named(self, executor: str, body: dict[str, Any], sequences: Iterable[Any]) -> list[str]:
        epoch = body.get("epoch", 0)
        return [
            self._sequences[executor, epoch, number]
            for number in sequences
            if (executor, epoch, number) in self._sequences
        ]


def executor_of(subject: str) -> str:
    """Return the executor's token in `….exec.<executor>.plan` or `.result`."""
    return subject.split(".")[-2]


def _remember(memory: "OrderedDict[Any, Any]", key: Any, value: Any) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > MAX_REMEMBERED:
        memory.popitem(last=False)
