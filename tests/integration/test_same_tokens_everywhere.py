"""The same request gives the same tokens alone, among others, over HTTP, over NATS and on the command line."""

import asyncio
import json
import subprocess
import uuid
from typing import Any

import httpx
import nats

from tests.integration.conftest import NATTERJACK, Deployment

PROMPTS = [
    "The capital of France is",
    "Once upon a time, a small toad",
    "def fibonacci(n):",
    "The three laws of motion are",
    "In 1969, the first humans",
    "Water boils at",
    "To be or not to be,",
    "List of prime numbers: 2, 3, 5,",
]
MAX_TOKENS = 16


async def over_nats(deployment: Deployment, prompt: str, **options: Any) -> list[int]:
    """A bare NATS client in ten lines: one request, several replies."""
    client = await nats.connect(deployment.nats_url)
    inbox = client.new_inbox()
    replies = await client.subscribe(inbox)
    body = json.dumps({"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, **options})
    await client.publish(f"{deployment.prefix}.v1.generate.smol", body.encode(), reply=inbox)
    tokens: list[int] = []
    while True:
        message = await replies.next_msg(timeout=60)
        reply = json.loads(message.data)
        if "error" in reply:
            raise AssertionError(reply)
        tokens += [token for choice in reply.get("choices", []) for token in choice.get("token_ids", [])]
        if reply.get("final"):
            await client.close()
            return tokens


async def over_http(deployment: Deployment, prompt: str) -> list[int]:
    body = {
        "model": "smol",
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }
    async with httpx.AsyncClient(timeout=60) as client:
        response = await client.post(f"{deployment.http_url}/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return list(response.json()["choices"][0]["token_ids"])


def over_command_line(deployment: Deployment, prompt: str) -> list[int]:
    command = [*NATTERJACK, "generate", prompt, "--max-tokens", str(MAX_TOKENS), "--temperature", "0", "--json"]
    result = subprocess.run([*command, *deployment.settings()], capture_output=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr.decode()
    return list(json.loads(result.stdout)["token_ids"])


async def test_alone_in_a_batch_over_http_nats_and_the_command_line(deployment: Deployment) -> None:
    alone = [await over_nats(deployment, prompt) for prompt in PROMPTS[:3]]
    together = await asyncio.gather(*(over_nats(deployment, prompt) for prompt in PROMPTS))
    http = await asyncio.gather(*(over_http(deployment, prompt) for prompt in PROMPTS))
    assert together[:3] == alone
    assert http == together
    assert await asyncio.to_thread(over_command_line, deployment, PROMPTS[0]) == alone[0]


async def test_a_seed_gives_the_same_sample_alone_and_under_load(deployment: Deployment) -> None:
    options = {"temperature": 1.0, "seed": 42}
    alone = await over_nats(deployment, PROMPTS[1], **options)
    among_others = await asyncio.gather(*(over_nats(deployment, prompt, **options) for prompt in PROMPTS[1:5]))
    assert among_others[0] == alone
    assert await over_nats(deployment, PROMPTS[1], temperature=1.0, seed=43) != alone


async def test_an_unknown_model_is_404_over_http_and_a_coded_error_over_nats(deployment: Deployment) -> None:
    async with httpx.AsyncClient() as client:
        response = await client.post(
            f"{deployment.http_url}/v1/completions", json={"model": "nobody", "prompt": "x", "max_tokens": 1}
        )
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    connection = await nats.connect(deployment.nats_url)
    body = json.dumps({"model": "nobody", "prompt": "x"}).encode()
    reply = await connection.request(f"{deployment.prefix}.v1.generate.smol", body, timeout=10)
    await connection.close()
    assert json.loads(reply.data)["error"]["code"] == "model_not_found"
    assert reply.headers is not None
    assert reply.headers["Nats-Service-Error-Code"] == "404"


async def test_bad_messages_on_nats_get_a_coded_error_and_harm_nobody(deployment: Deployment) -> None:
    connection = await nats.connect(deployment.nats_url)
    subject = f"{deployment.prefix}.v1.generate.smol"
    for body in (b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": 5}', b'{"prompt": "a", "top_p": 0}', b'{"prompt": [-1]}'):
        reply = await connection.request(subject, body, timeout=10)
        error = json.loads(reply.data)["error"]
        assert error["code"] in ("malformed_message", "invalid_parameter"), (body, error)
    too_long = json.dumps({"prompt": [5] * 9000}).encode()
    error = json.loads((await connection.request(subject, too_long, timeout=10)).data)["error"]
    assert error["code"] == "context_length_exceeded"
    assert (error["details"]["max_model_len"], error["details"]["num_prompt_tokens"]) == (8192, 9000)
    await connection.close()
    assert len(await over_nats(deployment, PROMPTS[0], request_id=f"after-{uuid.uuid4().hex}")) == MAX_TOKENS
