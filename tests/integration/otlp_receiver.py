"""A real OTLP/HTTP receiver for tests, and what it says of traces."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Receiver:
    """An OTLP/HTTP receiver that keeps what it gets: (service, span)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/v1/traces":
                    receiver.take(body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(names["service.name"], span) for span in scope.spans]

    def trace(self, trace_id: str) -> list[tuple[str, Span]]:
        """Return the spans of one trace."""
        return [(service, span) for service, span in self.spans if span.trace_id.hex() == trace_id]


def seconds(span: Span) -> float:
    """Return how long a span took."""
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def attribute(span: Span, key: str) -> str | int | float | bool | None:
    """Return an attribute's value."""
    for found in span.attributes:
        if found.key == key:
            return getattr(found.value, found.value.WhichOneof("value") or "string_value")
    return None
