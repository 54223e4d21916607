"""The console over HTTP: its files, its events, its traces, and who may see them."""

import asyncio
import json

import httpx
import pytest

from services.console.app import Pages, build_app, load_files
from services.console.live import Live
from services.console.overview import History, overview
from services.console.roster import Roster
from services.console.samples import Samples
from services.console.trace_ring import TraceRing
from tests.unit.console.console_traffic import one_request


class Console:
    """The application without a bus."""

    def __init__(self, *keys):
        self.ring = TraceRing(1000)
        self.live = Live(self.ring, History())
        self.is_stopping = False
        self.app = build_app(Pages(self.ring, self.live, load_files(), lambda: self.is_stopping), keys)

    def tick(self):
        self.live.tick(overview(Roster(), Samples(), 0.0, 1000.0))

    async def get(self, path, base="http://127.0.0.1:8001", **options):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url=base) as client:
            return await client.get(path, **options)


async def test_the_page_and_every_file_that_it_names_are_served_under_a_strict_policy():
    console = Console()
    page = await console.get("/console")
    assert page.status_code == 200
    names = [text.partition('"')[0] for text in page.text.split('="/console/')[1:]]
    assert len(names) >= 4
    for name in names:
        file = await console.get(f"/console/{name}")
        assert file.status_code == 200, name
        assert "unsafe" not in file.headers["content-security-policy"]
        assert file.headers["x-content-type-options"] == "nosniff"
    assert (await console.get("/")).headers["location"] == "/console"


@pytest.mark.parametrize(
    "path", ["../app.py", "%2e%2e/app.py", "nothing.js", "", "vendor", "vendor/uplot-1.6.32/LICENSE"]
)
async def test_nothing_but_the_pages_files_can_be_asked_for(path):
    assert (await Console().get(f"/console/static/{path}")).status_code == 404


async def test_a_file_that_the_browser_has_is_not_sent_again():
    console = Console()
    first = await console.get("/console/static/main.js")
    again = await console.get("/console/static/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_no_file_of_the_page_names_another_host_or_parses_markup():
    for name, file in load_files().items():
        text = file.body.decode()
        if not name.startswith("vendor/"):
            assert not [word for word in ("innerHTML", "insertAdjacentHTML", "document.write", "eval(") if word in text]
            assert [url for url in text.split("http")[1:] if not url.startswith("://www.w3.org/2000/svg")] == [], name
            assert "style=" not in text, name


async def test_a_trace_is_found_and_an_unknown_one_is_a_404():
    console = Console()
    for batch in one_request(1):
        console.ring.add(batch)
    found = await console.get("/console/traces/chatcmpl-req-1")
    assert found.json()["trace_id"] == "trace-1"
    assert len(found.json()["rows"]) == 7
    missing = await console.get("/console/traces/nobody")
    assert (missing.status_code, missing.json()["rows"]) == (404, [])


async def test_events_begin_with_everything_and_go_on_with_news():
    console = Console()
    console.tick()
    for batch in one_request(1):
        console.ring.add(batch)
    events = console.live.events(lambda: console.is_stopping)
    assert await read(events) == ("hello", 1, ["trace-1"])
    next_one = asyncio.ensure_future(read(events))
    await asyncio.sleep(0)
    for batch in one_request(2):
        console.ring.add(batch)
    console.tick()
    assert await next_one == ("tick", None, ["trace-2", "trace-1"])


async def test_a_page_that_fell_behind_gets_everything_again():
    console = Console()
    console.tick()
    events = console.live.events(lambda: console.is_stopping)
    assert (await read(events))[0] == "hello"
    console.tick()
    console.tick()
    assert (await read(events))[:2] == ("hello", 3)


async def test_events_end_when_the_console_stops():
    console = Console()
    console.tick()
    events = console.live.events(lambda: console.is_stopping)
    await anext(events)
    console.is_stopping = True
    console.tick()
    with pytest.raises(StopAsyncIteration):
        await anext(events)


async def read(events):
    """Return an event's name, its number of points, and the traces of its requests."""
    name, data = (await anext(events)).decode().split("\n")[:2]
    news = json.loads(data.removeprefix("data: "))
    history = news.get("history")
    traces = [line["trace_id"] for line in news["requests"]]
    return name.removeprefix("event: "), None if history is None else len(history), traces


@pytest.mark.parametrize(
    "base", ["http://127.0.0.1:8001", "http://localhost", "http://[::1]:8001", "http://LOCALHOST:1"]
)
async def test_without_keys_a_loopback_name_is_enough(base):
    assert (await Console().get("/console", base)).status_code == 200


@pytest.mark.parametrize("base", ["http://evil.example:8001", "http://10.0.0.7", "http://127.0.0.1.evil.example"])
async def test_without_keys_no_other_name_is_answered(base):
    console = Console()
    for path in ("/console", "/console/events", "/console/traces/x", "/console/static/main.js"):
        answer = await console.get(path, base)
        assert (answer.status_code, "loopback" in answer.text) == (403, True)
    assert (await console.get("/health", base)).status_code == 200


async def test_with_keys_everybody_needs_one():
    console = Console("first", "sécond")
    for options in ({}, {"auth": ("anyone", "wrong")}, {"headers": {"Authorization": "Bearer "}}):
        answer = await console.get("/console", **options)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Basic ")
    for broken in ("Basic !!", "Basic /w==", "Digest first", "first"):
        assert (await console.get("/console", headers={"Authorization": broken})).status_code == 401
    base = "http://console.example"
    assert (await console.get("/console", base, auth=("anyone", "sécond".encode()))).status_code == 200
    assert (await console.get("/console", base, headers={"Authorization": "Bearer first"})).status_code == 200
