"""One run of `natterjack bench`: warm-up, the measured load, and the report."""

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import typer

from schemas.errors import Unavailable
from services.bench.arrivals import arrival_times
from services.bench.client import Client, RequestFailed, RequestOptions
from services.bench.http_client import Endpoint, HttpClient
from services.bench.load import Load, Outcome, Progress, run_load
from services.bench.nats_client import NatsClient
from services.bench.processes import lower_priority
from services.bench.progress import shown
from services.bench.prompts import DatasetChoice, make_prompts
from services.bench.report import Observed, Setting, report
from services.bench.table import table
from services.bench.watch import Watch, watching
from services.cli.bench_target import Target, TargetChoice, TargetFinder

WARM_UP_SEED = 1_000_003
"""Added to the seed: no measured prompt may be in a cache already."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure, with what, and what to say of it; `options.model` "" asks for the server's first model."""

    target: TargetChoice
    choice: DatasetChoice
    setting: Setting
    options: RequestOptions
    endpoint: Endpoint
    headers: Mapping[str, str]
    timeout_s: float
    nice: int
    json_file: str | None


class BenchRun:
    """Runs a plan once; `kill` ends at once what it started."""

    def __init__(self, plan: BenchPlan) -> None:
        self._plan = plan
        self._finder = TargetFinder(plan.target)

    async def measure(self) -> int:
        """Run and report; return the exit code, 1 when no request succeeded."""
        plan = self._plan
        async with contextlib.AsyncExitStack() as stack:
            target = await stack.enter_async_context(self._finder.open())
            lower_priority(plan.nice)
            client, model = await self._client(stack, target)
            watch = None
            if target.deployed is not None:
                watch = await stack.enter_async_context(watching(target.deployed.bus, target.deployed.registry))
            await self._warm_up(client)
            outcome, observed = await self._measured(client, watch)
        setting = replace(plan.setting, model=model)
        self._say(report(setting, outcome, observed, is_detailed=plan.options.keep_text))
        return 0 if any(record.is_success for record in outcome.records) else 1

    def kill(self) -> None:
        """Kill what was started for the run."""
        self._finder.kill()

    async def _client(self, stack: contextlib.AsyncExitStack, target: Target) -> tuple[Client, str]:
        plan, options = self._plan, self._plan.options
        if plan.target.transport == "nats" and target.deployed is not None:
            accept_timeout_s = plan.target.settings.gateway.accept_timeout_s
            return NatsClient(target.deployed.bus, options, accept_timeout_s), options.model
        url = target.http_url or ""
        if not options.model:
            options = replace(options, model=await _first_model(url, plan))
        client = HttpClient(url, options, plan.endpoint, plan.headers)
        stack.callback(client.close)
        return client, options.model

    async def _warm_up(self, client: Client) -> None:
        """Send other prompts of the same kind; what fails is told, and the run goes on."""
        num_warmups, choice = self._plan.setting.num_warmups, self._plan.choice
        if not num_warmups:
            return
        dataset = "words" if choice.dataset == "file" else choice.dataset
        seed = choice.seed + WARM_UP_SEED
        prompts = make_prompts(replace(choice, dataset=dataset, num_prompts=num_warmups, seed=seed))
        load = Load(prompts, [0.0] * len(prompts), self._plan.setting.max_concurrency, self._plan.timeout_s)
        progress = Progress()
        async with shown(progress, "warm-up"):
            outcome = await run_load(client, load, progress)
        if errors := {record.error for record in outcome.records if record.error}:
            typer.echo(f"warm-up: {'; '.join(sorted(errors))}", err=True)

    async def _measured(self, client: Client, watch: Watch | None) -> tuple[Outcome, Observed]:
        setting, choice = self._plan.setting, self._plan.choice
        prompts = make_prompts(choice)
        times_s = arrival_times(len(prompts), setting.request_rate, setting.burstiness, choice.seed)
        load = Load(prompts, times_s, setting.max_concurrency, self._plan.timeout_s)
        progress = Progress()
        async with shown(progress, "bench"):
            if watch is None:
                return await run_load(client, load, progress), Observed()
            watch.begin()
            outcome = await run_load(client, load, progress)
            watch.end()
        return outcome, Observed(watch.cpu_s, watch.executors(outcome.records))

    def _say(self, result: dict[str, Any]) -> None:
        json_file = self._plan.json_file
        if json_file != "-":
            typer.echo(table(result))
        if json_file is None:
            return
        text = orjson.dumps(result, option=orjson.OPT_INDENT_2) + b"\n"
        if json_file == "-":
            sys.stdout.write(text.decode())
        else:
            Path(json_file).write_bytes(text)


async def _first_model(url: str, plan: BenchPlan) -> str:
    client = HttpClient(url, plan.options, headers=plan.headers)
    try:
        return await client.first_model()
    except RequestFailed as failure:
        raise Unavailable(f"{url}: {failure}") from None
    finally:
        client.close()
