"""`natterjack bench` against a running deployment, over both doors, and what it says when there is none."""

import json

import pytest

from tests.integration.command_line import ECHO, CommandLine

STEP_S = 0.002
SMALL = ("bench", "-n", "12", "--max-concurrency", "4", "--num-warmups", "1", "--output-len", "20")


@pytest.fixture(scope="module")
def command_line(tmp_path_factory):
    command_line = CommandLine(tmp_path_factory.mktemp("bench"))
    yield command_line
    command_line.end()


@pytest.fixture(scope="module")
def deployment(command_line):
    """One running deployment, which a measurement does not harm."""
    return command_line.up(*ECHO, "--set", f"executor.step_time_s={STEP_S}")


def test_both_doors_of_a_deployment_are_measured_and_its_processes_watched(command_line, deployment, tmp_path):
    file = tmp_path / "report.json"
    shape = ("--dataset", "random", "--input-len", "30", "--goodput", "e2el:60000", "--detailed", "--json", str(file))
    for door in ("http", "nats"):
        url = ("--url", deployment.http_url) if door == "http" else ()
        result = command_line.run(*SMALL, *shape, "--transport", door, *url, *deployment.on_this_bus)
        assert result.returncode == 0, result.stderr
        assert "time to first token" in result.stdout
        report = json.loads(file.read_text())
        assert (report["completed"], report["failed"]) == (12, 0)
        assert (report["total_input_tokens"], report["total_output_tokens"]) == (12 * 30, 12 * 20)
        assert report["max_concurrent_requests"] <= 4
        assert report["request_goodput"] == report["request_throughput"]
        assert report["median_ttft_ms"] > STEP_S * 1e3
        assert report["median_tpot_ms"] == pytest.approx(STEP_S * 1e3, rel=4)
        assert all(len(text) == 20 for text in report["generated_texts"])
        ours = report["natterjack"]
        assert {"executor-0", "gateway-0", "nats-server", "supervisor"} <= ours["service_cpu_s"].keys()
        assert ours["executors"]["executor-0"]["num_steps"] >= 12 / 4 * 20
        assert ours["client_cpu_s"] > 0


def test_a_bare_url_is_any_server_whose_first_model_is_asked(command_line, deployment):
    result = command_line.run(*SMALL, "--url", deployment.http_url, "--json", "-")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["model_id"], report["completed"]) == ("smol", 12)
    assert report["natterjack"]["service_cpu_s"] == {}


def test_failures_are_counted_by_reason_and_end_in_a_failure(command_line, deployment):
    options = ("--num-warmups", "0", "--model", "other", "--json", "-")
    result = command_line.run(*SMALL, *options, "--url", deployment.http_url)
    assert result.returncode == 1
    assert json.loads(result.stdout)["natterjack"]["failures"] == {"HTTP 404: model_not_found": 12}


def test_without_a_deployment_it_says_what_to_do(command_line):
    result = command_line.run(*SMALL, "--set", "bus.url=nats://127.0.0.1:9")
    assert result.returncode == 1
    assert "natterjack up" in result.stderr
    assert "--engine" in result.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        ("--goodput", "itl:5"),
        ("--dataset", "file"),
        ("--request-rate", "0"),
        ("--header", "x"),
        ("--json", "/nowhere/at/all.json"),
        ("--url", "http://127.0.0.1:9", "--engine", "echo"),
    ],
)
def test_a_wrong_option_ends_with_code_2_before_anything_is_started(command_line, wrong):
    result = command_line.run("bench", *wrong)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ")
