"""Schemathesis over the gateway's OpenAPI document, and garbage on every subject of NATS: nothing breaks or hangs.

Requests are made from the document, right ones and wrong ones. Whatever is sent, the answer has a documented status, a
documented content type and the documented shape, and never is a 5xx of our own making.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.integration.conftest import ECHO, Deployment, start_deployment

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
CALL_TIMEOUT_S = 60.0
FEW, MANY = 150, 3800
"""Examples in all, spread over the operations."""
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
LIMITS = ("model.max_model_len=128", "gateway.max_body_bytes=200000")


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = start_deployment(tmp_path_factory.mktemp("fuzzed"), *ECHO, *LIMITS)
    yield deployment
    assert deployment.stop() in (0, 130), deployment.log()


def fuzz(http_url: str, num_examples: int) -> int:
    """Call every operation with generated requests; returns how many calls there were, raises all that was wrong."""
    document = schemathesis.openapi.from_url(f"{http_url}/openapi.json")
    operations = [result.ok() for result in document.get_all_operations()]
    num_each = num_examples // (len(MODES) * len(operations)) + 1
    calls: list[schemathesis.Case] = []
    wrong: list[Exception] = []
    for operation, mode in itertools.product(operations, MODES):
        try:
            examine(operation.as_strategy(generation_mode=mode), num_each, calls)
        except Unsatisfiable:
            continue  # there is nothing in such a request that could be wrong
        except Exception as error:  # the other operations are examined all the same
            wrong.append(error)
    if wrong:
        raise ExceptionGroup("answers that are not documented", wrong)
    return len(calls)


def examine(cases: Any, num_examples: int, calls: list[schemathesis.Case]) -> None:
    """Send so many of an operation's requests, and check the answers."""

    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def send(case: schemathesis.Case) -> None:
        calls.append(case)
        case.validate_response(case.call(timeout=CALL_TIMEOUT_S), checks=CHECKS)

    send()


def check_alive(deployment: Deployment) -> None:
    with httpx.Client(base_url=deployment.http_url, timeout=CALL_TIMEOUT_S) as http:
        assert http.get("/health").status_code == http.get("/ready").status_code == 200
        assert (
            http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3}).json()["choices"][0]["text"] == "abc"
        )


def test_requests_made_from_the_document_get_documented_answers(echo: Deployment) -> None:
    assert fuzz(echo.http_url, FEW) >= FEW // 2
    check_alive(echo)


@pytest.mark.slow
def test_two_thousand_requests_made_from_the_document_get_documented_answers(echo: Deployment) -> None:
    num_calls = fuzz(echo.http_url, MANY)
    print(f"{num_calls} calls")
    assert num_calls >= 2000
    check_alive(echo)
