"""What structured output costs per token, and what forced tokens save.

    python tests/bench/structured_output.py [--json FILE] [--streams 1,16] [--rounds 3] [--tokens 96] [--temperature 0]

Two deployments with the default model, one that appends forced tokens and one that samples them. On both: free text, an
answer whose schema leaves every token open, and one whose schema forces most of its text. The three take turns, and a
figure is the median of the rounds. Figures are of this machine as it is: run it on an idle one.
"""

import argparse
import asyncio
import json
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
from own_deployment import running

TIMEOUT_S = 120.0
OPEN: dict[str, Any] = {"type": "string", "minLength": 2000}
"""A long text: nothing is forced, and the mask is looked at for every token."""
RECORD: dict[str, Any] = {
    "customer_identification_number": {"type": "integer", "minimum": 100, "maximum": 999},
    "preferred_delivery_address": {"enum": ["home_address_of_the_customer", "office_address_of_the_customer"]},
    "is_subscribed_to_the_newsletter": {"type": "boolean"},
    "last_communication_channel": {"enum": ["electronic_mail", "telephone_conversation"]},
}
FORCING: dict[str, Any] = {
    "type": "array",
    "minItems": 40,
    "items": {"type": "object", "properties": RECORD, "required": [*RECORD], "additionalProperties": False},
}
KINDS: dict[str, dict[str, Any]] = {
    "free": {"ignore_eos": True},
    "open schema": {"structured_outputs": {"json": OPEN}},
    "forcing schema": {"structured_outputs": {"json": FORCING}},
}


async def token_times_ms(http_url: str, num_streams: int, wish: argparse.Namespace) -> dict[str, float]:
    """Milliseconds per output token and stream, by kind of answer."""
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    async with httpx.AsyncClient(base_url=http_url, timeout=TIMEOUT_S) as http:
        for number in range(wish.rounds + 1):
            for kind, options in KINDS.items():
                body = {
                    "prompt": "Data:",
                    "temperature": wish.temperature,
                    "max_tokens": wish.tokens,
                    "seed": 1,
                    **options,
                }
                began_s = perf_counter()
                replies = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(num_streams)))
                took_s = perf_counter() - began_s
                counts = {reply.raise_for_status().json()["usage"]["completion_tokens"] for reply in replies}
                if counts != {wish.tokens}:
                    raise SystemExit(f"{kind}: {counts} tokens instead of {wish.tokens}")
                if number:  # the first round compiles grammars
                    times[kind].append(1000 * took_s / wish.tokens)
    return {kind: statistics.median(values) for kind, values in times.items()}


async def measure(wish: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, append in (("appended", "true"), ("sampled", "false")):
        async with running([f"executor.append_forced_tokens={append}", "executor.num_blocks=2048"]) as deployment:
            for num_streams in wish.streams:
                times = await token_times_ms(deployment.http_url, num_streams, wish)
                found.setdefault(f"{num_streams} streams", {})[name] = times
    return found


def show(found: dict[str, dict[str, dict[str, float]]]) -> None:
    for streams, sides in found.items():
        print(f"{streams}: ms per token and stream")
        for kind in KINDS:
            values = ", ".join(
                f"{side} {times[kind]:.2f} ({times[kind] / times['free']:.2f}×)" for side, times in sides.items()
            )
            print(f"  {kind:15} {values}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--streams", type=lambda text: [int(number) for number in text.split(",")], default=[1, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    wish = parser.parse_args()
    found = asyncio.run(measure(wish))
    show(found)
    if wish.json is not None:
        wish.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
