"""Builds requests, sequences and executor states for tests of the scheduler, and stands in for its partners."""

from typing import Any

from schemas.cache import CacheCommand, CacheReply, Operation
from schemas.control import ExecutorCapacity
from schemas.generation import OutputSpec, WorkItem
from schemas.sampling import SamplingParams
from schemas.step import SampledToken, StepPlan, StepResult
from services.cache_manager.pools import Pools
from services.scheduler.executor_state import ExecutorState
from services.scheduler.planner import Limits
from services.scheduler.requests import DurableChoice, Request, Sequence, new_request

BLOCK_SIZE = 4


def work(request_id: str = "r", *, prompt_len: int = 5, max_tokens: int = 8, **changes: Any) -> WorkItem:
    """A work item whose prompt is 1, 2, 3, …"""
    n = changes.get("n", 1)
    values: dict[str, Any] = {
        "request_id": request_id,
        "model": "smol",
        "created_s": 0.0,
        "prompt_token_ids": tuple(range(1, prompt_len + 1)),
        "max_tokens": max_tokens,
        "sampling": SamplingParams(temperature=0.0),
        "tokenizer": "tokenizer-0",
        "output": OutputSpec(request_id=request_id, model="smol", created_s=0.0, num_prompt_tokens=prompt_len, n=n),
    }
    return WorkItem.model_validate(values | changes)


def request(
    request_id: str = "r", *, durable: tuple[DurableChoice, ...] = (), epoch: int = 1, **changes: Any
) -> Request:
    """A request with its sequences."""
    return new_request(work(request_id, **changes), None, now_s=0.0, durable=durable, epoch=epoch)


def sequence(request_id: str = "r", **changes: Any) -> Sequence:
    """The only sequence of a request."""
    return request(request_id, **changes).sequences[0]


def capacity(
    num_blocks: int = 64, *, block_size: int = BLOCK_SIZE, max_model_len: int = 10_000, num_host_blocks: int = 0
) -> ExecutorCapacity:
    """What an executor with an echo engine would publish."""
    return ExecutorCapacity(
        engine="echo",
        model_file="echo",
        device="none",
        kernels="none",
        vocab_size=1000,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
    )


class Driven:
    """An executor state with a real cache manager's pools, and results made up for its plans."""

    def __init__(
        self,
        *,
        depth: int = 2,
        num_blocks: int = 64,
        num_host_blocks: int = 0,
        max_num_seqs: int = 8,
        max_tokens: int = 64,
        lookahead: int = 8,
    ) -> None:
        self.pools = Pools()
        self.is_open = False
        self.num_commands = 0
        self.plans: list[StepPlan] = []
        self.state = ExecutorState(
            executor="executor-0",
            incarnation="life-1",
            epoch=7,
            capacity=capacity(num_blocks, num_host_blocks=num_host_blocks),
            limits=Limits(max_num_seqs, max_tokens, lookahead),
            depth=depth,
        )

    def ask(self) -> tuple[list[Sequence], list[Sequence]]:
        """Exchange one cache command; returns (admitted, returned), both empty when there was nothing to ask."""
        operations = self.state.cache_operations()
        if not operations and self.is_open:
            return [], []
        return self.state.apply_grants(self.answer(operations))

    def answer(self, operations: list[Operation]) -> CacheReply:
        """What the cache manager says to these operations."""
        opening: list[Operation] = [] if self.is_open else [self.state.open_pool()]
        self.is_open = True
        self.num_commands += 1
        command = CacheCommand(
            scheduler="scheduler-0",
            executor="executor-0",
            epoch=7,
            operations=tuple(opening + operations),
            num_copies=self.state.num_copies,
        )
        return self.pools.apply(command)

    def admit(self, *sequences: Sequence) -> None:
        """Let sequences run."""
        for item in sequences:
            self.state.admit(item)
        admitted, _ = self.ask()
        assert admitted == list(sequences)

    def plan(self) -> list[StepPlan]:
        """All plans that may be sent now."""
        plans = []
        while (plan := self.state.next_plan("scheduler-0", 0.0)) is not None:
            plans.append(plan)
        self.plans += plans
        return plans


def result(plan: StepPlan, *sampled: SampledToken, **changes: Any) -> StepResult:
    """The answer to a plan."""
    return StepResult(executor="executor-0", epoch=plan.epoch, step=plan.step, sampled=sampled, **changes)


def token(item: Sequence, token_id: int = 9, *, ahead: int = 0, **changes: Any) -> SampledToken:
    """The next token of a sequence, or the one `ahead` after it."""
    return SampledToken(sequence=item.number, position=len(item.tokens) + ahead, token=token_id, **changes)
