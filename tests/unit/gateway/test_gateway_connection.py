"""A gateway on a real port: clients that go away or read slowly, keep-alive, large bodies, taken ports, draining."""

import asyncio
import contextlib
import json
import socket
import time
from typing import Any

import httpx
import pytest

from services.gateway import connection
from services.gateway.service import open_listener
from services.runtime.service import StartFailed
from tests.scripted_tokenizer import ScriptedTokenizer, Writer, echo, endless, say, silence
from tests.unit.gateway.gateway_traffic import CHAT, COMPLETIONS, HELLO, Served, events

STREAM = {**HELLO, "stream": True}


async def opened(url: str, path: str, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request over a socket of our own."""
    address = httpx.URL(url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.parametrize("script", [endless, silence])
@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, STREAM), (CHAT, HELLO), (COMPLETIONS, {"prompt": ["a", "b", "c"]})],
    ids=["streaming", "whole", "several prompts"],
)
async def test_a_client_that_goes_away_cancels_within_a_second(
    serve: Served, tokenizer: ScriptedTokenizer, eventually: Any, path: str, body: Any, script: Any
) -> None:
    tokenizer.script = script
    num_prompts = len(body.get("prompt", [""]))
    async with serve() as (_, url):
        _, writer = await opened(url, path, body)
        await eventually(lambda: len(tokenizer.requests) == num_prompts)
        await asyncio.sleep(0.1)
        await hang_up(writer)
        await eventually(lambda: len(tokenizer.cancelled) == num_prompts, 1.0)
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/health")).status_code == 200


async def test_a_departure_is_noticed_although_the_cancellation_is_lost() -> None:
    chunks: asyncio.Queue[int] = asyncio.Queue()

    async def receive() -> Any:
        await asyncio.sleep(0.01)
        chunks.put_nowait(1)  # arrives in the same turn of the loop as the departure
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def read() -> None:
        async with connection.until_disconnect(receive) as client:
            while True:
                await asyncio.wait_for(chunks.get(), 2)
                client.check()

    with pytest.raises(connection.ClientGone):
        await read()


async def test_a_client_that_goes_away_while_it_sends_asks_for_nothing(
    serve: Served, tokenizer: ScriptedTokenizer
) -> None:
    async with serve() as (_, url):
        address = httpx.URL(url)
        _, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode())
        writer.write(b"Content-Length: 100\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.05)
        await hang_up(writer)
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.post(CHAT, json=HELLO)).status_code == 200
    assert len(tokenizer.requests) == 1


async def test_a_body_that_does_not_arrive_is_a_408(serve: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", 0.05)
    async with serve() as (_, url):
        address = httpx.URL(url)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode())
        writer.write(b"Content-Length: 100\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        await hang_up(writer)


async def test_silence_is_filled_with_comments(serve: Served, tokenizer: ScriptedTokenizer) -> None:
    async def script(writer: Writer) -> None:
        await asyncio.sleep(0.3)
        await say("alpha")(writer)

    tokenizer.script = script
    async with serve(keepalive_s=0.05) as (_, url), httpx.AsyncClient(base_url=url) as client:
        response = await client.post(CHAT, json=STREAM)
    assert 3 <= response.text.count(": keep-alive\n\n") <= 6
    assert events(response.text)[-1] == "[DONE]"


async def test_no_comment_comes_between_busy_chunks(serve: Served, tokenizer: ScriptedTokenizer) -> None:
    async def script(writer: Writer) -> None:
        for _ in range(10):
            await writer.word(" word")
            await asyncio.sleep(0.02)
        await writer.end()

    tokenizer.script = script
    async with serve(keepalive_s=0.1) as (_, url), httpx.AsyncClient(base_url=url) as client:
        assert "keep-alive" not in (await client.post(CHAT, json=STREAM)).text


async def test_tokens_arrive_as_they_are_made(serve: Served, tokenizer: ScriptedTokenizer) -> None:
    go_on = asyncio.Event()

    async def script(writer: Writer) -> None:
        await writer.word("alpha")
        await go_on.wait()
        await writer.word(" beta", finish_reason="stop")
        await writer.end()

    tokenizer.script = script
    seen = ""
    async with (
        serve() as (_, url),
        httpx.AsyncClient(base_url=url) as client,
        client.stream("POST", CHAT, json=STREAM) as response,
    ):
        async for text in response.aiter_text():
            seen += text
            if "alpha" in seen:
                go_on.set()
    assert events(seen)[-1] == "[DONE]"


async def test_a_slow_reader_holds_no_more_than_bounded_buffers_and_misses_nothing(
    serve: Served, tokenizer: ScriptedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_words, word = 800, " word" * 2000

    async def script(writer: Writer) -> None:
        for _ in range(num_words):
            await writer.word(word)
        await writer.end()

    from services.gateway import service
    from services.runtime.generation import generate

    generations = []

    @contextlib.asynccontextmanager
    async def watched(*args: Any, **options: Any) -> Any:
        async with generate(*args, **options) as generation:
            generations.append(generation)
            yield generation

    monkeypatch.setattr(service, "generate", watched)
    tokenizer.script = script
    async with serve() as (_, url):
        reader, writer = await opened(url, CHAT, STREAM)
        while not tokenizer.writers or not next(iter(tokenizer.writers.values())).is_final:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert generations[0]._last < num_words  # the gateway stopped taking chunks: the rest is in the log only
        text = b""
        while b"[DONE]" not in text[-100:]:
            text += await asyncio.wait_for(reader.read(1 << 20), 10)
        await hang_up(writer)
    assert text.count(word.encode()) == num_words


async def test_a_hundred_megabytes_are_refused_before_they_are_read(serve: Served) -> None:
    sent = 0

    async def pieces() -> Any:
        nonlocal sent
        for _ in range(100):
            sent += 1 << 20
            yield b"x" * (1 << 20)

    async with serve() as (_, url), httpx.AsyncClient(base_url=url) as client:
        headers = {"content-type": "application/json"}
        response = await client.post(CHAT, content=pieces(), headers={**headers, "content-length": str(100 << 20)})
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "payload_too_large"
        assert (await client.get("/health")).status_code == 200


async def test_a_taken_port_is_an_immediate_clear_error(serve: Served) -> None:
    async with serve() as (_, url):
        with pytest.raises(StartFailed, match="gateway.port"):
            async with serve(port=httpx.URL(url).port):
                pass


def test_an_address_that_is_not_ours_is_a_clear_error() -> None:
    with pytest.raises(StartFailed, match="Cannot serve HTTP on"):
        open_listener("203.0.113.1", 0)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
async def test_ipv6_addresses_are_served(serve: Served) -> None:
    async with serve(host="::1") as (_, url), httpx.AsyncClient(base_url=url) as client:
        assert url.startswith("http://[::1]:")
        assert (await client.get("/health")).status_code == 200


async def test_a_draining_gateway_finishes_what_is_open_and_takes_nothing_new(
    serve: Served, tokenizer: ScriptedTokenizer, eventually: Any
) -> None:
    go_on = asyncio.Event()

    async def script(writer: Writer) -> None:
        await writer.word("alpha")
        await go_on.wait()
        await say(" beta")(writer)

    tokenizer.script = script
    async with serve() as (service, url), httpx.AsyncClient(base_url=url) as client:
        answer = asyncio.create_task(client.post(CHAT, json=STREAM))
        await eventually(lambda: tokenizer.requests)
        draining = asyncio.create_task(service.drain())
        await asyncio.sleep(0.3)
        assert not draining.done()
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient(base_url=url) as late:
                await late.get("/health")
        go_on.set()
        assert events((await answer).text)[-1] == "[DONE]"
        await asyncio.wait_for(draining, 2)


async def test_stopping_cuts_what_is_open_and_leaves_it_to_its_clients_to_come_back(
    serve: Served, tokenizer: ScriptedTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(writer: Writer) -> None:
        await (endless if writer.request.prompt == "streamed" else silence)(writer)

    tokenizer.script = script
    async with serve() as (service, url):
        begun, writer = await opened(url, COMPLETIONS, {"prompt": "streamed", "stream": True})
        await begun.readuntil(b"word")
        waiting, other = await opened(url, COMPLETIONS, {"prompt": "whole"})
        await asyncio.sleep(0.1)
        started = time.monotonic()
        await service.stop()
        assert time.monotonic() - started < 3
        assert not (await begun.read()).endswith(b"0\r\n\r\n")  # the client can tell that the stream is cut
        assert b" 503 " in await waiting.readline()
        await asyncio.gather(hang_up(writer), hang_up(other))
    assert not tokenizer.cancelled
    assert "Traceback" not in caplog.text


async def test_the_service_fails_when_its_http_server_ends(serve: Served) -> None:
    async with serve() as (service, _):
        waiting = asyncio.create_task(service.wait())
        await asyncio.sleep(0.05)
        service._server.should_exit = True
        with pytest.raises(StartFailed, match="unexpectedly"):
            await asyncio.wait_for(waiting, 2)


async def test_many_streams_at_once_each_get_their_own_words(serve: Served, tokenizer: ScriptedTokenizer) -> None:
    tokenizer.script = echo
    async with serve() as (_, url), httpx.AsyncClient(base_url=url, timeout=30) as client:
        bodies = [{"prompt": f"stream {n} " + "w " * 20, "stream": True} for n in range(32)]
        responses = await asyncio.gather(*(client.post(COMPLETIONS, json=body) for body in bodies))
    for body, response in zip(bodies, responses, strict=True):
        objects = events(response.text)[:-1]
        assert "".join(one["choices"][0]["text"] for one in objects) == body["prompt"]
