"""Settings: precedence, provenance, and every way of getting them wrong."""

from pathlib import Path

import pytest
import yaml
from pydantic import Field, SecretStr, ValidationError

from services.executor.settings import Settings as ExecutorServiceSettings
from services.runtime.settings import (
    Section,
    SettingsError,
    cache_dir,
    child_environment,
    known_keys,
    load_settings,
    masked,
    state_dir,
)
from services.supervisor.pipeline import PipelineSettings

CONFIGS = Path(__file__).parents[3] / "configs"


class VaultSection(Section):
    password: SecretStr | None = None
    port: int = Field(default=1, ge=0, le=9)


class VaultSettings(Section):
    vault: VaultSection = VaultSection()


def load(file=None, overrides=(), **environ):
    return load_settings(PipelineSettings, file=file, overrides=overrides, environ=environ)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_each_source_wins_over_the_one_before_and_is_remembered(tmp_path):
    file = write(tmp_path / "p.yaml", "gateway: {port: 1001, host: 0.0.0.0}\nbus: {port: 1002, prefix: file}\n")
    loaded = load(
        file, ["bus.prefix=cli"], NATTERJACK_BUS__PORT="2002", NATTERJACK_BUS__PREFIX="env", HOME="/", OTHER="x"
    )
    settings, sources = loaded.settings, loaded.sources
    assert (settings.gateway.port, sources["gateway.port"]) == (1001, "file")
    assert (settings.bus.port, sources["bus.port"]) == (2002, "environment")
    assert (settings.bus.prefix, sources["bus.prefix"]) == ("cli", "--set")
    assert (settings.bus.host, sources["bus.host"]) == ("127.0.0.1", "default")


def test_sources_name_every_key_exactly_once():
    assert load().sources.keys() == known_keys(PipelineSettings).keys() == load().shown().keys()


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("scheduler.lease_s=2.5", "scheduler.lease_s", 2.5),
        ("scheduler.lease_s=1e1", "scheduler.lease_s", 10.0),
        ("model.name=123", "model.name", "123"),
        ("model.name=a=b", "model.name", "a=b"),
        ("bus.url=", "bus.url", None),
        ("bus.url=null", "bus.url", None),
        ("model.cache_dir=/x/y", "model.cache_dir", "/x/y"),
        ("supervisor.restarts.limit=0", "supervisor.restarts.limit", 0),
    ],
)
def test_an_override_is_read_as_the_kind_that_the_key_wants(override, key, value):
    assert load(overrides=[override]).shown()[key].value == value


def test_the_last_of_two_overrides_wins():
    assert load(overrides=["bus.port=1", "bus.port=2"]).settings.bus.port == 2


@pytest.mark.parametrize(
    ("file", "overrides", "environ", "says"),
    [
        ("gatway: {port: 1}", [], {}, ["'gatway'", "line 1", "Did you mean 'gateway'?"]),
        ("\ngateway:\n  prot: 1", [], {}, ["'gateway.prot'", "line 3", "'gateway.port'"]),
        ("", ["executor.num_thread=1"], {}, ["'executor.num_thread'", "--set", "'executor.num_threads'"]),
        ("", [], {"NATTERJACK_BUS__PROT": "1"}, ["NATTERJACK_BUS__PROT", "Did you mean 'NATTERJACK_BUS__PORT'?"]),
        ("", [], {"NATTERJACK_QUUX": "1"}, ["'quux'", "config show"]),
        ("", ["supervisor.restarts=3"], {}, ["'supervisor.restarts' is a section"]),
        ("bus: 3", [], {}, ["'bus' is a section"]),
        ("", ["gateway.port"], {}, ["write --set key=value"]),
        ("bus: {port: 1, port: 2}", [], {}, ["'bus.port' stands twice"]),
        ("- a\n- b", [], {}, ["must hold sections"]),
        ("a: [", [], {}, ["not valid YAML", "line 1"]),
    ],
)
def test_a_key_that_nobody_knows_is_an_error_with_a_suggestion(tmp_path, file, overrides, environ, says):
    with pytest.raises(SettingsError) as raised:
        load(write(tmp_path / "p.yaml", file), overrides, **environ)
    assert all(part in str(raised.value) for part in says), str(raised.value)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    ("file", "overrides", "environ", "says"),
    [
        ("gateway: {port: eighty}", [], {}, ["'gateway.port' cannot be 'eighty'", "line 1", "integer"]),
        ("gateway: {port: true}", [], {}, ["'gateway.port' cannot be True", "number"]),
        ("model: {name: 12}", [], {}, ["'model.name' cannot be 12", "string"]),
        ("model: {name: [a]}", [], {}, ["'model.name'", "string"]),
        ("", ["gateway.port=65536"], {}, ["'gateway.port' cannot be '65536' (--set)", "65535"]),
        ("", [], {"NATTERJACK_SCHEDULER__LEASE_S": "-1"}, ["NATTERJACK_SCHEDULER__LEASE_S", "greater than 0"]),
        ("", ["scheduler.lease_s=.nan"], {}, ["'scheduler.lease_s'", "finite"]),
        ("", ["bus.prefix=Nj"], {}, ["'bus.prefix' cannot be 'Nj'", "begins with a letter"]),
        ("", ["executor.engine=warp"], {}, ["'executor.engine' cannot be 'warp'", "reference"]),
        ("", ["model.sha256=abc"], {}, ["'model.sha256'"]),
        ("", ["telemetry.log_format=xml"], {}, ["'telemetry.log_format'", "human"]),
        ("", ["model.source=builtin:bytes"], {}, ["builtin:bytes", "executor.engine must be 'echo'"]),
    ],
)
def test_a_wrong_value_is_named_with_key_value_and_source(tmp_path, file, overrides, environ, says):
    with pytest.raises(SettingsError) as raised:
        load(write(tmp_path / "p.yaml", file), overrides, **environ)
    assert all(part in str(raised.value) for part in says), str(raised.value)


def test_all_problems_are_named_at_once():
    with pytest.raises(SettingsError) as raised:
        load(overrides=["bus.port=x", "gateway.port=y", "scheduler.plan_depth=0"])
    assert all(key in str(raised.value) for key in ("bus.port", "gateway.port", "scheduler.plan_depth"))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None], ids=["not text", "no file"])
def test_an_unreadable_file_is_an_error(tmp_path, content):
    if content is not None:
        (tmp_path / "p.yaml").write_bytes(content)
    with pytest.raises(SettingsError, match=r"p\.yaml"):
        load(tmp_path / "p.yaml")


def test_a_single_service_skips_the_sections_of_others_but_no_unknown_one(tmp_path):
    file = write(tmp_path / "p.yaml", "gateway: {no_such_key: 1}\nexecutor: {engine: echo}\nmodel: {name: m}\n")
    loaded = load_settings(ExecutorServiceSettings, file=file, environ={"NATTERJACK_GATEWAY__PORT": "1"})
    assert loaded.settings.executor.engine == "echo"
    assert "gateway.port" not in loaded.sources
    with pytest.raises(SettingsError, match="'exekutor.engine'"):
        load_settings(ExecutorServiceSettings, overrides=["exekutor.engine=echo"], environ={})


def test_secrets_are_masked_in_what_is_shown_and_in_errors():
    def read(*overrides):
        return load_settings(VaultSettings, overrides=overrides, environ={})

    assert read("vault.password=hunter2").settings.vault.password.get_secret_value() == "hunter2"
    assert "hunter2" not in str(read("vault.password=hunter2").shown())
    with pytest.raises(SettingsError) as raised:
        load_settings(VaultSettings, environ={}, file=None, overrides=["vault.password=hunter2", "vault.port=77"])
    assert "hunter2" not in str(raised.value)
    assert "77" in str(raised.value)


def test_a_secret_of_a_wrong_type_is_masked_too(tmp_path):
    file = write(tmp_path / "v.yaml", "vault: {password: [hunter2]}")
    with pytest.raises(SettingsError) as raised:
        load_settings(VaultSettings, file=file, environ={})
    assert "hunter2" not in str(raised.value)


def test_passwords_inside_urls_are_masked():
    shown = load(overrides=["bus.url=nats://user:hunter2@host:4222"]).shown()
    assert shown["bus.url"].value == "nats://********@host:4222"
    with pytest.raises(SettingsError) as raised:
        load(overrides=["bus.prefix=a://user:hunter2@b"])
    assert "hunter2" not in str(raised.value)


def test_settings_cannot_be_changed():
    with pytest.raises(ValidationError):
        load().settings.bus.port = 1


def test_a_settings_model_is_shown_by_dotted_key():
    assert masked(load().settings)["supervisor.deadlines.bus_s"] == 15.0


def test_the_default_file_names_every_key_with_its_default():
    loaded = load(CONFIGS / "default.yaml")
    assert loaded.settings == PipelineSettings()
    assert set(loaded.sources.values()) == {"file"}


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_pipeline_file_that_is_shipped_is_valid(file):
    if "model" not in yaml.safe_load(file.read_text()):
        pytest.skip("not a pipeline file")
    load(file)


def test_every_key_is_described():
    assert all(field.description for field in known_keys(PipelineSettings).values())


def test_cache_and_state_follow_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_dir() == tmp_path / "natterjack"
    assert state_dir() == Path("/home/somebody/.local/state/natterjack")


def test_a_child_inherits_the_environment_and_gets_its_settings(monkeypatch):
    monkeypatch.setenv("SOME_VARIABLE", "kept")
    environment = child_environment({"bus.url": "nats://x"}, {"TMPDIR": "/t"})
    assert environment["SOME_VARIABLE"] == "kept"
    assert environment["NATTERJACK_BUS__URL"] == "nats://x"
    assert environment["TMPDIR"] == "/t"
