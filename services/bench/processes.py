"""Processor time of a deployment's processes on this machine, from Linux's /proc. Knows no bus.

A deployment's supervisor and its nats-server are not in the registry: they are the services' parent, and its child.
"""

import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from schemas.control import Registration

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
NATS_SERVER = "nats-server"


def find_processes(registrations: Iterable[Registration], proc: Path = PROC) -> dict[str, int]:
    """Return process ids on this machine by name: the instances, `nats-server`, and `supervisor` unless it is us."""
    host = socket.gethostname()
    found = {
        entry.instance: entry.pid
        for entry in registrations
        if entry.host == host and entry.pid and cpu_seconds(entry.pid, proc) is not None
    }
    for parent in {_parent(pid, proc) for pid in found.values()} - {0, 1}:
        for child in _children(parent, proc):
            if _command(child, proc) == NATS_SERVER:
                found[NATS_SERVER] = child
                if parent != os.getpid():
                    found["supervisor"] = parent
    return found


def cpu_seconds(pid: int, proc: Path = PROC) -> float | None:
    """Return user and system time of a process, threads that ended included; None when there is none."""
    fields = _stat(pid, proc)
    return None if fields is None else (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def all_cpu_seconds(processes: Mapping[str, int], proc: Path = PROC) -> dict[str, float]:
    """Return the processor time by name, of those that live."""
    times = {name: cpu_seconds(pid, proc) for name, pid in processes.items()}
    return {name: time_s for name, time_s in times.items() if time_s is not None}


def lower_priority(nice: int) -> None:
    """Lower this process's own priority, so that on the server's own machine it takes only what the server leaves."""
    if nice:
        os.setpriority(os.PRIO_PROCESS, 0, nice)


def _stat(pid: int, proc: Path) -> list[str] | None:
    """The fields of /proc/PID/stat after the name, which may hold spaces: state, parent, …, utime 11, stime 12."""
    try:
        return (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _parent(pid: int, proc: Path) -> int:
    fields = _stat(pid, proc)
    return int(fields[1]) if fields else 0


def _children(pid: int, proc: Path) -> list[int]:
    try:
        threads = list((proc / str(pid) / "task").iterdir())
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return []


def _command(pid: int, proc: Path) -> str:
    try:
        return (proc / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""
