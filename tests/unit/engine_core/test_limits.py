"""Memory and cores allowed to the process, read from imitated /proc and cgroup trees."""

from pathlib import Path

import pytest

from engine_core.limits import available_memory_bytes, usable_cores

GIB = 1 << 30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    return tmp_path / "proc"


def enter_cgroup_v2(proc: Path, group: str) -> Path:
    mount = proc.parent / "cgroup"
    folder = mount / group.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    (proc / "self/cgroup").write_text(f"0::{group}\n")
    (proc / "self/mountinfo").write_text(f"30 23 0:26 / {mount} rw,relatime - cgroup2 cgroup2 rw\n")
    return folder


def test_without_cgroups_the_machine_decides(proc):
    assert available_memory_bytes(proc) == 8 * GIB


def test_unknown_where_the_system_says_nothing(tmp_path):
    assert available_memory_bytes(tmp_path) is None


def test_a_cgroup_v2_limit_counts_less_what_is_used_but_not_droppable_cache(proc):
    folder = enter_cgroup_v2(proc, "/pod/container")
    (folder / "memory.max").write_text(f"{2 * GIB}\n")
    (folder / "memory.current").write_text(f"{GIB}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 4}\n")
    assert available_memory_bytes(proc) == 2 * GIB - GIB * 3 // 4


def test_the_limit_of_an_enclosing_cgroup_counts(proc):
    folder = enter_cgroup_v2(proc, "/pod/container")
    (folder / "memory.max").write_text("max\n")
    (folder / "memory.current").write_text("5\n")
    (folder.parent / "memory.max").write_text(f"{GIB}\n")
    (folder.parent / "memory.current").write_text("0\n")
    assert available_memory_bytes(proc) == GIB


def test_inside_a_container_the_mounts_root_stands_for_an_invisible_path(proc):
    enter_cgroup_v2(proc, "/")
    (proc / "self/cgroup").write_text("0::/../outside\n")
    mount = proc.parent / "cgroup"
    (mount / "memory.max").write_text(f"{GIB}\n")
    (mount / "memory.current").write_text("0\n")
    assert available_memory_bytes(proc) == GIB


def test_a_cgroup_v1_limit_counts(proc):
    mount = proc.parent / "memory"
    (mount / "job").mkdir(parents=True)
    (proc / "self/cgroup").write_text("4:memory:/job\n0::/\n")
    (proc / "self/mountinfo").write_text(f"35 31 0:32 / {mount} rw - cgroup cgroup rw,memory\n")
    (mount / "job/memory.limit_in_bytes").write_text(f"{GIB}\n")
    (mount / "job/memory.usage_in_bytes").write_text("100\n")
    (mount / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (mount / "memory.usage_in_bytes").write_text("100\n")
    assert available_memory_bytes(proc) == GIB - 100


def test_a_cpu_quota_limits_the_cores(proc):
    folder = enter_cgroup_v2(proc, "/pod")
    (folder / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(proc) == 1
    (folder / "cpu.max").write_text("max 100000\n")
    assert usable_cores(proc) >= 1
