"""compose.yaml for real: built, up, asked from outside and inside, hurt in mid-stream, and gone without a trace."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import nats
import openai
import pytest
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer

from tests.compose.conftest import Compose, run

SERVICES = ("nats", "gateway", "tokenizer", "scheduler", "cache_manager", "executor", "console")
PROMPT = "The three largest cities of France are"
MAX_TOKENS = 256
KILL_AFTER_CHUNKS = 2

KILL_SERVICE_PROCESS = """
import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    parent = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]
    if parent == "1":
        os.kill(int(pid), 9)
"""
"""The child of the container's init is the service."""


@pytest.fixture
def client(compose: Compose) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{compose.http_url}/v1", api_key="none", max_retries=0, timeout=120)


def complete(client: openai.OpenAI) -> Any:
    return client.completions.create(
        model="smol", prompt=PROMPT, max_tokens=MAX_TOKENS, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )


def test_when_up_returns_requests_are_answered(compose: Compose, client: openai.OpenAI) -> None:
    assert httpx.get(f"{compose.http_url}/ready").status_code == 200
    messages: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    answer = client.chat.completions.create(model="smol", messages=messages, temperature=0, max_tokens=24)
    assert "Paris" in (answer.choices[0].message.content or "")


def test_a_nats_client_outside_is_answered(compose: Compose) -> None:
    async def ask() -> list[Any]:
        async with await nats.connect(compose.nats_url()) as client:
            inbox = client.new_inbox()
            replies = await client.subscribe(inbox)
            body = json.dumps({"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}).encode()
            await client.publish("nj.v1.generate.smol", body, reply=inbox)
            chunks = [json.loads((await replies.next_msg(timeout=30)).data)]
            while not chunks[-1].get("final"):
                chunks.append(json.loads((await replies.next_msg(timeout=30)).data))
            return chunks

    chunks = asyncio.run(ask())
    assert chunks[0]["num_prompt_tokens"] > 0
    assert chunks[-1]["usage"]["completion_tokens"] == 8


def test_a_nats_client_in_a_container_is_answered(compose: Compose) -> None:
    command = ["docker", "run", "--rm", "--network", f"{compose.project}_default", "--read-only"]
    command += ["-e", f"NATTERJACK_BUS__URL={compose.nats_url(host='nats')}", "natterjack:test"]
    done = run([*command, "generate", "The capital of France is", "--max-tokens", "8", "--temperature", "0", "--json"])
    assert "Paris" in done
    assert '"ready":true' in run([*command, "status", "--json"])


ASK_FROM_INSIDE = """
import openai
client = openai.OpenAI(base_url="http://gateway:8000/v1", api_key="none", max_retries=0, timeout=60)
options = dict(model="smol", max_tokens=8, temperature=0, stream=True)
stream = client.completions.create(prompt="The capital of France is", **options)
print("".join(chunk.choices[0].text for chunk in stream))
"""


def test_an_openai_client_in_a_container_is_answered(compose: Compose) -> None:
    """The image has Python but no client; the tests' own is lent to it."""
    testcontainers_config.ryuk_disabled = True  # the image that would clean up behind us may not be here; `with` does
    site_packages = str(Path(openai.__file__).parents[1])
    container = (
        DockerContainer("natterjack:test")
        .with_kwargs(entrypoint=["python", "-c", ASK_FROM_INSIDE], network=f"{compose.project}_default", read_only=True)
        .with_volume_mapping(site_packages, "/client", "ro")
        .with_env("PYTHONPATH", "/client")
    )
    with container as running:
        assert running.get_wrapped_container().wait(timeout=90)["StatusCode"] == 0, running.get_logs()
        assert "Paris" in running.get_logs()[0].decode()


def test_the_console_shows_everybody_ready(compose: Compose) -> None:
    with httpx.stream("GET", f"http://127.0.0.1:{compose.console_port}/console/events", timeout=30) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "event: hello"
        overview = json.loads(next(lines).removeprefix("data: "))["overview"]
    assert {view["role"] for view in overview["roles"] if view["instances"]} == set(SERVICES) - {"nats"}


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_has_no_privileges(compose: Compose, service: str) -> None:
    container = compose("ps", "-q", service).strip()
    facts = json.loads(run(["docker", "inspect", container]))[0]
    host = facts["HostConfig"]
    assert facts["Config"]["User"] == "10001:10001"
    assert (host["ReadonlyRootfs"], host["CapDrop"], host["Privileged"]) == (True, ["ALL"], False)
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert min(host["Memory"], host["PidsLimit"]) > 0
    assert facts["Config"]["StopTimeout"] >= 20
    assert facts["State"]["Health"]["Status"] == "healthy"


def test_passwords_are_in_no_image_and_no_command_line(compose: Compose) -> None:
    secrets = [compose.password(user) for user in (*SERVICES[1:], "client", "operator")]
    assert len(set(secrets)) == len(secrets)
    for service in SERVICES:
        facts = json.loads(run(["docker", "inspect", compose("ps", "-q", service).strip()]))[0]
        command_line = json.dumps([facts["Path"], facts["Args"], facts["Config"]["Cmd"]])
        assert not any(secret in command_line for secret in secrets)
    assert not any(secret in compose("logs") for secret in secrets)


def test_an_executor_that_is_killed_in_mid_stream_costs_no_token(compose: Compose, client: openai.OpenAI) -> None:
    expected = "".join(chunk.choices[0].text for chunk in complete(client))
    executor = compose("ps", "-q", "executor").strip()
    text = ""
    for num_chunks, chunk in enumerate(complete(client), 1):
        text += chunk.choices[0].text
        if num_chunks == KILL_AFTER_CHUNKS:
            compose("exec", "-T", "executor", "python", "-I", "-S", "-c", KILL_SERVICE_PROCESS, check=False)
    assert text == expected
    assert json.loads(run(["docker", "inspect", executor]))[0]["RestartCount"] == 1


def test_down_leaves_nothing(compose: Compose) -> None:
    """Last: the deployment is gone afterwards."""
    assert all(compose.left().values())
    compose.down()
    assert compose.left() == {"containers": [], "volumes": [], "networks": []}
