"""Argument lists of the services."""

from pathlib import Path

import pytest

from schemas.control import ROLES
from services.executor.settings import ExecutorSettings
from services.supervisor.pipeline import PipelineSettings
from services.supervisor.programs import STOP_ORDER, role_of, service_programs

SECRET_URL = "nats://user:secret@host:4222"


def programs(roles=ROLES, overrides=(), settings=PipelineSettings()):
    return service_programs(settings, roles, file=Path("p.yaml"), overrides=overrides, bus_url=SECRET_URL)


def test_every_role_has_its_instances():
    settings = PipelineSettings(executor=ExecutorSettings(replicas=3))
    names = [program.name for program in programs(settings=settings)]
    executors = ["executor-0", "executor-1", "executor-2"]
    assert names == ["cache_manager-0", *executors, "scheduler-0", "tokenizer-0", "gateway-0"]
    assert {role_of(name) for name in names} == set(ROLES)


def test_only_the_roles_that_are_wanted_run():
    assert [program.name for program in programs(["tokenizer"])] == ["tokenizer-0"]


def test_file_overrides_and_name_are_passed_on():
    (program,) = programs(["tokenizer"], ["model.name=x", "bus.prefix=b"])
    assert program.argv[1:4] == ("-P", "-m", "services.tokenizer")
    assert program.argv[4:] == (
        "-c",
        str(Path("p.yaml").absolute()),
        "--set",
        "model.name=x",
        "--set",
        "bus.prefix=b",
        "--instance",
        "tokenizer-0",
    )


def test_the_bus_address_travels_in_the_environment_only():
    (program,) = programs(["tokenizer"], [f"bus.url={SECRET_URL}"])
    assert program.environment["NATTERJACK_BUS__URL"] == SECRET_URL
    assert "secret" not in " ".join(program.argv)


def test_everything_but_the_executor_runs_at_a_lower_priority():
    assert {program.name: program.nice for program in programs()} == {
        "cache_manager-0": 10,
        "executor-0": 0,
        "scheduler-0": 10,
        "tokenizer-0": 10,
        "gateway-0": 10,
    }


def test_a_console_runs_only_when_it_is_asked_for_and_below_everything_else():
    assert "console-0" not in [program.name for program in programs()]
    (program,) = programs(["console"], ["console.port=9"])
    assert program.argv[3] == "services.console"
    assert program.nice > 10
    assert role_of(program.name) in STOP_ORDER[0]


def test_a_gateway_with_keys_allows_no_open_console():
    keys, everywhere = {"gateway": {"api_keys": "k"}}, {"host": "0.0.0.0"}
    with pytest.raises(ValueError, match="the console on 0.0.0.0 would show everybody"):
        PipelineSettings(**keys, console=everywhere)
    for console in ({}, {**everywhere, "api_keys": "k"}, {**everywhere, "enabled": False}):
        PipelineSettings(**keys, console=console)
    PipelineSettings(console=everywhere)
