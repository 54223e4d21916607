"""Compiling the kernels: at first use into a cache, or ahead of time into the package.

Owns the names of the compiled files, which say what they were made from, so that a stale one is never loaded. A file
appears complete or not at all; processes that build at the same time wait for one another.
"""

import hashlib
import logging
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock

from engine_core.errors import ModelError
from engine_core.kernels.instruction_sets import INSTRUCTION_SETS, InstructionSet

log = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "source"
PACKAGED_DIR = Path(__file__).parent / "compiled"
"""Where a package build leaves the libraries."""

COMPILERS = ("g++", "clang++", "c++")
# No -ffast-math: NaN must be seen, and the order of sums is part of the result. No contraction: which multiplications
# and additions are fused is written in the source, so that all variants and compilers agree.
COMMON_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno")
BUILD_TIMEOUT_S = 300.0


class KernelsUnavailableError(ModelError):
    """The native kernels cannot run here: no suitable processor, or no compiler; the message says which."""


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "natterjack" / "kernels"


def source_files() -> list[Path]:
    return sorted(SOURCE_DIR.glob("*.cpp"))


def source_digest(instruction_set: InstructionSet) -> str:
    """Twelve hex digits of everything that a library of this variant is made from but the compiler."""
    digest = hashlib.sha256(" ".join((*COMMON_FLAGS, *instruction_set.compiler_flags)).encode())
    for path in sorted(SOURCE_DIR.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def find_compiler(names: Iterable[str] = COMPILERS) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


def library_for(instruction_set: InstructionSet, cache_dir: Path | None = None, compiler: str | None = None) -> Path:
    """The compiled library of this variant: from the package, from the cache, or compiled now into the cache.

    Raises KernelsUnavailableError when it must be compiled and cannot be.
    """
    packaged = packaged_library(instruction_set)
    if packaged.exists():
        return packaged
    compiler = compiler or require_compiler()
    folder = cache_dir or default_cache_dir()
    target = folder / f"{packaged.stem}-{compiler_digest(compiler)}.so"
    if target.exists():
        return target
    compile_into_cache(instruction_set, target, compiler)
    return target


def check_obtainable(instruction_set: InstructionSet) -> None:
    """Raise KernelsUnavailableError where this variant is not compiled and cannot be."""
    if not packaged_library(instruction_set).exists():
        require_compiler()


def packaged_library(instruction_set: InstructionSet) -> Path:
    return PACKAGED_DIR / f"{instruction_set.name}-{source_digest(instruction_set)}.so"


def require_compiler() -> str:
    compiler = find_compiler()
    if compiler is None:
        raise KernelsUnavailableError(
            f"the native kernels are not compiled and there is no C++ compiler ({', '.join(COMPILERS)}); "
            "install one (Debian: apt install g++), or use the reference engine"
        )
    return compiler


def compiler_digest(compiler: str) -> str:
    return hashlib.sha256(run_compiler([compiler, "--version"]).encode()).hexdigest()[:8]


def compile_into_cache(instruction_set: InstructionSet, target: Path, compiler: str) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KernelsUnavailableError(
            f"the native kernels cannot be compiled into {target.parent}: {error.strerror}; "
            "make it writable or set another kernel cache directory"
        ) from error
    with FileLock(target.with_suffix(".lock"), timeout=BUILD_TIMEOUT_S):
        if target.exists():
            return
        log.warning("compiling the native kernels (%s) once, into %s", instruction_set.name, target)
        begin = time.monotonic()
        compile_library(instruction_set, target, compiler)
        log.warning("compiled the native kernels in %.1f s", time.monotonic() - begin)


def compile_packaged(compiler: str | None = None) -> list[Path]:
    """Compile every variant into the package, for a package build; returns the files.

    Raises KernelsUnavailableError without a compiler.
    """
    compiler = compiler or find_compiler()
    if compiler is None:
        raise KernelsUnavailableError(f"no C++ compiler ({', '.join(COMPILERS)})")
    shutil.rmtree(PACKAGED_DIR, ignore_errors=True)  # what an older source left there
    PACKAGED_DIR.mkdir()
    targets: list[Path] = []
    for variant in INSTRUCTION_SETS.values():
        targets.append(packaged_library(variant))
        compile_library(variant, targets[-1], compiler)
    return targets


def compile_library(instruction_set: InstructionSet, target: Path, compiler: str) -> None:
    """Compile all sources and link them to `target`, which is replaced in one piece."""
    flags = [*COMMON_FLAGS, *instruction_set.compiler_flags]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as name:
        folder = Path(name)
        commands = [
            [compiler, *flags, "-c", str(source), "-o", str(folder / f"{source.stem}.o")] for source in source_files()
        ]
        with ThreadPoolExecutor() as pool:
            list(pool.map(run_compiler, commands))
        library = folder / "library.so"
        run_compiler([compiler, "-shared", "-pthread", *map(str, folder.glob("*.o")), "-o", str(library)])
        library.replace(target)


def run_compiler(command: list[str]) -> str:
    """Run one compiler command and return its output. Raises KernelsUnavailableError with what it complained of."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=BUILD_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        complaint = "\n".join(str(error.stderr).splitlines()[:20])
        raise KernelsUnavailableError(f"{command[0]} cannot compile the native kernels:\n{complaint}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailableError(f"{command[0]} cannot compile the native kernels: {error}") from error
    return done.stdout
