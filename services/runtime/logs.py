"""A process's logs: lines for a person or JSON, each with the ids of its request and trace. Never with content."""

import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Literal, get_args

from opentelemetry import trace

from services.runtime.settings import TelemetrySettings

LogLevel = Literal["debug", "info", "warning", "error"]
LOG_LEVELS: tuple[str, ...] = get_args(LogLevel)
CHATTY = ("httpx", "httpcore", "urllib3", "asyncio", "uvicorn.access")
"""Libraries whose informational lines say nothing of requests."""
SELDOM, SELDOM_S = "opentelemetry.", 60.0
"""While its collector does not answer, OpenTelemetry complains several times a second."""

log = logging.getLogger(__name__)

_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


def setup_logs(settings: TelemetrySettings, instance: str) -> None:
    """Send this process's logs to stderr, as lines for a person or as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(instance) if settings.log_format == "json" else HumanFormatter(instance))
    handler.addFilter(Seldom(SELDOM, SELDOM_S))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    for chatty in CHATTY:
        logging.getLogger(chatty).setLevel(logging.WARNING)


def set_log_level(level: str) -> None:
    """Change the least level that this process logs, while it runs; raises ValueError for one that does not exist."""
    if level not in LOG_LEVELS:
        raise ValueError(f"There is no log level {level!r}; choose one of {', '.join(LOG_LEVELS)}.")
    logging.getLogger().setLevel(level.upper())
    log.warning("the log level is now %s", level)


@contextlib.contextmanager
def request_logging(request_id: str) -> Iterator[None]:
    """Log the block with the request's id."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


def _ids(record: logging.LogRecord) -> dict[str, str]:
    ids: dict[str, str] = {}
    if (request_id := getattr(record, "request_id", None) or _request_id.get()) is not None:
        ids["request_id"] = request_id
    span_context = trace.get_current_span().get_span_context()
    if span_context.is_valid:
        ids["trace_id"] = f"{span_context.trace_id:032x}"
    return ids


class Seldom(logging.Filter):
    """Lets each of the loggers below a name say something once in `period_s`, and everyone else everything."""

    def __init__(self, name_prefix: str, period_s: float) -> None:
        super().__init__()
        self._prefix, self._period_s = name_prefix, period_s
        self._said_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(self._prefix):
            return True
        if record.created - self._said_s.get(record.name, -math.inf) < self._period_s:
            return False
        self._said_s[record.name] = record.created
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, instance: str) -> None:
        super().__init__()
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "instance": self._instance,
            "logger": record.name,
            "message": record.getMessage(),
            **_ids(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class HumanFormatter(logging.Formatter):
    """One line for a person."""

    def __init__(self, instance: str) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        ids = " ".join(f"{key}={value}" for key, value in _ids(record).items())
        return f"[{self._instance}] {super().format(record)}{' ' + ids if ids else ''}"
