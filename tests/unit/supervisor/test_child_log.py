"""The last words of a child."""

from services.supervisor import child_log
from services.supervisor.child_log import ChildLog


def test_lines_are_kept_in_memory_and_in_the_file(tmp_path):
    log = ChildLog(tmp_path / "x.log")
    log.write(b"one\ntw")
    log.write(b"o\n\nthree")
    assert log.tail(2) == ["two", "three"]
    assert (tmp_path / "x.log").read_bytes() == b"one\ntwo\n\nthree"
    log.forget()
    assert log.tail(5) == []
    log.close()


def test_neither_file_nor_memory_grows_without_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(child_log, "MAX_FILE_BYTES", 10_000)
    log = ChildLog(tmp_path / "x.log")
    for number in range(5000):
        log.write(f"line {number}\n".encode())
    log.write(b"x" * 100_000)
    log.close()
    assert len(log.tail(10_000)) <= child_log.KEPT_LINES + 1
    assert len(log.tail(1)[0]) == child_log.MAX_LINE_BYTES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.log", "x.log.1"]


def test_bytes_that_are_no_text_are_shown_all_the_same(tmp_path):
    log = ChildLog(tmp_path / "x.log")
    log.write(b"\xff\xfe oops\n")
    assert "oops" in log.tail(1)[0]
    log.close()
