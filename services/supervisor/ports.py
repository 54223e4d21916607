"""Whether the ports that a deployment needs are free: asked before anything starts."""

import errno
import socket

from services.supervisor.events import DeploymentError, PortTaken


def check_port_free(host: str, port: int, key: str) -> None:
    """Raise PortTaken when somebody listens there, DeploymentError for a bad address; 0 is always free."""
    if port:
        _bind(host, port, key)


ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 (recognised, not bound)


def reachable_host(host: str) -> str:
    """Return where a client on this machine reaches a server that listens on `host`."""
    return ANY_ADDRESS.get(host, host)


def free_port(host: str, key: str) -> int:
    """Return a port that is free now: for a service that must keep its port over restarts."""
    return _bind(host, 0, key)


def _bind(host: str, port: int, key: str) -> int:
    section = key.partition(".")[0]
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"Port {port} on {host} is taken ({key}). If that is another deployment of yours, "
                f"use it or stop it; otherwise choose another port: --set {key}=PORT (0: any free one)."
            ) from None
        raise DeploymentError(f"Cannot listen on {host}:{port} ({section}.host, {key}): {error.strerror}.") from None
