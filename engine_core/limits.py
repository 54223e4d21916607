"""What the operating system allows this process: memory and cores, container limits included.

Reads /proc and the cgroup file system (version 1 and 2); knows nothing of models. Where neither exists,
memory is unknown.
"""

import math
import os
from pathlib import Path

UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2^63."""

PROC = Path("/proc")


def available_memory_bytes(proc: Path = PROC) -> int | None:
    """Memory that this process may still take; None where the operating system does not say.

    The least of what the machine and each enclosing cgroup has left.
    """
    candidates = [
        machine_available_bytes(proc),
        *(cgroup_headroom_bytes(folder) for folder in memory_cgroups(proc)),
    ]
    known = [size for size in candidates if size is not None]
    return min(known) if known else None


def usable_cores(proc: Path = PROC) -> int:
    """Cores this process may use: its affinity, reduced by a cgroup v2 CPU quota (rounded up); at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in cgroup_folders(proc, "cpu"):
        quota, _, period = (read_text(folder / "cpu.max") or "").partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(cores, 1)


def machine_available_bytes(proc: Path) -> int | None:
    for line in (read_text(proc / "meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def memory_cgroups(proc: Path) -> list[Path]:
    return cgroup_folders(proc, "memory")


def cgroup_folders(proc: Path, controller: str) -> list[Path]:
    """Folders of the cgroups that enclose this process under `controller`, innermost first.

    Inside a container the path that /proc names may not exist under the mount; then the mount's root is the
    container.
    """
    mounts = cgroup_mounts(proc, controller)
    folders: list[Path] = []
    for line in (read_text(proc / "self" / "cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        mount = mounts.get("v2") if not controllers else mounts.get("v1")
        if mount is None or (controllers and controller not in controllers.split(",")):
            continue
        inner = mount / group.lstrip("/")
        folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(mount) and folder.is_dir()]
    return folders


def cgroup_mounts(proc: Path, controller: str) -> dict[str, Path]:
    """Where the cgroup file systems are mounted: "v2", and "v1" for `controller`."""
    mounts: dict[str, Path] = {}
    for line in (read_text(proc / "self" / "mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        mount_point, file_system = before.split()[4], after.split()
        if file_system[:1] == ["cgroup2"]:
            mounts["v2"] = Path(mount_point)
        elif file_system[:1] == ["cgroup"] and controller in file_system[-1].split(","):
            mounts["v1"] = Path(mount_point)
    return mounts


def cgroup_headroom_bytes(folder: Path) -> int | None:
    """Limit minus usage of one memory cgroup, without file cache that can be dropped; None if unlimited."""
    limit = read_integer(folder, "memory.max", "memory.limit_in_bytes")
    usage = read_integer(folder, "memory.current", "memory.usage_in_bytes")
    if limit is None or usage is None or limit >= UNLIMITED_BYTES:
        return None
    statistics = dict(
        line.split()[:2] for line in (read_text(folder / "memory.stat") or "").splitlines() if " " in line
    )
    droppable = int(statistics.get("total_inactive_file", statistics.get("inactive_file", "0")))
    return max(limit - max(usage - droppable, 0), 0)


def read_integer(folder: Path, *names: str) -> int | None:
    """The first of the named files (versions 2 and 1) that holds a number."""
    texts = ((read_text(folder / name) or "").strip() for name in names)
    return next((int(text) for text in texts if text.isdigit()), None)


def read_text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
