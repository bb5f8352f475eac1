"""Conditions of a run: from samples whose answer is known, from rubbish, and in bounded memory."""

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from mlbench_cli.results.archive.conditions import Condition, Conditions, assess_conditions
from tests.unit.results.runs import spec


def rows(seconds: int = 100, *, cores: int = 4, own: float = 2.0, other: float = 0.0, **facts: Any) -> Iterator[Any]:
    """One row a second of a machine on which the run uses `own` CPUs and everything else `other` CPUs."""
    first = {"cores": cores, "quota": None, "lock": "held", "lock_reason": None, **facts}
    for second in range(seconds + 1):
        yield {"time": 1.0 + second, "rank": 0, "cpu_seconds": own * second}
        yield {
            "time": 1.0 + second,
            "kind": "machine",
            **(first if second == 0 else {}),
            "elapsed_seconds": float(second),
            "busy_seconds": (own + other) * second,
            "own_seconds": own * second,
            "throttled_periods": 0,
            "throttled_seconds": 0.0,
        }


def test_a_run_alone_on_its_machine_has_no_label() -> None:
    found = assess_conditions(spec(workers=2), None, rows(other=0.3))
    assert (found.labels, found.phrase, found.measured) == ((), "", True)


def test_without_samples_nothing_is_claimed() -> None:
    found = assess_conditions(spec(workers=2), None, [{"time": 1.0, "rank": 0}])
    assert found == Conditions(measured=False)


def test_more_ranks_than_cores_are_crowded() -> None:
    found = assess_conditions(spec(workers=4), None, rows(cores=2))
    assert found.crowded == Condition("crowded", "4 ranks on 2 cores", {"ranks": 4, "cpus": 0.0, "cores": 2})
    assert assess_conditions(spec(workers=2, processes_per_worker=2), None, rows(cores=2)).crowded == found.crowded
    assert assess_conditions(spec(workers=4, run_on_all=False), None, rows(cores=2)).crowded is None
    assert (
        assess_conditions(spec(workers=2, cpus=2), None, rows(cores=3)).phrase
        == "crowded: 4 CPUs for 2 ranks on 3 cores"
    )
    assert assess_conditions(spec(workers=4), {"machine": {"cores": 2}}, []).labels == ("crowded",)
    assert assess_conditions(spec(workers=4, engine="kubernetes"), None, rows(cores=2)).crowded is None


def test_ranks_that_share_a_gpu_are_crowded() -> None:
    two = spec(workers=2, device="gpu")
    machine: dict[str, Any] = {"cores": 16, "gpus": ["NVIDIA H100 80GB HBM3"]}
    assert assess_conditions(two, {"machine": machine}, rows(cores=16)).phrase == "crowded: 2 ranks on 1 GPU"
    machine["gpus"] *= 2
    assert assess_conditions(two, {"machine": machine}, rows(cores=16)).labels == ()
    assert assess_conditions(two, {"machine": {"cores": 16}}, rows(cores=16)).labels == ()


@pytest.mark.parametrize(("other", "labels"), [(0.3, ()), (0.39, ()), (0.41, ("contended",)), (2.0, ("contended",))])
def test_other_load_above_a_tenth_of_the_cpus_is_contention(other: float, labels: tuple[str, ...]) -> None:
    assert assess_conditions(spec(), None, rows(cores=4, other=other)).labels == labels


def test_a_burst_shows_in_the_peak_and_not_in_the_label() -> None:
    quiet = list(rows(100, cores=2, own=1.0))
    for row in quiet:
        if row.get("kind") == "machine" and row["elapsed_seconds"] > 50:
            row["busy_seconds"] += 1.0
    assert assess_conditions(spec(), None, quiet).labels == ()
    for row in quiet:
        if row.get("kind") == "machine" and row["elapsed_seconds"] > 60:
            row["busy_seconds"] += 30.0
    found = assess_conditions(spec(), None, quiet).contended
    assert found is not None
    assert found.figures["peak_other_cpus"] == pytest.approx(30.0)


def test_the_client_of_a_short_run_is_no_contention() -> None:
    short = [row | {"busy_seconds": 0.6, "own_seconds": 0.3, "elapsed_seconds": 0.4} for row in list(rows(1))[1:2]]
    assert assess_conditions(spec(), None, short).labels == ()


def test_throttling_is_a_quota_that_limits() -> None:
    throttled = list(rows(quota=1.5))
    throttled[-1] |= {"throttled_periods": 12, "throttled_seconds": 3.25}
    found = assess_conditions(spec(), None, throttled)
    assert found.phrase == "quota-limited: a quota of 1.5 CPUs paused it 12 times, for 3.2 s together"
    assert found.labels == ("quota_limited",)


@pytest.mark.parametrize(
    ("changes", "facts", "reason"),
    [
        ({"share_machine": True}, {"lock": "shared"}, "--share-machine"),
        ({}, {"lock": "unavailable", "lock_reason": "/tmp/x: denied"}, "no lock of this machine (/tmp/x: denied)"),
    ],
)
def test_a_run_without_the_lock_is_shared(changes: dict[str, Any], facts: dict[str, Any], reason: str) -> None:
    found = assess_conditions(spec(**changes), None, rows(**facts))
    assert found.labels == ("shared",)
    assert found.shared == Condition("shared", reason)


@pytest.mark.parametrize("engine", ["hosts", "slurm"])
def test_a_run_without_the_lock_of_one_of_its_machines_is_shared(engine: str) -> None:
    held = [row | {"worker": 0} for row in rows()]
    without = [row | {"worker": 1} for row in rows(lock="unavailable", lock_reason="attached with --share-nodes")]
    assert assess_conditions(spec(engine=engine), None, held).shared is None
    found = assess_conditions(spec(engine=engine), None, [*held, *without])
    assert found.shared == Condition("shared", "no lock of this machine (attached with --share-nodes)")
    chosen = assess_conditions(spec(engine=engine, share_machine=True), None, rows(lock="shared"))
    assert chosen.shared == Condition("shared", "--share-machine")
    assert assess_conditions(spec(engine="kubernetes"), None, rows(lock=None)).shared is None


def test_of_several_machines_the_worst_counts() -> None:
    both = [row | {"worker": 0} for row in rows(cores=4, other=1.0)]
    both += [row | {"worker": 1} for row in rows(cores=4, other=3.0)]
    found = assess_conditions(spec(engine="kubernetes"), None, both).contended
    assert found is not None
    assert found.figures["other_cpus"] == pytest.approx(3.0)


def test_workers_that_share_a_node_are_no_contention_of_others() -> None:
    found = assess_conditions(spec(engine="kubernetes"), None, rows(cores=4, other=3.0), is_alone=False)
    assert found.contended is None
    assert found.measured


def test_a_long_run_takes_no_more_memory() -> None:
    def peak(seconds: int) -> int:
        tracemalloc.start()
        assess_conditions(spec(), None, rows(seconds))
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(10)
    assert peak(20_000) < 2 * peak(200)
