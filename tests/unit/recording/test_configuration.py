"""Two configurations side by side: what differs is found wherever it came from, once."""

from schemas.control import BuildFacts, ConfigValue, EffectiveConfig, ExecutorCapacity, Registration
from services.recording.configuration import as_json, as_text, diff, of_file, of_instances

CAPACITY = ExecutorCapacity(
    engine="native",
    model_file="m.gguf",
    device="cpu",
    kernels="avx512",
    vocab_size=10,
    max_model_len=100,
    block_size=16,
    num_blocks=4,
)


def config(instance, version="0.1.0", features=("avx2", "fma"), **values):
    shown = {key.replace("__", "."): value for key, value in values.items()}
    return EffectiveConfig(
        instance=instance,
        incarnation="i",
        version=version,
        values={key: ConfigValue(value=value, source=source) for key, (value, source) in shown.items()},
        build=BuildFacts(cpu_features=features, schemas={"step_plan": 1}),
    )


def deployment(*configs, kernels="avx512"):
    executor = Registration(
        instance="executor-0",
        incarnation="i",
        role="executor",
        model="smol",
        state="ready",
        capacity=CAPACITY.model_copy(update={"kernels": kernels}),
    )
    return of_instances("deployment", configs, [executor])


def found(ours, other):
    return [(d.key, d.instance) for d in diff(ours, other)]


def test_nothing_differs_from_itself_and_sources_do_not_count():
    ours = deployment(config("gateway-0", gateway__port=(80, "default")))
    other = deployment(config("gateway-0", gateway__port=(80, "file")))
    assert diff(ours, other) == []
    assert as_text([], ours, other).endswith("No differences.")


def test_a_value_from_file_environment_or_set_is_found_with_its_source():
    ours = deployment(config("scheduler-0", a=(1, "default"), b=(1, "default"), c=(1, "default")))
    other = deployment(config("scheduler-0", a=(2, "file"), b=(2, "environment"), c=(2, "--set")))
    differences = diff(ours, other)
    assert [d.key for d in differences] == ["a", "b", "c"]
    text = as_text(differences, ours, other)
    for source in ("2  [file]", "2  [environment]", "2  [--set]"):
        assert source in text
    assert as_json(differences)[0] == {
        "key": "a",
        "instance": "scheduler-0",
        "a": {"value": 1, "source": "default"},
        "b": {"value": 2, "source": "file"},
    }


def test_a_difference_that_all_instances_share_is_told_once():
    ours = deployment(config("a-0", bus__prefix=("nj", "default")), config("b-0", bus__prefix=("nj", "default")))
    other = deployment(config("a-0", bus__prefix=("x", "file")), config("b-0", bus__prefix=("x", "file")))
    assert found(ours, other) == [("bus.prefix", "")]
    half = deployment(config("a-0", bus__prefix=("x", "file")), config("b-0", bus__prefix=("nj", "file")))
    assert found(ours, half) == [("bus.prefix", "a-0")]


def test_version_cpu_features_and_kernels_are_found():
    ours = deployment(config("a-0"))
    other = deployment(config("a-0", version="0.2.0", features=("avx2", "sse4_2")), kernels="avx2")
    differences = diff(ours, other)
    assert [d.key for d in differences] == ["build.cpu_features", "build.version", "capacity.kernels"]
    text = as_text(differences, ours, other)
    assert "A  only here: fma" in text
    assert "B  only here: sse4_2" in text


def test_an_instance_that_one_side_lacks_is_found():
    ours, other = deployment(config("a-0", x=(1, "file"))), deployment()
    assert ("x", "a-0") in found(ours, other)
    assert "(absent)" in as_text(diff(ours, other), ours, other)


def test_a_file_is_compared_in_what_both_can_know():
    shown = {
        "bus.url": ConfigValue(value=None, source="default"),
        "bus.host": ConfigValue(value="127.0.0.1", source="default"),
        "bus.port": ConfigValue(value=4222, source="default"),
        "supervisor.nice": ConfigValue(value=10, source="default"),
        "scheduler.plan_depth": ConfigValue(value=2, source="default"),
    }
    file = of_file("p.yaml", shown)
    same = deployment(config("scheduler-0", bus__url=("nats://127.0.0.1:4222", "environment")))
    assert diff(file, same) == []
    assert "keys exist on one side only" in as_text([], file, same)
    other = deployment(config("scheduler-0", scheduler__plan_depth=(3, "--set")))
    assert found(file, other) == found(other, file) == [("scheduler.plan_depth", "scheduler-0")]
    assert diff(file, of_file("q.yaml", shown)) == []
