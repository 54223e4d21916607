"""The processes of the peers: servers with OpenAI's HTTP, and workers that answer lines of JSON."""

import asyncio
import contextlib
import json
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from services.bench.client import RequestFailed, RequestOptions
from services.bench.http_client import HttpClient
from services.runtime import launcher

READY_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 10.0
MAX_LINE_BYTES = 1 << 22


@contextlib.asynccontextmanager
async def http_server(argv: Callable[[int], list[str]]) -> AsyncIterator[str]:
    """Start a server on a free port and yield its URL once it lists a model."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    async with _process(argv(port), answers=False) as process:
        deadline_s = asyncio.get_running_loop().time() + READY_TIMEOUT_S
        while not await _lists_model(url):
            if process.returncode is not None or asyncio.get_running_loop().time() > deadline_s:
                raise SystemExit(f"{argv(port)[0]} did not become ready")
            await asyncio.sleep(0.3)
        yield url


@contextlib.asynccontextmanager
async def worker(argv: list[str]) -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]]:
    """Start a worker, wait for its first line, and yield a function that sends one object and returns the answer."""
    async with _process(argv, answers=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        reader, writer = process.stdout, process.stdin

        async def answer() -> dict[str, Any]:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                line = await reader.readline()
            if not line:
                raise SystemExit(f"{argv[1]} ended without an answer")
            return dict(json.loads(line))

        async def ask(question: dict[str, Any]) -> dict[str, Any]:
            writer.write(json.dumps(question).encode() + b"\n")
            await writer.drain()
            return await answer()

        await answer()
        yield ask


def vllm_is_importable(python: str) -> bool:
    """Tell whether a Python has vLLM, without loading it."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    with contextlib.suppress(OSError):
        return subprocess.run([python, "-c", code], check=False, capture_output=True).returncode == 0
    return False


@contextlib.asynccontextmanager
async def _process(argv: list[str], *, answers: bool) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a program until the block ends; it dies with this process at the latest. A failure shows its log."""
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *launcher.wrap(argv),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE if answers else log,
            stderr=log,
            limit=MAX_LINE_BYTES,
        )
        try:
            yield process
        except SystemExit as failure:
            log.seek(0)
            raise SystemExit(f"{failure}:\n{log.read()[-2000:].decode(errors='replace')}") from None
        finally:
            await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()


async def _lists_model(url: str) -> bool:
    client = HttpClient(url, RequestOptions(""))
    try:
        await client.first_model()
    except RequestFailed:
        return False
    finally:
        client.close()
    return True


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
