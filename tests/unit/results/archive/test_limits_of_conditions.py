"""From which figures on a run is crowded, contended, limited or slow, and what its document says: by hand."""

from dataclasses import replace
from typing import Any

import pytest

from mlbench_cli.results.archive.conditions import Condition, Conditions, assess_conditions, check_fabric
from mlbench_cli.results.archive.schema import brief, validate
from tests.unit.results.runs import spec


def machine(elapsed: float = 100.0, **changes: Any) -> dict[str, Any]:
    counters = {"busy_seconds": 0.0, "own_seconds": 0.0, "cores": 4, "quota": None, "lock": "held"}
    return {"kind": "machine", "elapsed_seconds": elapsed, **counters, **changes}


def contended(*rows: dict[str, Any]) -> Condition | None:
    return assess_conditions(spec(workers=1), None, rows).contended


# --- crowded --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "cores", "reason"),
    [
        ({"workers": 4}, 4, None),
        ({"workers": 5}, 4, "5 ranks on 4 cores"),
        ({"workers": 2}, 1, "2 ranks on 1 core"),
        ({"workers": 1, "processes_per_worker": 5}, 4, "5 ranks on 4 cores"),
        ({"workers": 2, "cpus": 2.0}, 4, None),
        ({"workers": 2, "cpus": 2.5}, 4, "5 CPUs for 2 ranks on 4 cores"),
        ({"workers": 1, "cpus": 4.5}, 4, "4.5 CPUs for 1 rank on 4 cores"),
        ({"workers": 8, "cpus": 4.0, "run_on_all": False}, 4, None),
        ({"workers": 8}, 0, None),
        ({"workers": 8}, None, None),
        ({"workers": 8}, True, None),
    ],
)
def test_a_machine_is_crowded_by_more_ranks_or_cpus_than_cores(
    changes: dict[str, Any], cores: Any, reason: str | None
) -> None:
    found = assess_conditions(spec(**changes), {"machine": {"cores": cores}}, []).crowded
    assert (found.reason if found else None) == reason


def test_the_cores_that_may_be_used_count_before_those_of_the_machine() -> None:
    found = assess_conditions(spec(workers=4), {"machine": {"cores": 64}}, [machine(cores=2)]).crowded
    assert found == Condition("crowded", "4 ranks on 2 cores", {"ranks": 4, "cpus": 0.0, "cores": 2.0})
    assert assess_conditions(spec(workers=4), {"machine": "malformed"}, [machine(cores=2)]).crowded == found


@pytest.mark.parametrize(
    ("gpus", "reason"), [(["a", "b"], None), (["a"], "2 ranks on 1 GPU"), ([], None), ("ab", None)]
)
def test_ranks_that_share_gpus_are_crowded(gpus: Any, reason: str | None) -> None:
    two = spec(workers=2, device="gpu")
    found = assess_conditions(two, {"machine": {"cores": 8, "gpus": gpus}}, []).crowded
    assert (found.reason if found else None) == reason
    if found:
        assert found.figures == {"ranks": 2, "cpus": 0.0, "cores": 8.0, "gpus": 1}


# --- contended ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "other"),
    [
        (machine(busy_seconds=40.0), None),  # 0.4 of 4 CPUs are a tenth
        (machine(busy_seconds=40.1), 0.401),
        (machine(busy_seconds=90.0, own_seconds=49.9), 0.401),
        (machine(busy_seconds=40.0, own_seconds=50.0), None),
        (machine(elapsed=1.0, busy_seconds=0.49), None),  # less than half a second of CPU time
        (machine(elapsed=1.0, busy_seconds=0.5), 0.5),
        (machine(busy_seconds=None, steal_seconds=41.0), 0.41),
        (machine(busy_seconds=float("nan")), None),
        (machine(busy_seconds=99.0, cores=None), None),
        (machine(busy_seconds=99.0, cores=0.5), None),
        (machine(elapsed=0.0, busy_seconds=99.0), None),
        (machine(elapsed=-1.0, busy_seconds=99.0), None),
    ],
)
def test_others_may_use_a_tenth_of_the_cpus(row: dict[str, Any], other: float | None) -> None:
    found = contended(row)
    assert (found.figures["other_cpus"] if found else None) == (None if other is None else pytest.approx(other))


def test_figures_of_contention_are_per_second_and_rounded() -> None:
    found = contended(machine(busy_seconds=210.12345, own_seconds=100.0, steal_seconds=20.0, waiting_seconds=30.0))
    assert found is not None
    assert found.reason == "other processes used 1.3 of 4 CPUs on average"
    assert found.figures == {
        "other_cpus": 1.3012,
        "peak_other_cpus": 1.3012,
        "stolen_cpus": 0.2,
        "cores": 4.0,
        "waiting_share": 0.3,
    }
    endless = contended(machine(busy_seconds=200.0, waiting_seconds=900.0))
    assert endless is not None
    assert endless.figures["waiting_share"] == 1.0


@pytest.mark.parametrize(
    ("steal", "words"),
    [
        (50.0, "other processes used 1 of 4 CPUs on average"),
        (51.0, "the hypervisor gave 1 of 4 CPUs to others on average"),
    ],
)
def test_the_hypervisor_is_named_if_it_took_more_than_half(steal: float, words: str) -> None:
    found = contended(machine(busy_seconds=100.0 - steal, steal_seconds=steal))
    assert found is not None
    assert found.reason == words


def test_the_peak_is_over_intervals_of_half_a_second_at_least() -> None:
    """3.9 CPUs in the first 0.4 s do not count alone, but in the first 0.5 s."""
    rows = [machine(0.4, busy_seconds=1.56), machine(0.5, busy_seconds=1.6), machine(10.0, busy_seconds=6.35)]
    found = contended(*rows)
    assert found is not None
    assert found.figures["peak_other_cpus"] == 3.2
    assert found.figures["other_cpus"] == 0.635


def test_rows_of_machines_without_a_time_are_passed_over() -> None:
    rows = [machine(busy_seconds=90.0), machine(elapsed=200.0) | {"elapsed_seconds": None}]
    found = contended(*rows)
    assert found is not None
    assert found.figures["other_cpus"] == 0.9
    nothing = assess_conditions(spec(), None, [{"kind": "machine"}, {"kind": "gpu", "elapsed_seconds": 1.0}])
    assert nothing.measured is False
    assert assess_conditions(spec(), None, [machine(worker="x")]).measured is True


# --- quota, lock and network ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (machine(throttled_periods=0, throttled_seconds=9.0), None),
        (machine(throttled_periods=1, throttled_seconds=0.5), "a CPU quota paused it 1 time, for 0.5 s together"),
        (machine(throttled_periods=7, quota=1.0), "a quota of 1 CPU paused it 7 times, for 0 s together"),
        (
            machine(throttled_periods=7, throttled_seconds=12.34, quota=2.5),
            "a quota of 2.5 CPUs paused it 7 times, for 12 s together",
        ),
    ],
)
def test_any_pause_by_a_quota_is_a_condition(row: dict[str, Any], reason: str | None) -> None:
    found = assess_conditions(spec(workers=1), None, [row]).quota_limited
    assert (found.reason if found else None) == reason


def test_figures_of_a_quota() -> None:
    rows = [machine(worker=0, throttled_periods=1, throttled_seconds=1.0)]
    rows.append(machine(worker=1, throttled_periods=9, throttled_seconds=3.0, quota=2.0))
    found = assess_conditions(spec(engine="kubernetes", cluster="c"), None, rows).quota_limited
    assert found is not None  # of the machine that was paused longest
    assert found.figures == {"throttled_periods": 9.0, "throttled_seconds": 3.0, "quota": 2.0}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (machine(), None),
        (machine(lock="shared", lock_reason=None), "no lock of this machine (unknown reason)"),
        (machine(lock=None, lock_reason="x" * 300), f"no lock of this machine ({'x' * 200})"),
    ],
)
def test_without_the_lock_a_local_run_shares_its_machine(row: dict[str, Any], reason: str | None) -> None:
    found = assess_conditions(spec(workers=1), None, [row]).shared
    assert (found.reason if found else None) == reason
    pod = assess_conditions(spec(workers=1, engine="kubernetes", cluster="c"), None, [row]).shared
    assert (pod is None) is (row["lock"] in (None, "held"))  # pods have no lock


@pytest.mark.parametrize(
    ("networks", "reason"),
    [
        (["Socket", "Socket"], "NCCL used Socket; the machines have 100 Gbit/s of EFA"),
        (["Socket", "AWS Libfabric"], "NCCL used Socket; the machines have 100 Gbit/s of EFA"),
        (["Socket", "FastSocket"], "NCCL used FastSocket, Socket; the machines have 100 Gbit/s of EFA"),
        (["AWS Libfabric", "Libfabric"], None),
        (["GPUDirectTCPX_v7", "FasTrak"], None),
        (["gIB", "IB"], None),
        ([None, None], None),
        (["", 5], None),
    ],
)
def test_a_network_of_the_kernel_is_slow_where_there_is_a_faster_one(networks: list[Any], reason: str | None) -> None:
    run = spec(engine="kubernetes", cluster="c")
    run = replace(run, kubernetes=replace(run.kubernetes, fabric={"gbits": 100, "name": "EFA"}))
    environments = {rank: {"nccl": {"network": network}} for rank, network in enumerate(networks)}
    found = check_fabric(run, environments)
    assert (found.reason if found else None) == reason
    if found:
        assert found.figures == {"slow_ranks": sum("Socket" in str(each) for each in networks), "nominal_gbits": 100.0}
    single = replace(run, workers=1)
    unknown = replace(run, kubernetes=replace(run.kubernetes, fabric={"gbits": "many", "name": "EFA"}))
    for other in (single, unknown, spec(engine="kubernetes", cluster="c")):
        assert check_fabric(other, environments) is None


# --- the document ---------------------------------------------------------------------------------------------------


def test_conditions_as_a_document_and_in_a_phrase() -> None:
    quota = Condition("quota_limited", "paused", {"throttled_periods": 2})
    slow = Condition("slow_network", "NCCL used Socket", {"slow_ranks": 2})
    found = Conditions(quota_limited=quota, slow_network=slow, measured=True)
    document = {
        "measured": True,
        "labels": ["quota_limited", "slow_network"],
        "crowded": None,
        "contended": None,
        "quota_limited": {"reason": "paused", "figures": {"throttled_periods": 2}},
        "shared": None,
        "slow_network": {"reason": "NCCL used Socket", "figures": {"slow_ranks": 2}},
    }
    assert found.to_dict() == document
    assert Conditions.from_dict(document) == found
    assert found.phrase == "quota-limited: paused; slow-network: NCCL used Socket"
    assert "slow_network" not in Conditions().to_dict()


# --- schemas --------------------------------------------------------------------------------------------------------

LIST = {"type": "array", "items": {"type": "object", "required": ["d"], "properties": {"c": {"type": "integer"}}}}


@pytest.mark.parametrize(
    ("value", "schema", "found"),
    [
        ("2026-01-01T00:00:00Z", {"type": "string", "format": "date-time"}, []),
        (
            "2026-01-01T00:00:00+01:00",
            {"type": "string", "format": "date-time"},
            ["the document is '2026-01-01T00:00:00+01:00', not a time as RFC 3339"],
        ),
        (0, {"type": "integer", "minimum": 0}, []),
        (None, {"type": ["integer", "null"], "minimum": 0}, []),
        (1.5, {"type": "integer"}, ["the document is 1.5, which it cannot be"]),
        (1, {"type": "number"}, []),
        (True, {"type": "number"}, ["the document is True, which it cannot be"]),
        (1, {"type": "boolean"}, ["the document is 1, which it cannot be"]),
        ("c", {"type": "string", "enum": ["a", "b"]}, ["the document is 'c', which it cannot be"]),
        ([], {"type": "object"}, ["the document is [], which it cannot be"]),
        ({}, {"type": "array"}, ["the document is {}, which it cannot be"]),
        (
            {"a": {"b": [{"d": 1}, {"c": "x"}]}},
            {"type": "object", "additionalProperties": {"type": "object", "properties": {"b": LIST}}},
            ['"a.b[1].d" is missing', "\"a.b[1].c\" is 'x', which it cannot be"],
        ),
        ({"known": 1, "other": "x"}, {"type": "object", "properties": {"known": {"type": "integer"}}}, []),
    ],
)
def test_a_value_follows_its_schema_or_is_named_with_its_place(
    value: Any, schema: dict[str, Any], found: list[str]
) -> None:
    assert list(validate(value, schema)) == found


def test_long_values_are_cut_at_80_characters() -> None:
    assert brief("x" * 78) == "'" + "x" * 78 + "'"
    assert brief("x" * 79) == "'" + "x" * 76 + "..."
    assert len(brief("x" * 500)) == 80
