"""Streams over HTTP whose client comes back, to the other gateway, with the id of the last event that it read."""

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass

import httpx

from services.runtime.bus import Bus
from tests.faults.streams import STREAM_TIMEOUT_S, echo

RETRY_S = 0.1


@dataclass
class HttpStream:
    """One completion, what it should say, and what it said over all connections."""

    number: int
    urls: list[str]
    prompt: str
    num_tokens: int
    text: str = ""
    last_event_id: str = ""
    num_connections: int = 0
    is_done: bool = False
    problem: str = ""
    longest_silence_s: float = 0.0

    async def run(self, bus: Bus) -> None:
        """Read to the end, through as many gateways as it takes."""
        try:
            async with asyncio.timeout(STREAM_TIMEOUT_S), httpx.AsyncClient(timeout=None) as client:
                while not self.is_done and not self.problem:
                    await self._connect(client)
        except TimeoutError:
            self.problem = f"hung after {len(self.text)} characters"
        expected = echo(self.prompt, self.num_tokens)
        if not self.problem and self.text != expected:
            self.problem = f"said {self.text!r:.200} instead of {expected!r:.200}"

    async def _connect(self, client: httpx.AsyncClient) -> None:
        url = self.urls[(self.number + self.num_connections) % len(self.urls)]
        self.num_connections += 1
        headers = {"Idempotency-Key": f"{self.prompt}{self.num_tokens}"}
        headers |= {"Last-Event-ID": self.last_event_id} if self.last_event_id else {}
        body = {"model": "smol", "prompt": self.prompt, "max_tokens": self.num_tokens, "temperature": 0, "stream": True}
        try:
            async with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
                if response.status_code == 200:
                    await self._read(response)
                elif response.status_code != 503:
                    self.problem = f"HTTP {response.status_code}: {(await response.aread())!r:.300}"
        except httpx.TransportError:
            pass
        await asyncio.sleep(RETRY_S)

    async def _read(self, response: httpx.Response) -> None:
        before_s, event_id = time.monotonic(), ""
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                event_id = value
            if name != "data":
                continue
            now_s = time.monotonic()
            self.longest_silence_s, before_s = max(self.longest_silence_s, now_s - before_s), now_s
            if value == "[DONE]":
                self.is_done = True
                return
            event = json.loads(value)
            if "error" in event:
                self.problem = f"error: {event['error']}"
                return
            self.text += "".join(choice["text"] for choice in event["choices"])
            self.last_event_id = event_id


def http_streams(urls: list[str], numbers: Iterable[int], num_tokens: int) -> list[HttpStream]:
    """Return streams that begin at the gateways in turn."""
    return [HttpStream(number, urls, f"http {number} repeats; ", num_tokens + number % 37) for number in numbers]
