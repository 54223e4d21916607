"""The file: what is written is read; what is broken, old or foreign is named."""

import json
import subprocess
from pathlib import Path

import pytest
import zstandard

from services.recording.capture_file import Capture, Captured, CaptureError, CaptureWriter, Note, is_capture
from tests.unit.recording.captured_traffic import HEADER, one_request, write

VERSION_1 = Path(__file__).with_name("version_1.jsonl")
FULL = Captured(
    1000.25,
    "nj.v1.live.r",
    {"text": "Grüße 🐸"},
    schema="output_chunk/1",
    trace="00-aa-bb-01",
    reply="_INBOX.1",
    answers="nj.v1.generate.smol",
    is_stored=True,
    headers={"Nats-Sequence": "4"},
)


def test_what_is_written_is_read(tmp_path):
    note = Note(1001.0, "missing", {"num_messages": 3})
    path = write(tmp_path / "a.jsonl.zst", [FULL, Captured(1.0, "s", None), note])
    capture = Capture(path)
    assert list(capture) == [FULL, Captured(1.0, "s", None), note]
    assert list(capture.messages()) == [FULL, Captured(1.0, "s", None)]
    assert capture.header == HEADER
    assert (capture.num_unreadable, capture.is_truncated) == (0, False)


def test_zstdcat_reads_it(tmp_path):
    path = write(tmp_path / "a.jsonl.zst", one_request())
    text = zstandard.ZstdDecompressor().stream_reader(path.open("rb")).read().decode()
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines[0]["capture"] == 1
    assert [line["schema"] for line in lines[1:4]] == ["generate_request/1", "work_item/1", "accepted/1"]


def test_a_file_of_a_killed_recorder_is_read_up_to_the_last_flush(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    writer = CaptureWriter(path, HEADER)
    writer.open()
    for captured in one_request():
        writer.write(captured)
        writer.flush()
    capture = Capture(path)
    assert len(list(capture)) == 6
    damaged = tmp_path / "b.jsonl.zst"
    damaged.write_bytes(path.read_bytes()[:-20])
    assert len(list(Capture(damaged))) < 6
    writer.close()


def test_a_line_that_breaks_off_is_noticed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(HEADER.model_dump_json() + '\n{"t": 1, "subject": "s", "body": 1}\n{"t": 2, "subj')
    capture = Capture(path)
    assert len(list(capture)) == 1
    assert capture.is_truncated


def test_lines_that_mean_nothing_are_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(HEADER.model_dump_json() + '\nx\n{"t": 1}\n[]\n{"t": 1, "subject": "s", "body": 1}\n')
    capture = Capture(path)
    assert len(list(capture)) == 1
    assert capture.num_unreadable == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a recording"),
        (b"model: {}\n", "not a recording"),
        (b'{"x": 1}\n', "not a recording"),
        (b'{"capture": 99}\n', "version 99"),
        (b'{"capture": 1}\n', "damaged"),
        (b"\x28\xb5\x2f\xfdgarbage", "not a recording"),
    ],
)
def test_what_is_no_usable_recording_is_named(tmp_path, content, words):
    path = tmp_path / "a"
    path.write_bytes(content)
    with pytest.raises(CaptureError, match=words):
        Capture(path)


def test_a_missing_file_and_an_impossible_path_are_named(tmp_path):
    with pytest.raises(CaptureError, match="No such file"):
        Capture(tmp_path / "absent")
    with pytest.raises(CaptureError, match="Cannot write"):
        write(tmp_path / "absent" / "a", [])
    assert not is_capture(tmp_path / "absent")


def test_a_recording_is_told_from_a_pipeline_file(tmp_path):
    assert is_capture(write(tmp_path / "a.jsonl.zst", []))
    (tmp_path / "b.yaml").write_text("model: {name: smol}\n")
    assert not is_capture(tmp_path / "b.yaml")


def test_recordings_of_version_1_still_load():
    """The file stays as it is; a change of the format adds an upgrade and another file beside it."""
    capture = Capture(VERSION_1)
    assert is_capture(VERSION_1)
    assert (capture.header.capture, capture.header.source, capture.header.redaction) == (1, "wiretap", "none")
    assert [line.schema if isinstance(line, Captured) else line.kind for line in capture] == [
        "generate_request/1",
        "accepted/1",
        "output_chunk/1",
        "end",
    ]


def test_a_writer_that_is_not_open_refuses(tmp_path):
    with pytest.raises(ValueError, match="not open"):
        CaptureWriter(tmp_path / "a", HEADER).write(FULL)


@pytest.mark.skipif(not Path("/usr/bin/zstdcat").exists(), reason="no zstdcat here")
def test_the_command_zstdcat_reads_it(tmp_path):
    path = write(tmp_path / "a.jsonl.zst", [FULL])
    out = subprocess.run(["/usr/bin/zstdcat", path], capture_output=True, check=True).stdout
    assert len(out.splitlines()) == 2
