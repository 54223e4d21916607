"""The load generator keeps its times and its limit, and a failure is a record, never an exception."""

import asyncio

import pytest

from services.bench.client import RequestFailed
from services.bench.load import Load, Progress, run_load
from services.bench.prompts import Prompt


class SlowClient:
    """Answers after a pause; knows how many it had at once."""

    def __init__(self, pause_s=0.01):
        self.pause_s = pause_s
        self.now = self.peak = 0

    async def run(self, prompt, record):
        self.now += 1
        self.peak = max(self.peak, self.now)
        await asyncio.sleep(self.pause_s)
        self.now -= 1
        if prompt.content == "bad":
            raise RequestFailed("refused")
        record.num_output_tokens = 2


def load(contents, **options):
    return Load([Prompt(content, 2) for content in contents], [0.0] * len(contents), **options)


@pytest.mark.parametrize(("limit", "peak"), [(3, 3), (0, 8)])
async def test_no_more_than_the_limit_are_under_way(limit, peak):
    client = SlowClient()
    outcome = await run_load(client, load(["x"] * 8, max_concurrency=limit))
    assert client.peak == peak
    assert all(record.is_success for record in outcome.records)


async def test_failures_and_timeouts_are_noted_with_their_reason_and_counted():
    progress = Progress()
    outcome = await run_load(SlowClient(), load(["x", "bad"]), progress)
    assert [record.error for record in outcome.records] == ["", "refused"]
    assert (progress.num_started, progress.num_ended, progress.num_failed, progress.num_output_tokens) == (2, 2, 1, 2)
    late = await run_load(SlowClient(pause_s=5.0), load(["x"], timeout_s=0.02))
    assert late.records[0].error == "no end after 0.02 s"


async def test_requests_are_sent_at_their_times_and_waiting_here_is_told_apart():
    prompts = [Prompt("x", 2)] * 3
    outcome = await run_load(SlowClient(0.05), Load(prompts, [0.0, 0.01, 0.02], max_concurrency=1))
    starts = [record.started_s - outcome.records[0].due_s for record in outcome.records]
    assert starts[1] >= 0.05
    assert outcome.records[2].queue_s >= 0.07
