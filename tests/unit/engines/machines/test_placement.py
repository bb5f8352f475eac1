"""Which machine runs which workers and parameter servers."""

from dataclasses import replace

import pytest

from mlbench_cli.engines.hosts.engine import HostsEngine
from mlbench_cli.engines.machines.details import HostRecord, HostsDetails
from mlbench_cli.engines.machines.placement import share_hosts, share_nodes
from mlbench_cli.errors import CapacityError, UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.launch import resolve
from mlbench_cli.runs.request import Request

SPEC = RunSpec(
    name="ps-3", cluster="c", engine="hosts", task="custom", preset="custom", argv=("true",), backend="gloo",
    workers=3, processes_per_worker=2,
)  # fmt: skip
HOSTS = [
    HostRecord(name=f"m{number}", login=f"m{number}", slots=slots, address=f"10.0.0.{number}", interface=None)
    for number, slots in ((1, 2), (2, 2), (3, 1), (4, 1))
]
TWO_SERVERS = replace(SPEC, method={"name": "bsp-ps", "servers": "2"})


def shares(spec: RunSpec) -> list[tuple[str | None, list[int]]]:
    return [(share.name, share.ranks(spec)) for share in share_hosts(HOSTS, spec)]


def test_slots_of_one_host_are_filled_before_those_of_the_next() -> None:
    assert shares(SPEC) == [("m1", [0, 1, 2, 3]), ("m2", [4, 5])]


def test_servers_run_beside_the_workers_in_turn() -> None:
    assert shares(TWO_SERVERS) == [("m1", [0, 1, 2, 3, 6]), ("m2", [4, 5, 7])]
    assert [share.servers for share in share_nodes(TWO_SERVERS)] == [(0,), (1,), ()]


def test_hosts_of_servers_have_no_workers() -> None:
    spec = replace(TWO_SERVERS, servers_on=("m1", "m4"))
    assert shares(spec) == [("m2", [0, 1, 2, 3]), ("m3", [4, 5]), ("m1", [6]), ("m4", [7])]
    assert shares(replace(spec, servers_on=("m4",))) == [("m1", [0, 1, 2, 3]), ("m2", [4, 5]), ("m4", [6, 7])]


def test_hosts_beyond_the_number_of_servers_take_workers() -> None:
    spec = replace(TWO_SERVERS, servers_on=("m4", "m3", "m2"), workers=4)
    assert shares(spec) == [("m1", [0, 1, 2, 3]), ("m2", [4, 5, 6, 7]), ("m4", [8]), ("m3", [9])]


def test_a_server_knows_its_role_and_the_workers_only_each_other() -> None:
    engine = HostsEngine(HostsDetails(folder="/f", hosts=HOSTS))
    (plan,) = engine.render(replace(TWO_SERVERS, servers_on=("m4", "m3"))).documents
    assert plan["environment"]["MLBENCH_SERVERS"] == "2"
    assert [node["workers"] for node in plan["nodes"]] == [[0, 1], [2], [], []]
    (server,) = plan["nodes"][2]["ranks"]
    wanted = {"RANK": "6", "LOCAL_RANK": "0", "NODE_RANK": "3", "MLBENCH_ROLE": "server"}
    assert wanted.items() <= server["environment"].items()


@pytest.mark.parametrize(
    ("servers_on", "workers", "error", "word"),
    [
        (("m9",), 1, UsageError, "no host"),
        (("m1", "m2"), 3, CapacityError, "apart from those of --servers-on"),
        ((), 7, CapacityError, "6 slots"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(
    servers_on: tuple[str, ...], workers: int, error: type[UsageError], word: str
) -> None:
    with pytest.raises(error) as caught:
        shares(replace(TWO_SERVERS, servers_on=servers_on, workers=workers))
    assert word in caught.value.message


HOSTS_CLUSTER = Cluster("c", "hosts", details={"hosts": HOSTS, "folder": "/f"})
ASKED = Request(name="a", workers=(2,), task="digits_resnet", method="bsp-ps", servers_on="m3")


def test_hosts_of_servers_are_part_of_the_spec_and_its_hash() -> None:
    (spec,) = resolve(ASKED, HOSTS_CLUSTER)
    assert spec.servers_on == ("m3",)
    assert RunSpec.from_dict(spec.to_dict()) == spec
    (plain,) = resolve(replace(ASKED, servers_on=None), HOSTS_CLUSTER)
    assert "servers_on" not in plain.to_dict()
    assert plain.content_hash != spec.content_hash


@pytest.mark.parametrize(
    ("change", "cluster", "word"),
    [
        ({"servers_on": "m3,m3"}, HOSTS_CLUSTER, "twice"),
        ({"servers_on": "m3,"}, HOSTS_CLUSTER, "empty"),
        ({"servers_on": "m3,m4"}, HOSTS_CLUSTER, "--servers"),
        ({"method": None}, HOSTS_CLUSTER, "no parameter servers"),
        ({}, Cluster("c", "slurm"), "works only on hosts"),
        ({}, Cluster("local", "local"), "works only on hosts"),
        ({}, Cluster("k", "kind"), "works only on hosts"),
        ({"method": None, "task": None, "command": "true"}, HOSTS_CLUSTER, "work only with tasks"),
    ],
)
def test_hosts_of_servers_that_make_no_sense_are_refused(
    change: dict[str, str | None], cluster: Cluster, word: str
) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(replace(ASKED, **change), cluster)  # type: ignore[arg-type]
    assert word in f"{caught.value.message} {caught.value.hint}"
