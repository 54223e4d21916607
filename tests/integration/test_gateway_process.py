"""The gateway as its own process over a real nats-server, with a scripted pipeline behind it."""

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from services.runtime.bus import Bus
from tests.scripted_tokenizer import ScriptedTokenizer, Writer, endless, say

STREAM = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
CHAT = "/v1/chat/completions"


class Gateway:
    """One gateway process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log = ""
        self.url = ""

    async def serving(self) -> None:
        """Wait for the line that tells the address."""
        while "ready" not in await self._line():
            if "serving HTTP on " in self.log and not self.url:
                self.url = self.log.partition("serving HTTP on ")[2].split()[0]

    async def _line(self) -> str:
        assert self.process.stderr is not None
        line = (await asyncio.wait_for(self.process.stderr.readline(), 20)).decode()
        assert line, f"the gateway ended: {self.log}"
        self.log += line
        return line

    async def ended(self, timeout_s: float) -> int:
        """Return the exit code, and read the rest of the log."""
        assert self.process.stderr is not None
        self.log += (await asyncio.wait_for(self.process.stderr.read(), timeout_s)).decode()
        return await asyncio.wait_for(self.process.wait(), timeout_s)


@contextlib.asynccontextmanager
async def gateway(url: str, prefix: str, *sets: str) -> AsyncIterator[Gateway]:
    """Run `python -m services.gateway` with settings; it is gone afterwards."""
    settings = [f"bus.url={url}", f"bus.prefix={prefix}", *sets]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway", *arguments, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield Gateway(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.fixture
async def bus(connect_nats_bus: Any) -> Bus:
    return await connect_nats_bus()


@pytest.fixture
async def tokenizer(bus: Bus) -> AsyncIterator[ScriptedTokenizer]:
    async with ScriptedTokenizer(bus) as scripted:
        yield scripted


async def test_it_answers_and_a_signal_lets_open_answers_finish(
    nats_server: Any, bus: Bus, tokenizer: ScriptedTokenizer
) -> None:
    go_on = asyncio.Event()

    async def script(writer: Writer) -> None:
        await writer.word("alpha")
        await go_on.wait()
        await say(" beta")(writer)

    async with gateway(nats_server.url, bus.subjects.prefix, "gateway.port=0") as running:
        await running.serving()
        async with httpx.AsyncClient(base_url=running.url, timeout=20) as client:
            whole = await client.post(CHAT, json={**STREAM, "stream": False})
            assert whole.json()["choices"][0]["message"]["content"] == "alpha beta gamma"
            missing = await client.get("/ready")
            assert missing.status_code == 503
            assert missing.json()["error"]["details"]["missing"] == [
                "tokenizer",
                "scheduler",
                "cache_manager",
                "executor",
            ]
            tokenizer.script = script
            async with client.stream("POST", CHAT, json=STREAM) as response:
                text = ""
                async for piece in response.aiter_text():
                    text += piece
                    if "alpha" in piece:
                        running.process.send_signal(signal.SIGTERM)
                        await asyncio.sleep(0.5)
                        with pytest.raises(httpx.ConnectError):
                            async with httpx.AsyncClient() as late:
                                await late.get(f"{running.url}/health")
                        go_on.set()
        assert text.rstrip().endswith("data: [DONE]")
        assert await running.ended(5) == 0
        assert "Traceback" not in running.log


async def test_a_client_that_goes_away_cancels_over_nats(
    nats_server: Any, bus: Bus, tokenizer: ScriptedTokenizer, eventually: Any
) -> None:
    tokenizer.script = endless
    async with gateway(nats_server.url, bus.subjects.prefix, "gateway.port=0") as running:
        await running.serving()
        async with (
            httpx.AsyncClient(base_url=running.url) as client,
            client.stream("POST", CHAT, json=STREAM) as response,
        ):
            async for piece in response.aiter_text():
                if "word" in piece:
                    break
        await eventually(lambda: tokenizer.cancelled, 1.0)


async def test_a_taken_port_ends_it_at_once_and_says_so(nats_server: Any, bus: Bus) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        started = time.monotonic()
        async with gateway(nats_server.url, bus.subjects.prefix, f"gateway.port={taken.getsockname()[1]}") as running:
            assert await running.ended(20) == 1
        assert time.monotonic() - started < 15
    assert "gateway.port" in running.log
    assert "Traceback" not in running.log


async def test_an_unknown_key_is_a_configuration_error(nats_server: Any) -> None:
    async with gateway(nats_server.url, "t", "gateway.prot=0") as running:
        assert await running.ended(20) == 2
    assert "gateway.port" in running.log
