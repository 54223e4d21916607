"""What an executor made of each sequence: read out of plans and results, and compared token by token. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from schemas.step import NewSequence, SampledToken, StepPlan, StepResult
from services.recording.comparison import Comparison, Difference, Rules, around, embeddings_apart

Place = tuple[str, int, int]
"""Executor, epoch, sequence."""


@dataclass(slots=True)
class SequenceOutcome:
    """One sequence's tokens by position, as far as results tell."""

    begun: NewSequence
    sampled: dict[int, SampledToken] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The request it belongs to."""
        return self.begun.request_id

    def tokens(self, positions: list[int]) -> list[int]:
        """Return the tokens at some positions, -1 where there is none."""
        return [self.sampled[position].token if position in self.sampled else -1 for position in positions]


class SequenceReader:
    """Collects the sequences of executors from their plans and results, in order of arrival."""

    def __init__(self) -> None:
        self.sequences: dict[Place, SequenceOutcome] = {}

    def see_plan(self, executor: str, plan: StepPlan) -> None:
        """Note the sequences that begin with a plan; one that is sent again is the same."""
        for begun in plan.new:
            self.sequences.setdefault((executor, plan.epoch, begun.sequence), SequenceOutcome(begun))

    def see_result(self, executor: str, result: StepResult) -> None:
        """Note a step's tokens."""
        for token in result.sampled:
            sequence = self.sequences.get((executor, result.epoch, token.sequence))
            if sequence is None:
                continue
            for one in _each(token):
                sequence.sampled.setdefault(one.position, one)


def _each(token: SampledToken) -> Iterator[SampledToken]:
    """A token and those that it forced, as if each had been sampled; the end belongs to the last one."""
    if not token.forced:
        yield token
        return
    first = {"forced": (), "finish_reason": None, "stop_token": False}
    yield token.model_copy(update=first)
    for position, forced in enumerate(token.forced, token.position + 1):
        is_last = position == token.position + len(token.forced)
        end = {"finish_reason": token.finish_reason, "stop_token": token.stop_token} if is_last else {}
        yield SampledToken(sequence=token.sequence, position=position, token=forced, **end)


def compare_sequences(
    expected: dict[Place, SequenceOutcome], found: dict[Place, SequenceOutcome], rules: Rules
) -> Comparison:
    """Compare every sequence that `found` holds; what comes after the first difference follows from it."""
    result = Comparison(unit="sequences", rules=rules)
    for place, sequence in expected.items():
        other = found.get(place)
        if other is None or not sequence.sampled:
            continue
        result.num_compared += 1
        result.num_tokens += len(sequence.sampled)
        if (difference := _first_difference(sequence, other, rules)) is not None:
            result.differences.append(difference)
    return result


def _first_difference(ours: SequenceOutcome, other: SequenceOutcome, rules: Rules) -> Difference | None:
    prompt_len, index = ours.begun.prompt_len, ours.begun.index
    for position, mine in sorted(ours.sampled.items()):
        theirs, number = other.sampled.get(position), position - prompt_len
        if theirs is None or theirs.token != mine.token:
            positions = [p for p in sorted(ours.sampled) if p >= position - 12]
            shown = (around(ours.tokens(positions), 0), around(other.tokens(positions), 0))
            return Difference(ours.name, "tokens", *shown, index, number)
        if theirs.finish_reason != mine.finish_reason or theirs.stop_token != mine.stop_token:
            return Difference(ours.name, "finish_reason", mine.finish_reason, theirs.finish_reason, index, number)
        if theirs.embedding != mine.embedding:
            return embeddings_apart(ours.name, index, mine.embedding, theirs.embedding)
        if (apart := _logprobs_apart(mine, theirs, rules.logprob)) is not None:
            return Difference(ours.name, "logprob", *apart, index, number)
    return None


def _logprobs_apart(ours: SampledToken, other: SampledToken, tolerance: float) -> tuple[float, float] | None:
    """Return the first logprobs that are too far apart, the prompt's included."""
    mine, theirs = [*ours.prompt_logprobs], [*other.prompt_logprobs]
    if ours.logprob is not None and other.logprob is not None:
        mine.append(ours.logprob)
        theirs.append(other.logprob)
    for a, b in zip(mine, theirs, strict=False):
        if abs(a.logprob - b.logprob) > tolerance:
            return a.logprob, b.logprob
    return None
