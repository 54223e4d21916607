"""The console's page in a headless Chromium, beside a real deployment under traffic."""

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from schemas.telemetry import FinishedSpan, SpanBatch
from services.cli.path import quiet_tracing
from services.runtime.bus import open_bus
from services.runtime.settings import BusSettings
from tests.integration.command_line import ECHO, CommandLine, RunningDeployment, wait_until
from tests.integration.conftest import free_port

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
if BROWSER is None:
    pytest.skip("no Chromium on the PATH (Debian: apt-get install chromium)", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

LOOK_MS = 15_000
RED_WITHIN_MS = 5000
NUM_REQUESTS = 10_000
MAX_ROWS = 100


@pytest.fixture(scope="module")
def command_line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    with ExitStack() as stack:
        command_line = CommandLine(tmp_path_factory.mktemp("page"))
        stack.callback(command_line.end)
        yield command_line


@pytest.fixture(scope="module")
def console_url() -> str:
    return f"http://127.0.0.1:{free_port()}/console"


@pytest.fixture(scope="module")
def deployment(command_line: CommandLine, console_url: str) -> RunningDeployment:
    port = console_url.rpartition(":")[2].partition("/")[0]
    settings = ("console.enabled=true", f"console.port={port}", "executor.step_time_s=0.004")
    deployment = command_line.up(*ECHO, *(word for one in settings for word in ("--set", one)))
    wait_until(lambda: is_up(console_url), 20)
    return deployment


def is_up(console_url: str) -> bool:
    try:
        return httpx.get(console_url).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=[*sandbox, *quiet])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: "playwright.Browser", console_url: str, deployment: RunningDeployment) -> Iterator["playwright.Page"]:
    """The page, loaded; the test fails when the browser complained of anything."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(LOOK_MS)
    problems: list[str] = []

    def note(message: "playwright.ConsoleMessage") -> None:
        is_expected = "/console/traces/" in message.location["url"]  # an unknown trace is a 404
        if message.type in ("error", "warning") and not is_expected:
            problems.append(message.text)

    page.on("console", note)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(console_url)
    page.wait_for_selector("#state.ok, #state.busy, #state.bad")
    yield page
    context.close()
    assert problems == []


def eventually(page: "playwright.Page", expression: str) -> None:
    """Wait until JavaScript finds so; the page's own policy forbids the driver's way of waiting."""
    wait_until(lambda: page.evaluate(expression), LOOK_MS / 1000, lambda: f"never: {expression}")


@contextmanager
def traffic(deployment: RunningDeployment, **more: object) -> Iterator[None]:
    """Two clients that ask one thing after another."""
    is_over = threading.Event()
    body = {"model": "smol", "prompt": "hello <b>world</b>", "max_tokens": 40, "ignore_eos": True} | more

    def ask() -> None:
        while not is_over.is_set():
            httpx.post(f"{deployment.http_url}/v1/completions", json=body, timeout=30)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def test_the_page_lives_under_traffic_and_a_request_opens_as_a_waterfall(
    page: "playwright.Page", deployment: RunningDeployment
) -> None:
    playwright.expect(page.locator("#pipeline .service.ok")).to_have_count(5)
    with traffic(deployment):
        eventually(page, "document.querySelectorAll('#pipeline .flow.live').length >= 10")
        eventually(page, "document.querySelectorAll('#requests tbody tr').length >= 5")
        eventually(page, "!/^[0–]/.test(document.querySelector('#chart-ttft .key b').textContent)")
        eventually(page, "document.querySelector('#executors .track')?.getAttribute('aria-valuenow') !== null")
        done = page.locator("#requests tbody tr", has=page.locator("td.ok"), has_text="POST").first
        name = done.locator("button").get_attribute("title")
        page.evaluate("name => document.querySelector(`button[title='${name}']`).click()", name)
        page.wait_for_selector("dialog[open] .waterfall .span.executor")
        playwright.expect(page.locator("#trace-title")).to_have_text(name)
        playwright.expect(page.locator(".decisions li.decoded")).to_contain_text("decoded 40 tokens")
        names = page.locator(".waterfall button.name")
        playwright.expect(names.first).to_have_text("POST /v1/completions")
        assert names.count() >= 9


def test_everything_can_be_done_by_keyboard(page: "playwright.Page", deployment: RunningDeployment) -> None:
    with traffic(deployment):
        page.wait_for_selector("#requests tbody tr td.ok")
    eventually(page, "document.querySelectorAll('#requests td.busy').length === 0")
    page.locator("#pause").focus()
    page.keyboard.press("Space")
    assert page.locator("#pause").get_attribute("aria-pressed") == "true"
    for _ in range(2):  # past the scrolling region to the first request
        page.keyboard.press("Tab")
    opener = page.evaluate("document.activeElement.title")
    assert opener
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open] .waterfall .span")
    page.locator(".waterfall button.name").first.focus()
    page.keyboard.press("Enter")
    playwright.expect(page.locator(".waterfall dl:visible")).to_contain_text("http.route")
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    assert page.evaluate("document.activeElement.title") == opener
    page.locator("#find").fill(opener)
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open] .waterfall .span")
    page.keyboard.press("Escape")
    page.locator("#find").fill("<img src=x onerror=alert(1)>")
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#trace-body")).to_contain_text("Nothing is known of <img src=x")
    assert page.locator("#trace-body img").count() == 0


def test_a_service_that_is_killed_turns_red_within_five_seconds_and_green_again(
    page: "playwright.Page", deployment: RunningDeployment
) -> None:
    playwright.expect(page.locator("#pipeline .service.ok")).to_have_count(5)
    os.kill(deployment.pid_of("tokenizer-0"), signal.SIGKILL)
    page.wait_for_selector("#pipeline .service.bad", timeout=RED_WITHIN_MS)
    assert page.locator("#pipeline .service.bad .title").text_content() == "tokenizer"
    assert "✕" in page.locator("#pipeline .service.bad").text_content()
    playwright.expect(page.locator("#pipeline .service.ok")).to_have_count(5, timeout=LOOK_MS)
    playwright.expect(page.locator("#state")).to_contain_text("ready")


def test_ten_thousand_requests_grow_neither_the_page_nor_the_console(
    page: "playwright.Page", deployment: RunningDeployment
) -> None:
    sizes: list[tuple[int, int]] = []
    for first in (0, NUM_REQUESTS // 2):
        in_a_thread(send_spans(deployment, range(first, first + NUM_REQUESTS // 2)))
        last = f"req-{first + NUM_REQUESTS // 2 - 1}"
        page.wait_for_selector(f"#requests tbody tr:first-child button[title='{last}']")
        sizes.append((page.evaluate("document.querySelectorAll('*').length"), memory_of(deployment)))
    (nodes, memory), (nodes_later, memory_later) = sizes
    assert page.locator("#requests tbody tr").count() == MAX_ROWS
    assert nodes_later <= nodes + 20
    assert memory_later < memory + 8e6
    playwright.expect(page.locator("#held")).to_contain_text("1,000 remembered")


def in_a_thread(work: Coroutine[None, None, None]) -> None:
    """Run it to its end; this thread's event loop is the browser driver's."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()


def memory_of(deployment: RunningDeployment) -> int:
    """Return the console's resident bytes."""
    with open(f"/proc/{deployment.pid_of('console-0')}/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def send_spans(deployment: RunningDeployment, numbers: range) -> None:
    """Say what an instance would say of so many requests, at the pace that it may say it."""
    async with open_bus(BusSettings(url=deployment.nats_url), quiet_tracing(), name="test") as bus:
        for start in range(numbers.start, numbers.stop, 20):
            spans = [span for number in range(start, start + 20) for span in spans_of(number)]
            batch = SpanBatch(instance="gateway-9", role="gateway", spans=tuple(spans))
            await bus.publish(bus.subjects.spans("gateway"), batch)
        await bus.transport.flush()


def spans_of(number: int) -> Iterator[FinishedSpan]:
    now_s = time.time()
    for name in ("scheduler.queue", "executor.prefill", "executor.decode", "tokenizer.detokenize"):
        yield FinishedSpan(
            trace_id=f"{number:032x}",
            span_id=f"{name}-{number}",
            name=name,
            start_s=now_s,
            duration_s=0.01,
            attributes={"natterjack.request_id": f"req-{number}", "natterjack.choice": 0},
        )
