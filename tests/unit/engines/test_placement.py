"""Which machine runs which workers and parameter servers."""

from msgspec.structs import replace

from mlbench_cli.engines.placement import HostRecord, share_hosts, share_nodes
from mlbench_cli.model.spec import RunSpec

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
    assert shares(replace(SPEC, nodes=("m3", "m1"))) == [("m3", [0, 1]), ("m1", [2, 3, 4, 5])]
    # each worker tests a host
    assert shares(replace(SPEC, absent_seconds=9.0)) == [("m1", [0, 1]), ("m2", [2, 3]), ("m3", [4, 5])]


def test_servers_run_beside_the_workers_in_turn() -> None:
    assert shares(TWO_SERVERS) == [("m1", [0, 1, 2, 3, 6]), ("m2", [4, 5, 7])]
    assert [share.servers for share in share_nodes(TWO_SERVERS)] == [(0,), (1,), ()]
