"""One message in words, as far as it concerns one request: who sent it to whom, and what it decides. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from services.recording.capture_file import Captured
from services.recording.message_kinds import kind_name
from services.recording.request_tracker import RequestTracker, executor_of

MAX_TEXT = 60
Told = tuple[str, bool]
"""Words, and whether they are one of many alike."""


@dataclass(slots=True)
class Teller:
    """What has been told so far of one request; where something comes a second time, that is the news."""

    request_id: str
    placed: set[tuple[str, int, int]] = field(default_factory=set)
    writer_epoch: int | None = None
    num_preemptions: int = 0
    num_takeovers: int = 0
    num_cached: int = 0


def route(captured: Captured, tracker: RequestTracker) -> str:
    """Return `from → to`."""
    body, last = captured.body, captured.subject.rpartition(".")[2]
    match kind_name(captured):
        case "generate_request":
            return "client → tokenizer"
        case "accepted":
            return "tokenizer → client"
        case "error":
            return "tokenizer → client" if ".generate." in (captured.answers or "") else "cache_manager → scheduler"
        case "work_item":
            return f"{body.get('tokenizer', 'tokenizer')} → work queue"
        case "cache_command":
            return f"{body.get('scheduler')} → cache_manager"
        case "cache_reply":
            return f"cache_manager → {tracker.question_of(captured).get('scheduler', 'scheduler')}"
        case "step_plan":
            return f"{body.get('scheduler')} → {executor_of(captured.subject)}"
        case "step_result":
            return f"{body.get('executor') or executor_of(captured.subject)} → scheduler"
        case "token_batch":
            return f"{body.get('scheduler')} → {last}"
        case "output_feedback":
            return f"{body.get('tokenizer')} → {last}"
        case "output_chunk":
            return "tokenizer → output log"
        case "cancel":
            return "client → scheduler"
        case "stored_response":
            return "gateway → response log"
        case "handed_back":
            return f"{body.get('scheduler')} → work queue"
        case "dead_letter":
            return f"{body.get('scheduler')} → dead letters"
    return captured.subject


def describe(captured: Captured, tracker: RequestTracker, teller: Teller) -> Iterator[Told]:
    """Yield what the message says of the teller's request."""
    tell = TELLERS.get(kind_name(captured))
    if tell is None:
        yield "a message of a kind that this version does not know", False
    else:
        yield from tell(captured, tracker, teller)


def _request(captured: Captured, tracker: RequestTracker, teller: Teller) -> Iterator[Told]:
    body = captured.body
    prompt = body.get("prompt")
    what = f"{len(body.get('messages') or ())} chat messages" if prompt is None else _shown(prompt)
    hidden = {"model", "request_id", "prompt", "messages", "deliver"}
    options = ", ".join(f"{key}={value}" for key, value in body.items() if key not in hidden)
    yield f"asks model {body.get('model')!r} to go on from {what}" + (f" ({options})" if options else ""), False


def _accepted(captured: Captured, tracker: RequestTracker, teller: Teller) -> Iterator[Told]:
    yield f"accepted: stored, with {captured.body.get('num_prompt_tokens')} prompt tokens", False


def _error(captured: Captured, tracker: RequestTracker, teller: Teller) -> Iterator[Told]:
    error = captured.body.get("error", {})
    yield f"refused: {error.get('code')}: {error.get('message')}", False


def _work(captured: Captured, tracker: RequestTracker, teller: Teller) -> Iterator[Told]:
    body, sampling = captured.body, captured.body.get("sampling", {})
    temperature, seed = sampling.get("temperature", 1.0), sampling.get("seed", 0)
    how = "greedy" if temperature == 0 else f"temperature {temperature}, seed {seed}"
    number = len(body.get("prompt_token_ids", ()))
    yield (
        f"queued with priority {body.get('priority', 'normal')}: {number} prompt tokens, "
        f"{body.get('n', 1)} × up to {body.get('max_tokens')} tokens, {how}",
        False,
    )


def _cache_command(captured: Captured, tracker: RequestTracker, teller: Teller) -> Iterator[Told]:
    body = captured.body
    for operation in body.get("operations", ()):
        if not _is_ours(tracker, teller, body.get("executor"), body, operation.get("sequence")):
            continue
        match operation.get("op"):
            case "acquire":
                yield f"acquire blocks for {operation.get('num_tokens')} tokens on {body.get('executor')}", False
            case "extend":
                yield f"extend the lease to {operation.get('num_tokens')} tokens", False
            case "release":
                yield "release the blocks", False


def _cache_reply(captured: Captured, tracker: RequestTracker, teller: Teller) -> Iterator[Told]:
    question, body = tracker.question_of(captured), captured.body
    for grant in body.get("grants", ()):
        if not _is_ours(tracker, teller, question.get("executor"), question, grant.get("sequence")):
            continue
        room = f"{body.get('num_free', 0)} of {body.get('num_blocks', 0)} blocks are free"
        if not grant.get("granted", True):
            yield f"NOT granted: too few blocks ({room})", False
            continue
        cached = grant.get("num_cached", 0)
        teller.num_cached = max(teller.num_cached, cached)
        known = f", {cached} tokens are in them already" if cached else ""
        if loaded := grant.get("num_loaded", 0):
            known += f", {loaded} of these once they are loaded from host memory"
        yield f"granted {len(grant.get('blocks', ()))} blocks{known} ({room})", False


def _plan(captured: Captured, tracker: RequestTracker, teller: Teller) -> Iterator[Told]:
    body, executor = captured.body, executor_of(captured.subject)
    epoch, step = body.get("epoch", 0), f"step {body.get('step')} of epoch {body.get('epoch')}"
    for new in body.get("new", ()):
        if new.get("request_id") == teller.request_id:
            yield f"{step}: begins choice {new.get('index', 0)}" + _again(teller, executor, epoch, new), False
    for run in body.get("run", ()):
        if _is_ours(tracker, teller, executor, body, run.get("sequence")):
            number = run.get("num_tokens", 1)
            yield f"{step}: run {number} tokens in a batch of {len(body.get('run', ()))}", number == 1
    for number in body.get("drop", ()):
        if _is_ours(tracker, teller, executor, body, number):
            yield f"{step}: drop sequence {number}", False


def _again(teller: Teller, executor: str, epoch: int, new: dict[str, Any]) -> str:
    """Say why a choice begins once more: its blocks were taken, or an epoch ended under it."""
    index = new.get("index", 0)
    before = {(place, at) for place, at, choice in teller.placed if choice == index}
    teller.placed.add((executor, epoch, index))
    known = len(new.get("token_ids", ())) - new.get("prompt_len", 0)
    cached = f", {new['num_computed']} tokens from cache" if new.get("num_computed") else ""
    if not before:
        return f" on {executor} ({new.get('prompt_len')} prompt tokens{cached})"
    if (executor, epoch) in before:
        teller.num_preemptions += 1
        return f" again after a PREEMPTION, {known} tokens known{cached}"
    teller.num_takeovers += 1
    return f" again after a TAKEOVER (new epoch), {known} tokens known{cached}"


def _result(captured: Captured, tracker: RequestTracker, teller: Teller) -> Iterator[Told]:
    body, executor = captured.body, executor_of(captured.subject)
    for token in body.get("sampled", ()):
        if not _is_ours(tracker, teller, executor, body, token.get("sequence")):
            continue
        reason = token.get("finish_reason")
        took = f"step {body.get('step')}, {1000 * body.get('duration_s', 0.0):.2f} ms"
        forced = f" and {len(token['forced'])} that it forces" if token.get("forced") else ""
        end = f", which ends it: {reason}" if reason else ""
        yield f"{took}: token {token.get('token')} at position {token.get('position')}{forced}{end}", reason is None


def _batch(captured: Captured, tracker: RequestTracker, teller: Teller) -> Iterator[Told]:
    ours = teller.request_id
    for opened in captured.body.get("opened", ()):
        if opened.get("spec", {}).get("request_id") == ours:
            again = ", going on where the log ends" if opened.get("resume") else ""
            yield f"open the output, writer's epoch {opened.get('epoch')}{again}", False
    for tokens in captured.body.get("tokens", ()):
        if tokens.get("request_id") == ours:
            reason = tokens.get("finish_reason")
            end = f", finished: {reason}" if reason else ""
            start, number = tokens.get("start", 0), len(tokens.get("token_ids", ()))
            is_first = start == 0
            yield f"{number} tokens of choice {tokens.get('index', 0)} from {start}{end}", not (reason or is_first)
    for failed in captured.body.get("failed", ()):
        if failed.get("request_id") == ours:
            yield f"failed: {failed.get('error', {}).get('code')}", False


def _feedback(captured: Captured, tracker: RequestTracker, teller: Teller) -> Iterator[Told]:
    meanings = {
        "stopped": "a stop string ended choice {index} after {num_tokens} tokens",
        "stored": "the final chunk is stored: the work item is done",
        "lost": "LOST: misses tokens from {num_tokens} on and wants the output opened again",
        "fenced": "FENCED: the log has a writer of a higher epoch",
    }
    for item in captured.body.get("items", ()):
        if item.get("request_id") == teller.request_id:
            words = meanings.get(item.get("event"), "{event}")
            yield words.format(**{"index": 0, "num_tokens": 0, **item}), False


def _chunk(captured: Captured, tracker: RequestTracker, teller: Teller) -> Iterator[Told]:
    body, parts = captured.body, []
    epoch, before = body.get("epoch"), teller.writer_epoch
    teller.writer_epoch = epoch
    if before is not None and epoch != before:
        parts.append(f"NEW WRITER, epoch {epoch}")
    ends = False
    for delta in body.get("choices", ()):
        reason = delta.get("finish_reason")
        ends |= reason is not None
        end = f" [{reason}{': ' + repr(delta['stop_reason']) if delta.get('stop_reason') is not None else ''}]"
        text = (
            f"choice {delta.get('index', 0)}: {len(delta.get('token_ids', ()))} tokens {_shown(delta.get('text', ''))}"
        )
        parts.append(text + (end if reason else ""))
    if body.get("final"):
        error, usage = body.get("error"), body.get("usage") or {}
        counts = f"{usage.get('prompt_tokens', 0)} + {usage.get('completion_tokens', 0)} tokens"
        parts.append(f"FINAL, {error.get('code')}: {error.get('message')}" if error else f"FINAL, {counts}")
    is_news = ends or bool(body.get("final")) or before is None or epoch != before
    yield "; ".join(parts), not is_news


def _cancel(captured: Captured, tracker: RequestTracker, teller: Teller) -> Iterator[Told]:
    yield f"cancel: {captured.body.get('reason', 'cancelled by the client')}", False


def _stored_response(captured: Captured, tracker: RequestTracker, teller: Teller) -> Iterator[Told]:
    kept = "is not to be found any more" if captured.body.get("deleted") else "is kept, for requests that go on from it"
    yield f"what this response was asked with {kept}", False


def _handed_back(captured: Captured, tracker: RequestTracker, teller: Teller) -> Iterator[Told]:
    yield "given back to the queue on purpose, for another scheduler", False


def _dead_letter(captured: Captured, tracker: RequestTracker, teller: Teller) -> Iterator[Told]:
    body = captured.body
    yield f"GIVEN UP after {body.get('num_delivered')} attempts: {body.get('reason')}", False


def _is_ours(tracker: RequestTracker, teller: Teller, executor: Any, body: dict[str, Any], sequence: Any) -> bool:
    return tracker.request_at(str(executor), body.get("epoch", 0), sequence) == teller.request_id


def _shown(value: Any) -> str:
    if not isinstance(value, str):
        return f"{len(value)} token ids" if isinstance(value, list) else "nothing"
    return repr(value if len(value) <= MAX_TEXT else value[: MAX_TEXT - 1] + "…")


TELLERS: dict[str, Callable[[Captured, RequestTracker, Teller], Iterator[Told]]] = {
    "generate_request": _request,
    "accepted": _accepted,
    "error": _error,
    "work_item": _work,
    "cache_command": _cache_command,
    "cache_reply": _cache_reply,
    "step_plan": _plan,
    "step_result": _result,
    "token_batch": _batch,
    "output_feedback": _feedback,
    "output_chunk": _chunk,
    "cancel": _cancel,
    "stored_response": _stored_response,
    "handed_back": _handed_back,
    "dead_letter": _dead_letter,
}
