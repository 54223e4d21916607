"""configs/nats.conf for real: every service works with its own user, and none may do another one's job."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import nats
import pytest

from schemas.control import PATH_ROLES
from services.runtime import launcher

ROOT = Path(__file__).parents[2]
ROLES = ("cache_manager", "executor", "scheduler", "tokenizer", "gateway", "console")
USERS = (*ROLES, "client", "operator")
START_TIMEOUT_S = 60.0
SECOND = "two"
"""Prefix of the second pipeline on the same server."""

FORBIDDEN = {
    "gateway": ("nj.v1.exec.executor-0.plan", "nj.v1.out.request", "nj.v1.work.smol.normal", "$KV.nj_lease.executor-0"),
    "tokenizer": ("nj.v1.exec.executor-0.plan", "$KV.nj_lease.executor-0", "$JS.API.STREAM.DELETE.NJ_OUT"),
    "scheduler": ("nj.v1.out.request", "nj.v1.exec.executor-0.result", "$JS.API.STREAM.PURGE.NJ_WORK"),
    "cache_manager": (
        "nj.v1.out.request",
        "nj.v1.exec.executor-0.plan",
        "$KV.nj_lease.executor-0",
        "$KV.nj_lease.pause.smol",
    ),
    "executor": (
        "nj.v1.control.scheduler",
        "nj.v1.out.request",
        "nj.v1.generate.smol",
        "nj.v1.work.smol.normal",
        "nj.v1.exec.executor-0.plan",
    ),
    "console": ("nj.v1.out.request", "nj.v1.generate.smol", "nj.v1.spans.executor", "$KV.nj_lease.executor-0"),
    "two-executor": ("nj.v1.exec.executor-0.result", "two.v1.out.request", "two.v1.exec.executor-0.plan"),
    "two-scheduler": ("nj.v1.detok.tokenizer-0", "$KV.nj_lease.executor-0", "$JS.ACK.NJ_WORK.consumer.1.1.1.1.1"),
    "client": (
        "nj.v1.control.scheduler",
        "nj.v1.out.request",
        "nj.v1.work.smol.normal",
        "$KV.nj_registry.executor-0",
        "$KV.nj_config.executor-0",
    ),
}


def password(user: str) -> str:
    """One that nats-server would read as a number if it were not quoted; both pipelines' services share theirs."""
    return f"1e5{len(user.removeprefix(f'{SECOND}-'))}"


@dataclass
class Guarded:
    """A nats-server with the shipped users, and those of a second prefix; every service of one deployment on it."""

    directory: Path
    port: int = 0
    http_url: str = ""

    def url(self, user: str) -> str:
        return f"nats://{user}:{password(user)}@127.0.0.1:{self.port}"

    def environment(self, user: str) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), "NATTERJACK_BUS__URL": self.url(user)}

    def server_log(self) -> str:
        return (self.directory / "nats.log").read_text()

    def start(self, stack: contextlib.ExitStack, user: str, *options: str) -> Path:
        """Run a service as its user until the stack ends, and return where its log is."""
        role, log = user.rpartition("-")[2], self.directory / f"{user}.log"
        settings = ("-c", str(ROOT / "configs/echo.yaml"), "--set", "gateway.port=0", "--set", "console.port=0")
        process = subprocess.Popen(
            launcher.wrap([sys.executable, "-m", f"services.{role}", *settings, "--instance", f"{role}-0", *options]),
            env=self.environment(user),
            stderr=stack.enter_context(log.open("wb")),
        )
        stack.callback(end, process)
        return log


def shipped_configuration() -> str:
    """The shipped file with a second prefix, as the shipped script writes it; it leaves the first one's users alone."""
    script = str(ROOT / "configs/docker/second_prefix.sh")
    text = subprocess.run(["sh", script, SECOND], capture_output=True, text=True, check=True).stdout
    users, people = (ROOT / "configs" / "nats.conf").read_text().split("    # ---- people")
    assert text.startswith(users)
    assert text.endswith(people)
    return text


def configuration(directory: Path) -> Path:
    """The shipped users, on free ports and in a directory of ours."""
    text = shipped_configuration()
    for shipped, ours in {
        "port: 4222": 'listen: "127.0.0.1:-1"',
        "http: 8222": 'http: "127.0.0.1:-1"',
        "store_dir: /data": f"store_dir: {json.dumps(str(directory / 'store'))}",
    }.items():
        assert shipped in text
        text = text.replace(shipped, ours)
    path = directory / "nats.conf"
    path.write_text(text)
    return path


def start_server(directory: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    binary = str(Path(sys.executable).with_name("nats-server"))
    files = ["--ports_file_dir", str(directory), "-l", str(directory / "nats.log")]
    return subprocess.Popen(
        launcher.wrap([binary, "-c", str(configuration(directory)), *files]), env={**os.environ, **environment}
    )


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    deployment = Guarded(tmp_path_factory.mktemp("guarded"))
    passwords = {f"NJ_PASSWORD_{user.upper()}": f'"{password(user)}"' for user in USERS}
    with contextlib.ExitStack() as stack:
        server = start_server(deployment.directory, passwords)
        stack.callback(end, server)
        ports = deployment.directory / f"nats-server_{server.pid}.ports"
        wait_until(lambda: ports.exists() and ports.read_text().endswith("}"))
        deployment.port = int(json.loads(ports.read_text())["nats"][0].rpartition(":")[2])
        for role in ROLES:
            deployment.start(stack, role)
        wait_until(lambda: "serving HTTP on " in (deployment.directory / "gateway.log").read_text())
        deployment.http_url = (
            (deployment.directory / "gateway.log").read_text().partition("serving HTTP on ")[2].split()[0]
        )
        wait_until(lambda: httpx.get(f"{deployment.http_url}/ready").status_code == 200)
        yield deployment


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until(condition: object, timeout_s: float = START_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def natterjack(deployment: Guarded, *arguments: str, user: str = "client") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.cli", *arguments],
        env=deployment.environment(user),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_missing_password_ends_the_servers_start(tmp_path: Path) -> None:
    passwords = {f"NJ_PASSWORD_{user.upper()}": '"secret"' for user in USERS if user != "executor"}
    server = start_server(tmp_path, passwords)
    assert server.wait(20) != 0


def test_nobody_gets_in_without_a_password(guarded: Guarded) -> None:
    async def connect(url: str) -> None:
        client = nats.NATS()
        await client.connect(url, allow_reconnect=False, connect_timeout=2, error_cb=ignore)
        await client.close()

    for url in (f"nats://127.0.0.1:{guarded.port}", f"nats://client:wrong@127.0.0.1:{guarded.port}"):
        with pytest.raises(nats.errors.Error, match="Authorization"):
            asyncio.run(connect(url))


def test_requests_pass_over_http_and_nats_and_no_service_lacks_a_permission(guarded: Guarded) -> None:
    url, body = f"{guarded.http_url}/v1/completions", {"model": "smol", "prompt": "Hello", "max_tokens": 8}
    assert httpx.post(url, json=body).json()["usage"]["completion_tokens"] == 8
    with httpx.stream("POST", url, json=body | {"max_tokens": 4000, "stream": True}) as stream:
        next(stream.iter_lines())  # and then the client leaves, which cancels
    for arguments in (("generate", "Hello", "--max-tokens", "8"), ("status",)):
        done = natterjack(guarded, *arguments)
        assert done.returncode == 0, done.stderr
    assert asyncio.run(ask_over_nats(guarded.url("client"))) == 8
    responses = f"{guarded.http_url}/v1/responses"
    kept = httpx.post(responses, json={"input": "Hello", "max_output_tokens": 8}).json()
    assert httpx.get(f"{responses}/{kept['id']}").json()["status"] == "incomplete"
    assert httpx.delete(f"{responses}/{kept['id']}").json()["deleted"]
    time.sleep(1.0)  # for the cancellation and the heartbeats
    assert "Violation" not in guarded.server_log()


def test_a_client_may_look_on(guarded: Guarded) -> None:
    body = {"model": "smol", "prompt": "Hello", "max_tokens": 8}

    def is_traced() -> bool:
        name = httpx.post(f"{guarded.http_url}/v1/completions", json=body).json()["id"]
        time.sleep(1.0)  # spans are sent twice a second
        return natterjack(guarded, "trace", name).returncode == 0

    wait_until(is_traced)
    top = natterjack(guarded, "top", "--json")
    assert json.loads(top.stdout)["health"] == "ok", top.stderr
    assert "Violation" not in guarded.server_log()


async def ask_over_nats(url: str) -> int:
    """Ask with nothing but a NATS client; returns the number of tokens."""
    async with await nats.connect(url) as client:
        inbox = client.new_inbox()
        replies = await client.subscribe(inbox)
        body = json.dumps({"prompt": "Hello", "max_tokens": 8}).encode()
        await client.publish("nj.v1.generate.smol", body, reply=inbox)
        while True:
            chunk = json.loads((await replies.next_msg(timeout=10)).data)
            if chunk.get("final"):
                return int(chunk["usage"]["completion_tokens"])


def test_operator_is_obeyed_by_every_service(guarded: Guarded) -> None:
    for command in ("pause", "resume"):
        done = natterjack(guarded, command, user="operator")
        assert done.returncode == 0, done.stderr
    for role in ROLES:  # everyone answers, though it has no such command
        done = natterjack(guarded, "control", "flush-cache", role, user="operator")
        assert f"{role}-0: " in done.stdout + done.stderr
    assert "Violation" not in guarded.server_log()


def test_a_second_pipeline_under_another_prefix_is_shadowed(guarded: Guarded) -> None:
    """The services of both have only what they need; the shadow looks on as an operator."""
    url, body = f"{guarded.http_url}/v1/completions", {"model": "smol", "prompt": "Hello", "max_tokens": 8, "n": 2}
    with contextlib.ExitStack() as stack:
        for role in (*PATH_ROLES, "gateway"):
            guarded.start(stack, f"{SECOND}-{role}", "--set", f"bus.prefix={SECOND}")
        status = ("status", "--wait", "40", "--set", f"bus.prefix={SECOND}")
        assert natterjack(guarded, *status, user="operator").returncode == 0
        shadow = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "shadow", "1.0", "--to", SECOND, "--requests", "3", "--json"],
            env=guarded.environment("operator"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        stack.callback(end, shadow)
        assert shadow.stderr is not None
        assert "Mirroring" in shadow.stderr.readline()
        for _ in range(3):
            assert httpx.post(url, json=body, timeout=30).status_code == 200
        found = json.loads(shadow.communicate(timeout=60)[0])
    assert (found["equal"], found["num_agreed"], found["num_tokens"]) == (True, 3, 3 * 2 * 8)
    assert "Violation" not in guarded.server_log()


@pytest.mark.parametrize("prefix", ["", "nj", "two/../..", "Two", "2"])
def test_what_is_no_second_prefix_gets_no_configuration(prefix: str) -> None:
    done = subprocess.run(["sh", str(ROOT / "configs/docker/second_prefix.sh"), prefix], capture_output=True, text=True)
    assert (done.returncode != 0, done.stdout, "second prefix" in done.stderr) == (True, "", True)


@pytest.mark.parametrize("user", FORBIDDEN)
def test_a_user_may_not_do_the_job_of_another(guarded: Guarded, user: str) -> None:
    async def refused() -> list[str]:
        errors: list[str] = []

        async def note(error: Exception) -> None:
            errors.append(str(error).lower())

        async with await nats.connect(guarded.url(user), error_cb=note) as client:
            for subject in FORBIDDEN[user]:
                await client.publish(subject, b"{}")
            await client.flush()
            await asyncio.sleep(0.1)
        return errors

    errors = asyncio.run(refused())
    assert "Violation" in guarded.server_log()
    for subject in FORBIDDEN[user]:
        assert any(f'publish to "{subject.lower()}"' in error for error in errors), (subject, errors)


async def ignore(error: Exception) -> None:
    """The client prints what nobody takes."""
