"""Child processes: nothing of them outlives a stop, a kill, or this process."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.runtime import launcher
from services.supervisor.child import Child, Program
from services.supervisor.child_log import ChildLog

PYTHON = (sys.executable, "-I", "-S", "-c")
STUBBORN = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
WITH_GRANDCHILD = """
import subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"])
print(grandchild.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def start(tmp_path):
    children = []

    async def start(*argv, nice=0):
        log = ChildLog(tmp_path / "child.log")
        child = Child(Program("child", argv, dict(os.environ), nice), log)
        children.append(child)
        await child.start()
        return child

    yield start
    for child in children:
        child.kill()


async def first_line(child):
    async with asyncio.timeout(10):
        while not child.log.tail(1):
            await asyncio.sleep(0.01)
    return child.log.tail(1)[0]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


async def gone(pid, timeout_s=5.0):
    async with asyncio.timeout(timeout_s):
        while is_alive(pid):
            await asyncio.sleep(0.01)
    return True


async def test_exit_status_and_output_are_kept(start):
    child = await start(*PYTHON, "import sys; print('last words'); sys.exit(3)")
    assert await child.wait() == 3
    assert child.log.tail(1) == ["last words"]
    assert not child.is_running


async def test_a_program_that_cannot_be_run_says_so(start):
    child = await start("/no/such/program")
    assert await child.wait() == 127
    assert "cannot run /no/such/program" in child.log.tail(1)[0]


async def test_the_process_keeps_the_id_of_the_launcher_and_gets_its_niceness(start):
    child = await start(*PYTHON, "import os; print(os.getpid(), os.nice(0), flush=True)", nice=7)
    assert (await first_line(child)).split() == [str(child.pid), str(min(os.nice(0) + 7, 19))]


async def test_sigterm_ends_it_within_the_grace(start):
    child = await start(*PYTHON, "import time; print('up', flush=True); time.sleep(60)")
    await first_line(child)
    started_s = time.monotonic()
    await child.stop(10.0)
    assert await child.wait() == -signal.SIGTERM
    assert time.monotonic() - started_s < 3


async def test_one_that_ignores_sigterm_is_killed_after_the_grace(start):
    child = await start(*PYTHON, STUBBORN)
    await first_line(child)
    await child.stop(0.2)
    assert await child.wait() == -signal.SIGKILL


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_what_it_started_goes_with_it(start, end):
    child = await start(*PYTHON, WITH_GRANDCHILD)
    grandchild = int(await first_line(child))
    if end == "stop":
        await child.stop(5.0)
    else:
        child.kill()
        await child.wait()
    assert await gone(grandchild)


async def test_stopping_one_that_never_started_or_has_ended_does_nothing(tmp_path, start):
    await Child(Program("x", ("true",), {}), ChildLog(tmp_path / "x.log")).stop(1.0)
    child = await start("true")
    await child.wait()
    await child.stop(1.0)
    child.kill()


PARENT = """
import subprocess, sys, time
from services.runtime import launcher
argv = launcher.wrap([sys.executable, "-I", "-S", "-c", "import time; print('up', flush=True); time.sleep(60)"])
child = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


async def test_a_child_dies_with_its_parent_even_by_sigkill():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    child = int(parent.stdout.readline())
    assert is_alive(child)
    parent.kill()
    parent.wait()
    assert await gone(child)


def test_a_launcher_whose_parent_has_died_already_starts_nothing(tmp_path):
    argv = launcher.wrap(["touch", str(tmp_path / "started")])
    argv[argv.index("--parent") + 1] = "1"
    assert subprocess.run(argv, check=False).returncode == 1
    assert not (tmp_path / "started").exists()
