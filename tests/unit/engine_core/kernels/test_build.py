"""The build, with a script in the compiler's place: what is compiled when, and what is left behind."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from engine_core.kernels import build
from engine_core.kernels.build import KernelsUnavailableError, library_for
from engine_core.kernels.instruction_sets import INSTRUCTION_SETS

VARIANT = INSTRUCTION_SETS["avx2"]

COMPILER = """#!/bin/sh
echo "$@" >> {log}
[ "$1" = --version ] && echo "stand-in {version}" && exit 0
{behaviour}
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""


@pytest.fixture(autouse=True)
def nothing_packaged(tmp_path, monkeypatch):
    """The installation under test may have its kernels in the package."""
    monkeypatch.setattr(build, "PACKAGED_DIR", tmp_path / "packaged")


@pytest.fixture
def make_compiler(tmp_path):
    """Writes a stand-in compiler → its path; its calls are lines of `<path>.log`."""

    def make(behaviour: str = "", version: str = "1.0") -> str:
        path = tmp_path / f"compiler{version}"
        path.write_text(COMPILER.format(log=f"{path}.log", behaviour=behaviour, version=version))
        path.chmod(0o755)
        return str(path)

    return make


def calls(compiler: str) -> list[str]:
    return [line for line in Path(f"{compiler}.log").read_text().splitlines() if line != "--version"]


def test_first_use_compiles_with_a_notice_and_later_uses_do_not(tmp_path, make_compiler, caplog):
    compiler = make_compiler()
    with caplog.at_level(logging.WARNING):
        path = library_for(VARIANT, tmp_path / "cache", compiler)
    assert path.read_text() == "compiled\n"
    assert "compiling the native kernels (avx2) once" in caplog.text
    first = calls(compiler)
    assert len(first) == len(build.source_files()) + 1
    assert library_for(VARIANT, tmp_path / "cache", compiler) == path
    assert calls(compiler) == first


def test_another_compiler_or_variant_gets_a_library_of_its_own(tmp_path, make_compiler):
    one, other = make_compiler(version="1.0"), make_compiler(version="2.0")
    paths = {
        library_for(VARIANT, tmp_path, one),
        library_for(VARIANT, tmp_path, other),
        library_for(INSTRUCTION_SETS["avx512_vnni"], tmp_path, one),
    }
    assert len(paths) == 3


def test_changed_sources_are_compiled_again(tmp_path, make_compiler, monkeypatch):
    sources = tmp_path / "source"
    sources.mkdir()
    (sources / "one.cpp").write_text("int one;")
    monkeypatch.setattr(build, "SOURCE_DIR", sources)
    compiler = make_compiler()
    path = library_for(VARIANT, tmp_path / "cache", compiler)
    (sources / "header.h").write_text("// changed")
    assert library_for(VARIANT, tmp_path / "cache", compiler) != path


def test_a_failing_compiler_is_quoted_and_leaves_nothing(tmp_path, make_compiler):
    compiler = make_compiler(behaviour='echo "no such option" >&2; exit 1')
    with pytest.raises(KernelsUnavailableError, match="no such option"):
        library_for(VARIANT, tmp_path / "cache", compiler)
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"] == []


def test_without_a_compiler_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelsUnavailableError, match=r"apt install g\+\+"):
        library_for(VARIANT, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(tmp_path, make_compiler):
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelsUnavailableError, match="cannot be compiled into"):
        library_for(VARIANT, tmp_path / "file" / "cache", make_compiler())


def test_a_library_compiled_into_the_package_is_preferred(tmp_path, make_compiler, monkeypatch):
    packaged = build.compile_packaged(make_compiler())
    assert [path.name.partition("-")[0] for path in packaged] == list(INSTRUCTION_SETS)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert library_for(VARIANT, tmp_path / "cache") in packaged


def test_processes_that_build_at_once_compile_once(tmp_path, make_compiler):
    compiler = make_compiler(behaviour="sleep 0.05")
    program = (
        "import sys; from pathlib import Path; from engine_core.kernels import build;"
        "from engine_core.kernels.instruction_sets import INSTRUCTION_SETS;"
        "build.PACKAGED_DIR = Path(sys.argv[1]) / 'packaged';"
        "print(build.library_for(INSTRUCTION_SETS['avx2'], Path(sys.argv[1]), sys.argv[2]).read_text(), end='')"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path / "cache"), compiler]
    processes = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["compiled\n"] * 3
    assert len(calls(compiler)) == len(build.source_files()) + 1
