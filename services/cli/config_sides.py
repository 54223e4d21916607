"""Reads one side of `config diff`: a pipeline file, a recording, or a running deployment."""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from schemas.control import EffectiveConfig, Registration
from services.cli.options import load_pipeline
from services.cli.recorded import running_deployment
from services.recording.capture_file import Capture, CaptureError, is_capture
from services.recording.configuration import Configuration, of_file, of_instances
from services.recording.message_kinds import message_of
from services.runtime.settings import BusSettings, masked

SCHEMES = ("nats", "tls", "ws", "wss")


async def read_side(side: str, overrides: Sequence[str]) -> Configuration:
    """Return a side's configuration; `overrides` and the environment count for a file.

    Raises CaptureError, Unavailable.
    """
    if urlsplit(side).scheme in SCHEMES:
        return await _of_deployment(side)
    path = Path(side)
    if is_capture(path):
        return _of_recording(path)
    return of_file(f"{side} with this environment", load_pipeline(path, overrides).shown())


def _of_recording(path: Path) -> Configuration:
    """The newest entry of each instance counts."""
    configs: dict[str, EffectiveConfig] = {}
    registrations: dict[str, Registration] = {}
    for captured in Capture(path).messages():
        if captured.schema is None:
            continue
        if (config := message_of(captured, EffectiveConfig)) is not None:
            configs[config.instance] = config
        elif (registration := message_of(captured, Registration)) is not None:
            registrations[registration.instance] = registration
    if not configs:
        raise CaptureError(
            f"{path} holds no effective configuration: record without --filter, or name effective_config."
        )
    return of_instances(f"recording {path}", configs.values(), registrations.values())


async def _of_deployment(url: str) -> Configuration:
    """`nats://host:port/PREFIX` names a deployment by its prefix, `nj` unless given; only instances that live count."""
    parts = urlsplit(url)
    prefix = parts.path.strip("/") or BusSettings().prefix
    settings = BusSettings(url=urlunsplit(parts._replace(path="")), prefix=prefix)
    async with running_deployment(settings) as bus:
        entries = await bus.kv_entries(bus.subjects.registry, Registration)
        alive = {entry.message.instance: entry.message for entry in entries}
        configs = [entry.message for entry in await bus.kv_entries(bus.subjects.config, EffectiveConfig)]
    return of_instances(
        f"deployment {masked(url)}", [config for config in configs if config.instance in alive], alive.values()
    )
