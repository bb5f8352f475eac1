"""From which figures on a run is crowded, contended, limited or slow, and what its document says: by hand."""

from dataclasses import replace
from typing import Any

import pytest

from mlbench_cli.results.archive.conditions import Condition, assess_conditions, check_fabric
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
        (machine(busy_seconds=None), None),
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


# --- quota, lock and network ----------------------------------------------------------------------------------------


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
    run = replace(run, engine="kubernetes", kubernetes=replace(run.pods, fabric={"gbits": 100, "name": "EFA"}))
    environments = {rank: {"nccl": {"network": network}} for rank, network in enumerate(networks)}
    found = check_fabric(run, environments)
    assert (found.reason if found else None) == reason
    if found:
        assert found.figures == {"slow_ranks": sum("Socket" in str(each) for each in networks), "nominal_gbits": 100.0}
    single = replace(run, workers=1)
    unknown = replace(run, engine="kubernetes", kubernetes=replace(run.pods, fabric={"gbits": "many", "name": "EFA"}))
    for other in (single, unknown, spec(engine="kubernetes", cluster="c")):
        assert check_fabric(other, environments) is None


# --- the document ---------------------------------------------------------------------------------------------------


# --- schemas --------------------------------------------------------------------------------------------------------
