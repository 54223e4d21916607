"""The HTTP client against a real socket: pieces, token counts, and every way in which an answer can go wrong."""

import asyncio
import contextlib

import pytest

from services.bench.client import RequestFailed, RequestOptions
from services.bench.http_client import HttpClient
from services.bench.prompts import Prompt
from services.bench.record import RequestRecord

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(data):
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def piece(text):
    return chunk(f'data: {{"choices": [{{"index": 0, "text": "{text}", "finish_reason": null}}]}}\n\n'.encode())


def answer(*parts):
    return HEAD + b"".join(parts) + b"0\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(*answers):
    """A server that gives these answers in turn; yields its URL and how many connections it saw."""
    waiting, connections = list(answers), []

    async def connected(reader, writer):
        connections.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while waiting:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
                data = waiting.pop(0)
                writer.write(data)
                await writer.drain()
                if data.endswith(b"0\r\n\r\n"):
                    continue
                break
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections


async def asked(client, prompt=None):
    record = RequestRecord()
    await client.run(prompt or Prompt("hello", 4), record)
    return record


async def test_pieces_are_timed_tokens_counted_and_the_connection_used_again():
    good = answer(piece("he"), piece("llo"), chunk(USAGE), chunk(DONE))
    async with serving(good, good) as (url, connections):
        client = HttpClient(url, RequestOptions("m", keep_text=True))
        first, second = await asked(client), await asked(client)
        client.close()
    assert (first.text, len(first.pieces_s), first.num_prompt_tokens, first.num_output_tokens) == ("hello", 2, 3, 4)
    assert second.text == "hello"
    assert len(connections) == 1


async def test_without_token_counts_pieces_are_counted():
    async with serving(answer(piece("a"), piece("b"), chunk(DONE))) as (url, _):
        client = HttpClient(url, RequestOptions("m"))
        assert (await asked(client)).num_output_tokens == 2
        client.close()


REFUSED = b'{"error": {"message": "full up", "code": "queue_full"}}'


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"HTTP/1.1 503 No\r\nContent-Length: 55\r\n\r\n" + REFUSED, "HTTP 503: queue_full"),
        (b"HTTP/1.1 502 No\r\nContent-Length: 3\r\n\r\nbad", "HTTP 502: bad"),
        (answer(piece("a")), r"without \[DONE\]"),
        (answer(piece("a"), chunk(b'data: {"error": {"code": "cancelled"}}\n\n'), chunk(DONE)), "cancelled"),
        (answer(chunk(b"data: {oops\n\n"), chunk(DONE)), "no JSON"),
        (HEAD + piece("a"), "closed the connection"),
        (b"what?\r\n\r\n", "no HTTP"),
    ],
)
async def test_a_bad_answer_is_a_failure_with_its_reason(data, reason):
    async with serving(data) as (url, _):
        client = HttpClient(url, RequestOptions("m"))
        with pytest.raises(RequestFailed, match=reason):
            await asked(client)
        client.close()


async def test_nobody_there_is_a_failure():
    client = HttpClient("http://127.0.0.1:9", RequestOptions("m"))
    with pytest.raises(RequestFailed, match="refused|failed"):
        await asked(client)
    with pytest.raises(RequestFailed, match="Nothing answers"):
        await client.first_model()


async def test_a_conversation_cannot_be_made_of_token_ids():
    client = HttpClient("http://127.0.0.1:9", RequestOptions("m"), "chat")
    with pytest.raises(RequestFailed, match="token ids"):
        await asked(client, Prompt((1, 2), 4))
