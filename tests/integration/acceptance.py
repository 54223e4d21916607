"""What the acceptance tests share: one request asked in every way (whole, streamed, over NATS), one way to read it."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import nats

from tests.integration.conftest import Deployment
from tests.integration.prometheus_page import Pages

C, H = "/v1/completions", "/v1/chat/completions"
TIMEOUT_S = 60.0
GAUGES_AT_REST = (
    "num_requests_open",
    "num_requests_running",
    "num_requests_waiting",
    "num_steps_in_flight",
    "num_outputs_open",
    "num_sequences_held",
    "kv_cache_usage_perc",
)


@dataclass
class Answer:
    """One choice, and the pieces in which its text came."""

    text: str = ""
    pieces: list[str] = field(default_factory=list)
    finish: str | None = None
    stop_reason: Any = None
    logprobs: list[Any] = field(default_factory=list)
    calls: list[list[Any]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> tuple[str, str | None, Any]:
        return self.text, self.finish, self.stop_reason


class Surface:
    """Both doors of one deployment."""

    def __init__(self, deployment: Deployment, http: httpx.AsyncClient) -> None:
        self.deployment = deployment
        self.http = http

    # ---- HTTP

    async def whole(self, path: str, **body: Any) -> Answer:
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return answer_of(response.json(), response.json()["choices"][0])

    async def events(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> list[Any]:
        """The data of a stream's events; it must end with [DONE]."""
        found: list[Any] = []
        async with self.http.stream("POST", path, json={**body, "stream": True}, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    found.append(data if data == "[DONE]" else json.loads(data))
        assert found.pop() == "[DONE]"
        return found

    async def streamed(self, path: str, **body: Any) -> Answer:
        events = await self.events(path, **{"stream_options": {"include_usage": True}, **body})
        return folded(events)

    async def both(self, path: str, **body: Any) -> Answer:
        """Ask whole and streamed; both must say the same, the streamed answer is returned."""
        whole, streamed = await self.whole(path, **body), await self.streamed(path, **body)
        assert whole.shown == streamed.shown
        assert without_ids(whole.calls) == without_ids(streamed.calls)
        assert whole.usage["completion_tokens"] == streamed.usage["completion_tokens"]
        return streamed

    async def refused(self, path: str, body: Any, **options: Any) -> dict[str, Any]:
        """The error of a request that must be a 400, whole and streamed, and hurts nothing."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await self.http.post(path, content=raw, headers={"content-type": "application/json"}, **options)
        assert response.status_code == 400, (body, response.text)
        error: dict[str, Any] = response.json()["error"]
        assert {"message", "type", "param", "code"} <= set(error)
        assert error["type"] == "invalid_request_error"
        return error

    # ---- NATS

    async def over_nats(self, **body: Any) -> Answer | dict[str, Any]:
        """The answer of a request over NATS, or its error."""
        client = await nats.connect(self.deployment.nats_url)
        try:
            inbox = client.new_inbox()
            replies = await client.subscribe(inbox)
            subject = f"{self.deployment.prefix}.v1.generate.smol"
            await client.publish(subject, json.dumps(body).encode(), reply=inbox)
            first = json.loads((await replies.next_msg(TIMEOUT_S)).data)
            if "error" in first:
                error: dict[str, Any] = first["error"]
                return error
            chunks = [json.loads((await replies.next_msg(TIMEOUT_S)).data)]
            while not chunks[-1].get("final"):
                chunks.append(json.loads((await replies.next_msg(TIMEOUT_S)).data))
            return folded_chunks(chunks)
        finally:
            await client.close()

    async def everywhere(self, **body: Any) -> Answer:
        """Ask for a completion whole, streamed and over NATS; all must say the same."""
        answer = await self.both(C, **body)
        other = await self.over_nats(**body)
        assert isinstance(other, Answer), other
        assert other.shown == answer.shown
        return answer


@asynccontextmanager
async def surface_of(deployment: Deployment) -> AsyncIterator[Surface]:
    """Ask a deployment; whatever was asked, it lives and answers afterwards."""
    async with httpx.AsyncClient(base_url=deployment.http_url, timeout=TIMEOUT_S) as http:
        yield Surface(deployment, http)
        assert (await http.get("/health")).status_code == 200
        async with asyncio.timeout(TIMEOUT_S):
            after = await http.post(C, json={"prompt": "Hi", "max_tokens": 1})
        assert after.status_code == 200, after.text
    await gauges_at_rest(deployment)


async def gauges_at_rest(deployment: Deployment) -> None:
    """Wait until nothing runs, waits or is held any more, as every service's own metrics tell."""
    async with asyncio.timeout(TIMEOUT_S):
        while deployment.metrics_urls:
            pages = await Pages.read(deployment.metrics_urls)
            if not any(pages.total(name) for name in GAUGES_AT_REST):
                return
            await asyncio.sleep(0.02)


def without_ids(calls: Sequence[Sequence[Any]]) -> list[Any]:
    return [list(call[1:]) for call in calls]


def answer_of(body: dict[str, Any], choice: dict[str, Any]) -> Answer:
    message = choice.get("message")
    text = choice["text"] if message is None else message["content"] or ""
    calls = [] if message is None else message.get("tool_calls") or []
    return Answer(
        text=text,
        pieces=[text],
        finish=choice["finish_reason"],
        stop_reason=choice["stop_reason"],
        logprobs=entries_of(choice["logprobs"]),
        calls=[[call["id"], call["function"]["name"], call["function"]["arguments"]] for call in calls],
        usage=body["usage"],
    )


def entries_of(logprobs: dict[str, Any] | None) -> list[Any]:
    """One entry per token, whichever endpoint: (text, logprob, bytes)."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [(entry["token"], entry["logprob"], entry["bytes"]) for entry in logprobs["content"]]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["bytes"], strict=True))


def folded(events: list[Any]) -> Answer:
    """Put a stream of one choice together, and check its shape on the way."""
    answer = Answer()
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    assert events[-1]["choices"] == []
    answer.usage = events[-1]["usage"]
    for event in events[:-1]:
        assert event["usage"] is None
        [choice] = event["choices"]
        assert answer.finish is None, "nothing follows the finish reason"
        delta = choice.get("delta", {})
        piece = choice.get("text", delta.get("content")) or ""
        answer.pieces += [piece] if piece else []
        answer.text += piece
        answer.logprobs += entries_of(choice["logprobs"])
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                answer.calls.append([call["id"], call["function"]["name"], ""])
            answer.calls[call["index"]][2] += call["function"]["arguments"]
        answer.finish = choice["finish_reason"]
        answer.stop_reason = choice.get("stop_reason")
    assert answer.finish is not None
    return answer


def folded_chunks(chunks: list[Any]) -> Answer:
    answer = Answer()
    for chunk in chunks:
        assert "error" not in chunk, chunk["error"]
        for delta in chunk.get("choices", ()):
            answer.text += delta.get("text", "")
            answer.finish = delta.get("finish_reason", answer.finish)
            answer.stop_reason = delta.get("stop_reason", answer.stop_reason)
    return answer
