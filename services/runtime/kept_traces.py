"""Tells the other processes which traces are worth exporting, and hears it from them. An edge module."""

import asyncio
from concurrent.futures import Future

from schemas.control import KeepTrace
from services.runtime.bus import Bus, Incoming
from services.runtime.telemetry import Tracing


async def share_kept_traces(bus: Bus, tracing: Tracing) -> None:
    """Send and heed KeepTrace for as long as the bus is open; does nothing where all traces are exported anyway."""
    loop = asyncio.get_running_loop()
    sending: set[Future[None]] = set()

    def tell(trace_id: int) -> None:
        """Called on the thread that the span ended on."""
        message = KeepTrace(trace_id=f"{trace_id:032x}")
        sent = asyncio.run_coroutine_threadsafe(bus.publish(bus.subjects.keep_trace, message), loop)
        sending.add(sent)
        sent.add_done_callback(sending.discard)

    def heard(incoming: Incoming[KeepTrace]) -> None:
        tracing.keep(int(incoming.message.trace_id, 16))

    if tracing.tell_kept(tell):
        await bus.subscribe(bus.subjects.keep_trace, KeepTrace, heard)
