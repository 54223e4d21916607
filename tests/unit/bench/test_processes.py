"""Processor time is read from /proc, and a deployment's unregistered processes are found beside its services."""

import os
import socket

from schemas.control import Registration
from services.bench.processes import all_cpu_seconds, cpu_seconds, find_processes


def process(proc, pid, parent, name, ticks=(0, 0), children=()):
    directory = proc / str(pid) / "task" / str(pid)
    directory.mkdir(parents=True)
    (directory / "children").write_text(" ".join(map(str, children)))
    fields = ["S", str(parent), *["0"] * 9, *map(str, ticks), *["0"] * 5]
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")
    (proc / str(pid) / "comm").write_text(f"{name}\n")


def registration(instance, pid, host=None):
    role = instance.rpartition("-")[0]
    return Registration(
        instance=instance,
        incarnation="i",
        role=role,
        model="m",
        state="ready",
        pid=pid,
        host=host or socket.gethostname(),
    )


def test_services_their_supervisor_and_their_nats_server_are_found(tmp_path):
    process(tmp_path, 50, 1, "natterjack", children=[60, 61, 62])
    process(tmp_path, 60, 50, "nats-server")
    process(tmp_path, 61, 50, "python) x(", ticks=(150, 50))
    process(tmp_path, 62, 50, "python")
    found = find_processes([registration("executor-0", 61), registration("gateway-0", 62)], tmp_path)
    assert found == {"executor-0": 61, "gateway-0": 62, "nats-server": 60, "supervisor": 50}
    assert all_cpu_seconds({"executor-0": 61, "gone": 99}, tmp_path) == {"executor-0": 200 / os.sysconf("SC_CLK_TCK")}


def test_instances_on_another_host_or_gone_are_left_out(tmp_path):
    process(tmp_path, 61, 1, "python")
    there = [registration("executor-0", 61, host="elsewhere.invalid"), registration("gateway-0", 77)]
    assert find_processes(there, tmp_path) == {}


def test_our_own_processor_time_is_known():
    assert (cpu_seconds(os.getpid()) or 0.0) > 0.0
