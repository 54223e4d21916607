"""One deployment per state directory."""

import subprocess
import sys
from pathlib import Path

import pytest

from services.runtime.settings import BusSettings
from services.supervisor.events import DeploymentError, StateDirTaken
from services.supervisor.state_dir import default_path, hold_state_dir, temporary_state_dir

HOLD = """
import sys, time
from pathlib import Path
from services.supervisor.state_dir import hold_state_dir
with hold_state_dir(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def holding_process(path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert process.stdout.readline() == b"held\n"
    return process


def test_a_second_holder_is_told_who_has_it(tmp_path):
    process = holding_process(tmp_path / "s")
    try:
        expected = rf"process {process.pid}\).*bus\.prefix"
        with pytest.raises(StateDirTaken, match=expected), hold_state_dir(tmp_path / "s"):
            pass
    finally:
        process.kill()
        process.wait()


def test_a_lock_whose_holder_was_killed_is_free(tmp_path):
    process = holding_process(tmp_path / "s")
    process.kill()
    process.wait()
    with hold_state_dir(tmp_path / "s") as state:
        assert state.logs.is_dir()


def test_a_directory_that_cannot_be_made_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DeploymentError, match=r"supervisor\.state_dir"), hold_state_dir(tmp_path / "file" / "s"):
        pass


def test_a_temporary_one_leaves_nothing():
    with temporary_state_dir() as state:
        (state.path / "x").write_text("y")
    assert not state.path.exists()


@pytest.mark.parametrize(
    ("bus", "name"),
    [
        (BusSettings(), "nj-4222"),
        (BusSettings(prefix="b", port=4333), "b-4333"),
        (BusSettings(url="nats://user:secret@host:4222"), "nj-host-4222"),
        (BusSettings(url="nats://host"), "nj-host"),
    ],
)
def test_deployments_have_directories_of_their_own_by_default(bus, name):
    assert default_path(bus).name == name
