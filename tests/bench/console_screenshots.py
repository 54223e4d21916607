"""The console's pictures in README: a deployment with the real model under traffic, light and dark.

    python tests/bench/console_screenshots.py [--out services/console/screenshots] [--seconds 40]

Needs playwright and a Chromium on the PATH (Debian's package `chromium`).
"""

import argparse
import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from own_deployment import running
from playwright.async_api import Browser, async_playwright

from services.supervisor.ports import free_port

ROOT = Path(__file__).parents[2]
PROMPTS = (
    "What is a natterjack toad, and where does it live?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain how a four-stroke engine works.",
    "List the planets of the solar system with one fact each.",
)
STREAMS = 6


async def traffic(url: str) -> None:
    """A few clients that ask one thing after another, with pauses."""

    async def client(number: int) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            for turn in range(10_000):
                prompt = PROMPTS[(number + turn) % len(PROMPTS)]
                body = {
                    "model": "smol",
                    "messages": [{"role": "user", "content": prompt}],
                    "max_tokens": 40 + 37 * ((number + turn) % 5),
                    "seed": turn,
                }
                await http.post(f"{url}/v1/chat/completions", json=body)
                if turn % 7 == 3:
                    await http.post(f"{url}/v1/chat/completions", json=body | {"max_tokens": -1})
                await asyncio.sleep(0.1 * (number % 3))

    await asyncio.gather(*(client(number) for number in range(STREAMS)))


@contextlib.asynccontextmanager
async def in_background(work: object) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)  # type: ignore[arg-type]
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def shoot(browser: Browser, url: str, out: Path, scheme: str) -> None:
    context = await browser.new_context(
        color_scheme=scheme,  # type: ignore[arg-type]
        viewport={"width": 1280, "height": 1140},
    )
    page = await context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    await page.goto(url)
    await page.wait_for_selector("#requests tbody tr")
    await asyncio.sleep(2.5)
    await page.screenshot(path=out / f"{scheme}.png")
    await page.locator("#requests tbody tr", has_text="done").nth(3).click()
    await page.wait_for_selector(".waterfall .span")
    await asyncio.sleep(0.5)
    await page.screenshot(path=out / f"{scheme}-trace.png")
    await context.close()
    for problem in problems:
        print(f"{scheme}: {problem}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "services/console/screenshots")
    parser.add_argument("--seconds", type=float, default=40.0, help="of traffic before the first picture")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of the deployment")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    port = free_port("127.0.0.1", "console.port")
    settings = (f"console.port={port}", "executor.num_blocks=512", *options.set)
    async with running(settings) as deployment, async_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        async with in_background(traffic(deployment.http_url)):
            await asyncio.sleep(options.seconds)
            for scheme in ("light", "dark"):
                await shoot(browser, f"http://127.0.0.1:{port}/console", options.out, scheme)
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main())
