"""The port for orchestrators and Prometheus, asked by real HTTP clients and by none that is."""

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from services.runtime.probe_server import Page, probe_server

PROBE = Path(__file__).parents[3] / "configs" / "docker" / "probe.py"


def broken(accept: str) -> Page:
    raise KeyError("a gauge with a bug")


PAGES = {"/health": lambda accept: Page(b"ok\n"), "/ready": lambda accept: Page(b"starting\n", 503), "/metrics": broken}


async def test_each_path_has_its_page_and_status():
    async with probe_server("127.0.0.1", 0, PAGES) as port, httpx.AsyncClient() as client:
        base = f"http://127.0.0.1:{port}"
        health = await client.get(f"{base}/health?verbose=1")
        assert (health.status_code, health.text) == (200, "ok\n")
        ready = await client.get(f"{base}/ready")
        assert (ready.status_code, ready.text) == (503, "starting\n")
        assert (await client.get(f"{base}/nothing")).status_code == 404
        assert (await client.post(f"{base}/health")).status_code == 405
        head = await client.head(f"{base}/health")
        assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", "3")


async def test_a_bug_in_one_page_does_not_take_the_others_with_it():
    async with probe_server("127.0.0.1", 0, PAGES) as port, httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{port}/metrics")).status_code == 500
        assert (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"\xff\xfe\r\n\r\n", b"GET /" + b"x" * 40_000 + b"\r\n\r\n", b"GET /health"])
async def test_a_client_that_speaks_no_http_harms_nobody(sent: bytes):
    async with probe_server("127.0.0.1", 0, PAGES) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        writer.close()
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200


async def test_leaving_the_block_frees_the_port():
    async with probe_server("127.0.0.1", 0, PAGES) as port:
        pass
    async with probe_server("127.0.0.1", port, PAGES) as again:
        assert again == port


@pytest.mark.parametrize(("path", "code", "text"), [("/health", 0, "ok"), ("/ready", 1, "starting")])
async def test_the_containers_health_check_tells_by_its_exit_code(path: str, code: int, text: str):
    async with probe_server("127.0.0.1", 0, PAGES) as port:
        command = [sys.executable, "-I", "-S", str(PROBE), str(port), path]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (code, text)
    gone = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert gone.returncode == 1
    assert "no answer" in gone.stderr
