"""Ports are checked before anything starts."""

import socket

import pytest

from services.supervisor.events import DeploymentError, PortTaken
from services.supervisor.ports import check_port_free, free_port, reachable_host


def test_a_taken_port_is_named_with_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"Port {port} on 127\.0\.0\.1 is taken.*--set bus\.port=PORT"):
            check_port_free("127.0.0.1", port, "bus.port")


def test_a_free_port_and_any_port_pass():
    check_port_free("127.0.0.1", free_port("127.0.0.1", "bus.port"), "bus.port")
    check_port_free("127.0.0.1", 0, "bus.port")


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_is_not_ours_is_an_error(host):
    with pytest.raises(DeploymentError, match=r"Cannot listen on .*gateway\.host"):
        check_port_free(host, 8000, "gateway.port")


def test_a_server_on_every_address_is_reached_by_loopback():
    assert reachable_host("0.0.0.0") == "127.0.0.1"
    assert reachable_host("10.1.2.3") == "10.1.2.3"
