"""Dashboards, rules and collector: consistent on paper, and run for real where containers can be started."""

import asyncio
import importlib.util
import re
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import httpx
import pytest
import yaml

from services.runtime.metric_catalogue import METRICS
from tests.compose.conftest import ROOT, Compose, free_port, run

CONFIGS = ROOT / "configs"
PROMETHEUS = "prom/prometheus:v2.53.3"
OTELCOL = "otel/opentelemetry-collector:0.152.0"
CORE = ("gateway", "tokenizer", "scheduler", "cache_manager", "executor")
NUM_REQUESTS = 60
SEEN_TIMEOUT_S = 60.0


def load_boards() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_dashboards", CONFIGS / "grafana" / "make_dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


BOARDS = load_boards()


def rules() -> list[dict[str, Any]]:
    files = [yaml.safe_load((CONFIGS / "prometheus" / name).read_text()) for name in ("rules.yml", "alerts.yml")]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def all_expressions() -> list[str]:
    return [e for board in BOARDS.BOARDS for e in BOARDS.expressions(board)] + [rule["expr"] for rule in rules()]


# ---- on paper


def test_the_dashboards_are_what_their_script_writes() -> None:
    for board in BOARDS.BOARDS:
        assert (CONFIGS / "grafana" / "dashboards" / f"{board.uid}.json").read_text() == BOARDS.rendered(board)


def test_expressions_ask_only_for_metrics_that_exist() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for expression in all_expressions():
        for level, metric in re.findall(r"(\w+:)?\bnatterjack_(\w+(?::\w+)?)", expression):
            if level:
                assert f"{level}natterjack_{metric}" in recorded, expression
            else:
                assert metric in METRICS or re.sub(r"_(bucket|sum|count)$", "", metric) in METRICS, expression


def test_every_alert_says_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len(alerts) >= 10
    for alert in alerts:
        assert alert["labels"]["severity"] in {"critical", "warning"}
        assert len(alert["annotations"]["runbook"]) > 80
        assert alert["annotations"]["summary"]


# ---- for real


def has_image(image: str) -> bool:
    return bool(run(["docker", "image", "ls", "-q", image], check=False).strip())


@pytest.fixture(scope="session")
def images(engine: None) -> None:
    for image in (PROMETHEUS, OTELCOL):
        if not has_image(image) and not run(["docker", "pull", "-q", image], check=False, timeout_s=300):
            pytest.skip(f"the image {image} cannot be had here")


@pytest.mark.parametrize("arguments", [("check", "config", "prometheus.yml"), ("test", "rules", "alerts.test.yml")])
def test_promtool_has_nothing_to_say_against_the_rules(images: None, arguments: tuple[str, ...]) -> None:
    mount = f"{CONFIGS / 'prometheus'}:/etc/prometheus:ro"
    command = ["docker", "run", "--rm", "-v", mount, "-w", "/etc/prometheus", "--entrypoint", "/bin/promtool"]
    run([*command, PROMETHEUS, *arguments])


@pytest.fixture(scope="session")
def observed(images: None, start_project: Callable[..., Compose]) -> Compose:
    """The deployment with an echo engine, its collector and its Prometheus, after some traffic."""
    project = start_project(
        *CORE,
        "otelcol",
        "prometheus",
        NJ_CONFIG="./configs/echo.yaml",
        NJ_OTLP_ENDPOINT="http://otelcol:4318",
        NJ_PROMETHEUS_PORT=str(free_port()),
    )
    asyncio.run(traffic(project.http_url))
    return project


async def traffic(url: str) -> None:
    """Requests of every kind: whole, streamed, refused, left early; for long enough that rates can be taken."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for _ in range(4):
            await asyncio.gather(*(one(client, number) for number in range(NUM_REQUESTS // 4)))
            await asyncio.sleep(5)


async def one(client: httpx.AsyncClient, number: int) -> None:
    body: dict[str, Any] = {"model": "smol", "prompt": "word " * (number + 1), "max_tokens": 30, "ignore_eos": True}
    if number % 5 == 4:
        body |= {"max_tokens": 3000, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                return
    if number % 5 == 3:
        body["prompt"] = "x" * 9000
    await client.post("/v1/completions", json=body)


def ask(project: Compose, expression: str) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{project.variable('NJ_PROMETHEUS_PORT')}/api/v1/query"
    answer = httpx.get(url, params={"query": expression.replace("$__rate_interval", "1m")}).json()
    assert answer["status"] == "success", (expression, answer)
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


def wait_for(project: Compose, expression: str) -> list[dict[str, Any]]:
    deadline = time.monotonic() + SEEN_TIMEOUT_S
    while not (found := ask(project, expression)):
        assert time.monotonic() < deadline, f"nothing for {expression}"
        time.sleep(0.5)
    return found


def test_every_instance_is_scraped(observed: Compose) -> None:
    wait_for(observed, 'count(up{job="natterjack"} == 1) == 5')
    assert {s["metric"]["service"] for s in ask(observed, 'up{job="natterjack"}')} == set(CORE)


def test_every_panel_shows_something(observed: Compose) -> None:
    expressions = [e for board in BOARDS.BOARDS for e in BOARDS.expressions(board)]
    assert len(expressions) > 60
    wait_for(observed, expressions[0])
    empty = [expression for expression in expressions if not ask(observed, expression)]
    assert empty == []


def test_every_rule_is_evaluated_without_error(observed: Compose) -> None:
    url = f"http://127.0.0.1:{observed.variable('NJ_PROMETHEUS_PORT')}/api/v1/rules"
    groups = httpx.get(url).json()["data"]["groups"]
    evaluated = [rule for group in groups for rule in group["rules"]]
    assert len(evaluated) == len(rules())
    assert [rule for rule in evaluated if rule["health"] != "ok"] == []
    for rule in rules():
        if "record" in rule:
            wait_for(observed, rule["record"])
    assert ask(observed, 'ALERTS{alertstate="firing"}') == []


def test_spans_pass_the_collector(observed: Compose) -> None:
    name = '{__name__=~"otelcol_receiver_accepted_spans(_total)?"}'
    found = wait_for(observed, f"sum({name}) > {NUM_REQUESTS}")
    assert float(found[0]["value"][1]) > NUM_REQUESTS
