"""The deployment at one moment."""

from schemas.control import ROLES, ExecutorCapacity
from services.console.overview import HISTORY_S, History, overview
from services.console.roster import Roster
from services.console.samples import Samples
from tests.unit.console.console_traffic import registration, sample

CAPACITY = ExecutorCapacity(
    engine="echo", model_file="", device="cpu", kernels="", vocab_size=1, max_model_len=9, block_size=16, num_blocks=200
)


def everyone(*absent, now_s=0.0):
    roster = Roster()
    for role in ROLES:
        if role not in absent:
            more = {"capacity": CAPACITY, "version": "1"} if role == "executor" else {"version": "1"}
            roster.heard(registration(f"{role}-0", **more), f"{role}-0", now_s)
    return roster


def test_all_roles_ready_is_well_and_a_console_is_not_asked_for():
    seen = overview(everyone(), Samples(), 0.0, 1000.0)
    assert (seen.health, seen.state, seen.models, seen.version) == ("ok", "ready", ("smol",), "1")
    assert {view.role: view.health for view in seen.roles} == {**dict.fromkeys(ROLES, "ok"), "console": "busy"}


def test_a_missing_role_is_named():
    seen = overview(everyone("executor", "gateway"), Samples(), 0.0, 1000.0)
    assert (seen.health, seen.state) == ("bad", "not ready: no gateway, executor")
    (view,) = [view for view in seen.roles if view.role == "executor"]
    assert (view.health, view.state, view.instances) == ("bad", "no instance", ())


def test_one_of_two_that_is_silent_is_a_warning():
    roster = everyone(now_s=5.0)
    roster.heard(registration("executor-1"), "executor-1", 0.0)
    seen = overview(roster, Samples(), 5.0, 1000.0)
    assert (seen.health, seen.state) == ("busy", "ready, but look at executor-1")
    (view,) = [view for view in seen.roles if view.role == "executor"]
    assert (view.health, view.state) == ("busy", "1 of 2 ready")
    assert [instance.health for instance in view.instances] == ["ok", "bad"]


def test_flows_executors_streams_and_charts_come_from_samples():
    samples = Samples()
    for second in (0, 1):
        samples.add(
            sample(
                "gateway-0",
                request_success_total__finished_reason__stop=3 * second,
                generation_tokens_total=100 * second,
                stream_messages__stream__work=4,
                stream_full_perc__stream__work=0.5,
                num_requests_open=2,
                process_resident_memory_bytes=5e7,
            ),
            second,
        )
        samples.add(sample("executor-0", bus_hop_seconds_count__subject__step_plan=60 * second), second)
        samples.add(
            sample(
                "cache_manager-0",
                kv_cache_usage_perc__executor__executor_0=0.25,
                prefix_cache_queries_total=100 * second,
                prefix_cache_hits_total=40 * second,
            ),
            second,
        )
    roster = everyone(now_s=1.0)
    seen = overview(roster, samples, 1.0, 1000.0)
    flows = {flow.name: flow.per_s for flow in seen.flows}
    assert (flows["client-gateway"], flows["gateway-client"], flows["scheduler-executor"]) == (3, 100, 60)
    assert (seen.point.requests_per_s, seen.point.open, seen.cached_share) == (3, 2, 0.4)
    (stream,) = seen.streams
    assert (stream.name, stream.messages, stream.full) == ("work", 4, 0.5)
    (executor,) = seen.executors
    assert (executor.name, executor.engine, executor.blocks_total) == ("executor-0", "echo on cpu", 200)
    memory = {instance.name: instance.memory_bytes for view in seen.roles for instance in view.instances}
    assert memory["gateway-0"] == 5e7


def test_history_holds_ten_minutes():
    history = History()
    for second in range(2 * HISTORY_S):
        history.add(overview(Roster(), Samples(), 0.0, float(second)).point)
    assert [point.time_s for point in history.points] == [float(second) for second in range(HISTORY_S, 2 * HISTORY_S)]
