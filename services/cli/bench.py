"""`natterjack bench`: how fast a deployment, or any server with OpenAI's HTTP, answers under a chosen load."""

import math
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from services.cli import bench_options as options
from services.cli.options import ConfigFile, Overrides, Temperature, load_pipeline

if TYPE_CHECKING:
    from services.bench.goodput import Objective
    from services.cli.bench_run import BenchPlan

BACKENDS = {"completions": "openai", "chat": "openai-chat"}
"""Endpoint → what `vllm bench serve` calls it."""
EXIT_USAGE = 2


def bench(
    url: options.Url = None,
    engine: options.Engine = None,
    transport: options.TransportName = "http",
    endpoint: options.EndpointName = "completions",
    model: options.ModelName = None,
    headers: options.Headers = None,
    num_prompts: options.NumPrompts = 100,
    request_rate: options.RequestRate = math.inf,
    burstiness: options.Burstiness = 1.0,
    max_concurrency: options.MaxConcurrency = 0,
    num_warmups: options.NumWarmups = 4,
    ignore_eos: options.IgnoreEos = True,
    temperature: Temperature = 0.0,
    seed: options.LoadSeed = 0,
    timeout_s: options.TimeoutS = 600.0,
    nice: options.Nice = 0,
    dataset: options.DatasetName = "words",
    dataset_file: options.DatasetFile = None,
    input_len: options.InputLen = 90,
    output_len: options.OutputLen = 64,
    range_ratio: options.RangeRatio = 0.0,
    prefix_len: options.PrefixLen = 256,
    num_prefixes: options.NumPrefixes = 1,
    vocab_size: options.VocabSize = 127,
    goodput: options.Goodput = None,
    json_file: options.JsonFile = None,
    detailed: options.Detailed = False,
    label: options.Label = "",
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Measure latency and throughput under a load.

    Without --url and --engine the running deployment that the configuration names is measured. Exit 1 when every
    request failed.
    """
    from services.bench.client import RequestOptions
    from services.bench.prompts import DatasetChoice
    from services.bench.report import Setting
    from services.cli.bench_run import BenchPlan
    from services.cli.bench_target import TargetChoice, deployment_overrides

    chosen = (*(overrides or ()), *deployment_overrides(engine, overrides or ()))
    settings = load_pipeline(config, chosen).settings
    asked = model or ("" if url is not None else settings.model.name)
    choice = DatasetChoice(
        dataset=dataset,
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        range_ratio=range_ratio,
        prefix_len=prefix_len,
        num_prefixes=num_prefixes,
        vocab_size=vocab_size,
        file=dataset_file,
        seed=seed,
    )
    setting = Setting(
        backend="natterjack-nats" if transport == "nats" else BACKENDS[endpoint],
        model=asked,
        num_prompts=num_prompts,
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        label=label,
        date=datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        dataset=dataset,
        num_warmups=num_warmups,
        seed=seed,
        objectives=_parsed_objectives(goodput or []),
    )
    plan = BenchPlan(
        target=TargetChoice(settings, config, chosen, url, engine is not None, transport),
        choice=choice,
        setting=setting,
        options=RequestOptions(asked, ignore_eos, temperature, keep_text=detailed),
        endpoint=endpoint,
        headers=_parsed_headers(headers or []),
        timeout_s=timeout_s,
        nice=nice,
        json_file=json_file,
    )
    _check(plan)
    _run(plan)


def _run(plan: "BenchPlan") -> None:
    from services.cli.bench_run import BenchRun
    from services.cli.foreground import run

    running = BenchRun(plan)
    raise typer.Exit(run(running.measure(), running.kill))


def _check(plan: "BenchPlan") -> None:
    """Exit with the problem, before anything is started."""
    from services.bench.arrivals import arrival_times
    from services.bench.prompts import DatasetError, make_prompts

    try:
        make_prompts(plan.choice)
        arrival_times(1, plan.setting.request_rate, plan.setting.burstiness, 0)
    except (DatasetError, ValueError) as error:
        raise _usage_error(str(error)) from None
    if plan.target.url is not None and (plan.target.is_own or plan.target.transport == "nats"):
        raise _usage_error("--url names a server that runs, over HTTP: leave out --engine and --transport nats.")
    if plan.json_file is not None and plan.json_file != "-" and not Path(plan.json_file).absolute().parent.is_dir():
        raise _usage_error(f"--json {plan.json_file}: there is no such directory.")


def _parsed_objectives(texts: list[str]) -> "tuple[Objective, ...]":
    from services.bench.goodput import parse_objectives

    try:
        return parse_objectives(texts)
    except ValueError as error:
        raise _usage_error(str(error)) from None


def _parsed_headers(texts: list[str]) -> dict[str, str]:
    headers = {}
    for text in texts:
        name, colon, value = text.partition(":")
        if not colon or not name.strip() or "\n" in text or "\r" in text:
            raise _usage_error(f"--header {text!r}: write NAME:VALUE.")
        headers[name.strip()] = value.strip()
    return headers


def _usage_error(text: str) -> typer.Exit:
    typer.echo(f"Error: {text}", err=True)
    return typer.Exit(EXIT_USAGE)
