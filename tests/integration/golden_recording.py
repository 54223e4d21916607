"""Makes the golden recording anew: `python -m tests.integration.golden_recording nats://127.0.0.1:4222`.

See tests/golden/README.md. Kept are the two ends of the path and what the stages are compared by. The label names the
engine and its kernels, for a person to read.
"""

import asyncio
import sys
from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider

from schemas.control import Registration
from services.recording.filters import parse_filters
from services.recording.session import Wish, recording
from services.runtime.bus import Bus, open_bus
from services.runtime.settings import BusSettings
from services.runtime.telemetry import Tracing
from tests.integration.varied_traffic import send_everything

GOLDEN = Path(__file__).parents[1] / "golden" / "traffic.jsonl.zst"
OLDER = GOLDEN.with_name("traffic-of-2026-11-30.jsonl.zst")
"""As the first build that could record wrote it; it stays, and must load and replay for ever."""
KINDS = (
    "generate_request,accepted,error,work_item,output_chunk,cancel",
    "token_batch,step_plan,step_result,registration",
)


async def engine_of(bus: Bus) -> str:
    """Return what the executor says of its engine."""
    entries = await bus.kv_entries(bus.subjects.registry, Registration)
    return next(f"{c.engine}, {c.kernels} kernels" for entry in entries if (c := entry.message.capacity) is not None)


async def main(url: str) -> None:
    async with open_bus(BusSettings(url=url), Tracing(TracerProvider()), name="golden") as bus:
        async with recording(bus, Wish(GOLDEN, parse_filters(KINDS), label=await engine_of(bus))) as session:
            await send_everything(bus)
            await asyncio.sleep(0.5)
        print(GOLDEN, session.closing)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
