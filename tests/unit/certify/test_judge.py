"""What the judge of certificates says about samples with a known truth."""

import io
import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.certify.expectations import Figure
from mlbench_cli.certify.judge import judge
from mlbench_cli.certify.samples import Collective, Failed, Inventory, Rates, Samples, Scope, Training, read_samples
from task_images.certify import rules
from task_images.certify.node import count_lost_links, inventory
from task_images.certify.rules import TESTS, Evidence, Sample, explain, make_rounds

simulation: Any = import_module("benchmarks.certify_errors")
Cluster = simulation.Cluster
NAMES = [f"n{number}" for number in range(8)]


def certify(samples: Samples, **options: Any) -> dict[str, Any]:
    names = [f"n{number}" for number in range(samples.ranks)]
    return judge(samples, names, [True] * samples.ranks, **options)


def healthy(nodes: int = 8, seed: int = 3) -> Samples:
    """All stages of healthy nodes."""
    samples: Samples = Cluster(nodes, "normal", seed).samples()
    pair_up(samples, {})
    ranks = tuple(range(nodes))
    training = Training(ranks, (0.1,) * 20, batch=8, wall=2.5, bytes=1 << 20, write=0.1, read=0.05)
    samples.together = [Collective("all_reduce", ranks, 1 << 20, (0.01,), right=True, transport="TCP"), training]
    return samples


def complete(samples: Samples) -> Samples:
    """The samples, as if all nodes had been measured together, too."""
    if "network" not in samples.evidence.rounds:
        pair_up(samples, {})
    samples.together = [replace(item, ranks=tuple(range(samples.ranks))) for item in healthy().together]
    return samples


def pair_up(samples: Samples, slow: dict[tuple[int, ...], float]) -> None:
    """Measure all pairs of nodes; nodes or links are slower by factors."""
    samples.evidence.rounds["network"] = {pair: [rate] for pair, rate in rates(samples.ranks, slow).items()}
    samples.evidence = fresh(samples.evidence)


def slow_down(samples: Samples, factor: float, test: str, ranks: set[int]) -> None:
    """Multiply what ranks had in the screen of a test."""
    found = samples.evidence.rounds[test]
    found |= {(rank,): [rate * factor for rate in found[(rank,)]] for rank in ranks}
    samples.evidence = fresh(samples.evidence)


def fresh(evidence: Evidence, least_dip: float | None = None) -> Evidence:
    """The same samples, seen with other eyes."""
    again = Evidence(evidence.per_node, evidence.least_dip if least_dip is None else least_dip)
    again.rounds, again.cases, again.again = evidence.rounds, evidence.cases, evidence.again
    again.screened = evidence.screened
    return again


def states(document: dict[str, Any]) -> dict[str, tuple[str, list[str]]]:
    """The nodes that are not ok."""
    return {node["node"]: (node["state"], node["reasons"]) for node in document["nodes"] if node["state"] != "ok"}


@pytest.mark.parametrize("noise", simulation.PROMISED)
@pytest.mark.parametrize("nodes", [8, 64])
def test_healthy_nodes_are_not_named(nodes: int, noise: str) -> None:
    wrong = []
    for seed in range(12):
        cluster = Cluster(nodes, noise, seed)
        wrong.append(bool(cluster.wrong(cluster.judge())))
    assert sum(wrong) <= 1


@pytest.mark.parametrize("nodes", [4, 8, 64])
def test_a_node_that_is_slow_beyond_the_margin_is_named_with_its_reason_and_nobody_else(nodes: int) -> None:
    for seed in range(6):
        cluster = Cluster(nodes, "normal", seed, fault=0.14)
        document = cluster.judge()
        slow = {name: found for name, found in states(document).items() if found[0] == "slow"}
        assert slow == {f"n{cluster.victim}": ("slow", ["matmul_slow"])}
        (found,) = (found for found in document["findings"] if found["state"] == "slow")
        assert found["shortfall"] == pytest.approx(0.14, abs=0.03)
        assert found["confirmed"]["slow"] >= 8
        assert found["confirmed"]["span_seconds"] >= found["confirmed"]["needed_seconds"] * 0.999


@pytest.mark.parametrize("test", TESTS)
def test_each_test_has_its_reason(test: str) -> None:
    cluster = Cluster(8, "normal", 5, fault=2 * TESTS[test].fail, where=test, has_pairs=test == "network")
    slow = {name: found for name, found in states(cluster.judge()).items() if found[0] == "slow"}
    assert slow == {f"n{cluster.victim}": ("slow", [TESTS[test].reason])}


def test_a_confirmation_that_ends_too_early_is_no_reason_to_return_a_node() -> None:
    cluster = Cluster(8, "normal", 1, fault=0.2)
    samples = cluster.samples()
    # Disturbances here last longer than the confirmation did.
    document = certify(replace(samples, evidence=fresh(samples.evidence, least_dip=3000.0)))
    assert states(document) == {f"n{cluster.victim}": ("watch", ["matmul_slow"])}


def test_all_stages_of_healthy_nodes_accept_the_cluster_and_say_what_was_delivered() -> None:
    samples = healthy()
    samples.together.append(replace(samples.together[0], operation="all_gather"))
    document = certify(samples)
    assert (document["verdict"], states(document)) == ("accepted", {})
    assert document["scope"]["not_tested"] == []
    twice, once = (row["busbw_gbps"] for row in document["delivers"]["collectives"])
    assert (twice, once) == pytest.approx([count * (1 << 20) / 0.01 / 1e9 * 7 / 8 for count in (2, 1)], rel=1e-4)
    training = document["delivers"]["training"]
    assert (training["goodput"], training["samples_per_second"]) == pytest.approx((0.8, 8 * 8 / 0.1))
    assert training["checkpoint_read_mbps"] == pytest.approx(2 * training["checkpoint_write_mbps"], rel=1e-4)


def test_what_was_not_measured_blocks_accepted() -> None:
    samples = healthy()
    samples.together.pop()
    document = certify(samples)
    assert (document["verdict"], document["reason"]) == ("cannot_tell", "not tested: training")
    samples = healthy()
    samples.failed = [Failed(tuple(range(8)), "timed out", "all_to_all")]
    assert certify(samples)["reason"] == "all_to_all failed: timed out"
    samples.silent[7] = "collectives"  # that is why, and the others were measured without it
    samples.together = [replace(item, ranks=tuple(range(7))) for item in samples.together]
    assert certify(samples)["verdict"] == "accepted_without"
    unmeasured = Figure("all_to_all", 1 << 34, 8, 79.0, "somebody")
    assert certify(healthy(), expected=[unmeasured])["verdict"] == "cannot_tell"
    samples = healthy()
    samples.ended = None
    assert certify(samples)["is_partial"]
    assert certify(samples)["verdict"] == "cannot_tell"


def test_a_node_that_was_not_measured_with_the_others_was_not_tested() -> None:
    samples = healthy()
    samples.together = [replace(item, ranks=tuple(range(7))) for item in samples.together]
    document = certify(samples)
    assert (document["reason"], states(document)) == ("not tested: n7", {"n7": ("not_tested", [])})


@pytest.mark.parametrize("moments", [0, 11])
def test_a_suspect_that_could_be_neither_cleared_nor_named_blocks_accepted(moments: int) -> None:
    cluster = Cluster(8, "normal", 1, fault=0.2)
    samples = complete(cluster.samples())
    for number, taken in samples.evidence.again.items():
        samples.evidence.again[number] = [sample for sample in taken if (sample.moment or 0) < moments]
    samples.evidence = fresh(samples.evidence)
    document = certify(samples)
    assert states(document) == {f"n{cluster.victim}": ("watch", ["matmul_slow"])}
    assert document["verdict"] == "cannot_tell"
    assert document["reason"] == f"n{cluster.victim} could be neither cleared nor named"


def test_a_slow_link_of_which_nobody_knows_the_bad_end_blocks_accepted() -> None:
    cluster = Cluster(8, "normal", 2, fault=0.2, where="link", has_pairs=True)
    document = certify(complete(cluster.samples()))
    assert states(document) == {f"n{node}": ("watch", ["link_slow"]) for node in cluster.slow_link}
    assert document["verdict"] == "cannot_tell"
    assert document["reason"].startswith("the link between")


@pytest.mark.parametrize("nodes", [2, 3])
def test_fewer_than_four_nodes_are_no_fleet(nodes: int) -> None:
    samples = healthy(nodes)
    for test in simulation.NODE_TESTS:
        slow_down(samples, 0.5, test, {0})
    document = certify(samples)
    assert document["verdict"] == "cannot_tell"
    assert all(node["state"] == "not_tested" for node in document["nodes"])


def measure_devices(nodes: int, per_node: int, slow: set[int]) -> Samples:
    """Three rounds of ranks that share nodes, some of which are slow."""
    samples, chance = Samples(Evidence(per_node, 300.0), nodes * per_node), Random(nodes)
    for rank, number in product(range(samples.ranks), range(3)):
        rate = chance.gauss(70.0 if rank in slow else 100.0, 0.5)
        samples.evidence.add(Sample("memory", (rank,), rate, float(number), round=number))
    samples.inventories = {rank: Inventory({"cpu": "same"}) for rank in range(samples.ranks)}
    samples.scope, samples.ended = Scope(turns=False, clocks={}), 10.0
    samples.evidence.open_cases(3.0)
    return samples


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (2, 4), (3, 2), (3, 8)])
def test_nodes_with_several_devices_are_no_fleet_either_if_they_are_fewer_than_four(nodes: int, per_node: int) -> None:
    for slow in ({*range(per_node)}, set[int]()):
        names = [f"n{number}" for number in range(nodes)]
        document = judge(measure_devices(nodes, per_node, slow), names, [True] * nodes)
        assert document["verdict"] == "cannot_tell"
        assert {node["state"] for node in document["nodes"]} <= {"ok", "not_tested"}


def test_a_slow_device_is_told_by_the_node_that_has_it() -> None:
    document = judge(measure_devices(4, 4, {6}), NAMES[:4], [True] * 4)
    assert states(document) == {"n1": ("watch", ["memory_slow"])}  # nothing has confirmed it
    assert document["findings"][0]["rank"] == 6
    assert [round(node["tests"]["memory"], 1) for node in document["nodes"]] == [0.0, -0.3, 0.0, 0.0]


def test_a_silent_node_and_one_that_computes_wrong_numbers_are_named_and_the_rest_accepted() -> None:
    samples = healthy()
    samples.silent[5] = "pairs"
    samples.rows = [(2, 7, Rates(at=1.0, digest="0123456789abcdef"))]
    left = tuple(rank for rank in range(8) if rank not in (2, 5))
    samples.together = [replace(item, ranks=left) for item in samples.together]
    document = certify(samples)
    assert states(document) == {"n2": ("failed", ["wrong_result"]), "n5": ("failed", ["no_answer"])}
    assert document["verdict"] == "accepted_without"
    assert document["delivers"]["nodes"] == [f"n{rank}" for rank in left]
    never = judge(healthy(), NAMES, [True] * 7 + [False])
    assert states(never)["n7"] == ("missing", ["no_answer"])
    unstarted = judge(Samples(Evidence(1, 300.0), 8), NAMES, [False] * 8)
    assert (unstarted["verdict"], unstarted["reason"]) == ("cannot_tell", "no node started")
    assert states(unstarted) == dict.fromkeys(NAMES, ("not_tested", []))


def test_a_full_disk_is_no_reason_to_return_a_node() -> None:
    samples = healthy()
    samples.rows = [(3, 5, Rates(at=1.0, values={"memory": 1.0}, errors={"disk.write": "No space left on device"}))]
    document = certify(samples)
    assert states(document) == {"n3": ("not_tested", ["no_answer"])}
    assert (document["verdict"], document["reason"]) == ("cannot_tell", "not tested: n3")
    assert document["findings"][0]["summary"] == "n3: its disk could not be tested: No space left on device"


def test_a_third_of_slow_nodes_is_a_group_with_the_key_that_splits_it() -> None:
    samples, old = healthy(12), {1, 4, 6, 9}
    slow_down(samples, 0.7, "memory", old)
    samples.evidence.cases = []
    samples.inventories = {
        rank: Inventory({"cpu": "same", "kernel": "5.4" if rank in old else "6.8", "host": str(rank)})
        for rank in range(12)
    }
    document = certify(samples)
    assert states(document) == {}
    assert document["verdict"] == "cannot_tell"
    assert "they are the nodes with kernel 5.4" in document["reason"]
    (drift,) = (row for row in document["drift"] if row["key"] == "kernel")
    assert drift["others"] == {"5.4": ["n1", "n4", "n6", "n9"]}


@pytest.mark.parametrize("slow", [{1, 3, 5, 6}, {0, 1, 3, 5, 6}])
def test_half_of_the_nodes_or_more_are_a_group_too(slow: set[int]) -> None:
    samples = healthy()
    slow_down(samples, 0.8, "memory", slow)
    samples.inventories = {
        rank: Inventory({"cpu": "old" if rank in slow else "new", "kernel": "5.4" if rank in slow else "6.8"})
        for rank in range(8)
    }
    document = certify(samples)
    assert (document["verdict"], states(document)) == ("cannot_tell", {})
    assert document["reason"].startswith(f"{len(slow)} of 8 nodes are slow in memory: two groups, no outliers")
    assert document["reason"].endswith("with cpu old")


@pytest.mark.parametrize("count", [3, 4, 5])
def test_a_group_of_nodes_with_a_slower_network_is_told_and_nobody_named(count: int) -> None:
    samples = healthy()
    # A pair is as fast as the slower of its nodes.
    pair_up(samples, {(a, b): 2.0 for a in range(count) for b in range(a + 1, 8)})
    document = certify(samples)
    assert (document["verdict"], states(document)) == ("cannot_tell", {})
    assert document["reason"].startswith(f"{count} of 8 nodes are slow in network of the node: two groups")


def test_published_figures_judge_the_cluster_and_never_a_node() -> None:
    known = Figure("all_reduce", 1 << 20, 8, 1.0, "somebody")
    document = certify(healthy(), expected=[known])
    assert (document["verdict"], states(document)) == ("rejected", {})
    assert [found["reason"] for found in document["findings"]] == ["below_expected"]
    assert document["delivers"]["collectives"][0]["expected"]["share"] == pytest.approx(0.1835, abs=1e-3)
    assert certify(healthy(), expected=[replace(known, value=0.19)])["verdict"] == "accepted"
    low = Figure("all_reduce", 1 << 34, 8, 100.0, "the seller", machine="GB300")  # published: 923
    assert "at least 692.25 GB/s, 75 % of the 923 GB/s" in certify(healthy(), expected=[low])["reason"]


@pytest.mark.parametrize(("counts", "found"), [((3, 3), {}), ((3, 4), {"n2": ("failed", ["errors_counted"])})])
def test_errors_of_the_hardware_count_from_the_beginning_of_the_run(
    counts: tuple[int, ...], found: dict[str, Any]
) -> None:
    samples = healthy()
    samples.rows += [
        (2, line, Rates(float(line), counters={"ecc_uncorrected": count})) for line, count in enumerate(counts)
    ]
    assert states(certify(samples)) == found


@pytest.mark.parametrize(("counts", "found"), [((2, 2), {}), ((2, 3, 5), {"n2": ("watch", ["errors_counted"])})])
def test_a_node_whose_link_went_down_is_watched(counts: tuple[int, ...], found: dict[str, Any]) -> None:
    samples = healthy()
    samples.rows += [(2, line, Rates(float(line), counters={"links_down": count})) for line, count in enumerate(counts)]
    document = certify(samples)
    assert states(document) == found
    assert "went down 3 times" in str(document["findings"]) or not found


def test_links_are_counted_of_cards_and_ports_and_not_of_bridges(tmp_path: Path) -> None:
    assert count_lost_links(tmp_path) is None
    for name, count, is_card in (("eth0", "1\n", True), ("eth1", "2\n", True), ("br0", "9\n", False)):
        (tmp_path / "class/net" / name / "device" if is_card else tmp_path / "class/net" / name).mkdir(parents=True)
        (tmp_path / "class/net" / name / "carrier_down_count").write_text(count)
    port = tmp_path / "class/infiniband/mlx5_0/ports/1/counters"
    port.mkdir(parents=True)
    (port / "link_downed").write_text("4\n")
    assert count_lost_links(tmp_path) == 7


def test_a_gpu_that_its_hardware_slows_down_is_watched_whatever_else_the_rank_measures() -> None:
    samples = healthy()
    samples.rows += [(2, line, Rates(float(line), counters={"hardware_slowdown": line % 2})) for line in (1, 3, 4)]
    samples.rows += [(2, line, Rates(float(line), values={"local_all_reduce": 1.0})) for line in range(5, 9)]
    samples.rows += [(1, line, Rates(float(line), counters={"hardware_slowdown": line % 2})) for line in (1, 2)]
    assert states(certify(samples)) == {"n2": ("watch", ["throttled"])}


@pytest.mark.parametrize(("counters", "state"), [({"ecc_uncorrected": 0}, "ok"), ({}, "not_tested")])
def test_a_gpu_whose_errors_nobody_can_read_is_not_tested(counters: dict[str, int], state: str) -> None:
    samples = healthy()
    samples.rows += [
        (2, 1, Rates(1.0, values={"copy.to_device": 50.0}, counters=counters)),
        (2, 2, Rates(2.0, values={"local_all_reduce": 1.0})),
    ]
    document = certify(samples)
    assert document["nodes"][2]["state"] == state
    assert document["verdict"] == ("accepted" if state == "ok" else "cannot_tell")


def test_a_device_that_cannot_be_used_is_missing_and_its_node_returned() -> None:
    samples = healthy()
    samples.inventories[3] = Inventory({}, error="the measuring process ended with 1")
    assert states(certify(samples)) == {"n3": ("failed", ["device_missing"])}


def test_a_slow_path_in_place_of_a_fast_one_is_no_acceptance_and_an_unknown_one_neither() -> None:
    samples = healthy()
    (row, training) = samples.together
    samples.together = [replace(row, transport="Socket"), training]
    assert certify(samples)["verdict"] == "accepted"  # it has nothing else
    samples.inventories[0] = Inventory({"infiniband": "mlx5_0"})
    document = certify(samples)
    assert (document["verdict"], states(document)) == ("rejected", {})
    assert [found["reason"] for found in document["findings"]] == ["transport_fallback"]
    samples.together = [replace(row, transport=None), training]
    assert certify(samples)["reason"] == "which network carried all_reduce is not known"


def fail_pairs(samples: Samples, failing: set[tuple[int, int]]) -> Samples:
    samples.rows += [
        (a, line, Rates(float(line), unit=(a, b), round=0, error="timed out" if (a, b) in failing else None))
        for line, (a, b) in enumerate(rates(samples.ranks, {}), 1)
    ]
    return samples


def test_a_node_is_returned_if_most_of_its_pairs_fail_and_not_the_first_of_each_pair() -> None:
    document = certify(fail_pairs(healthy(), {(node, 7) for node in range(7)}))
    assert states(document) == {"n7": ("failed", ["no_answer"])}
    assert document["findings"][0]["summary"] == "n7: 7 of 7 pairs with others failed: timed out"
    document = certify(fail_pairs(healthy(), {(2, 5)}))
    assert states(document) == {"n2": ("watch", ["no_answer"]), "n5": ("watch", ["no_answer"])}
    document = certify(fail_pairs(healthy(2), {(0, 1)}))  # either of them
    assert not any(node["state"] == "failed" for node in document["nodes"])


@pytest.mark.parametrize("bad", [1, 3])
def test_a_node_whose_measurements_fail_is_returned_when_most_of_them_do(bad: int) -> None:
    samples = healthy()
    samples.rows += [(2, line, Rates(float(line), error="a job failed" if line < bad else None)) for line in range(4)]
    assert states(certify(samples)) == {"n2": ("failed" if bad == 3 else "watch", ["no_answer"])}


def test_a_machine_with_hundreds_of_network_cards_is_heard() -> None:
    keys = inventory({"infiniband": ",".join(f"mlx5_{number}" for number in range(144))}, {})
    line = f"certify {json.dumps({'kind': 'inventory', 'keys': keys})}\n".encode()
    assert read_samples({0: partial(io.BytesIO, line)}, 1, Evidence(1, 300.0)).inventories[0].keys["infiniband"]


def test_clocks_that_are_ahead_and_behind_are_drift() -> None:
    samples = healthy()
    samples.scope = Scope(turns=False, clocks={1: -5.0, 2: 0.5, 3: 5.0})
    (clock,) = (row for row in certify(samples)["drift"] if row["key"] == "clock")
    assert clock["others"] == {"-5.0 s": ["n1"], "+5.0 s": ["n3"]}


def test_a_wrong_sum_in_one_cycle_of_a_soak_rejects_the_cluster() -> None:
    samples = healthy()
    (good, _) = samples.together
    samples.together.append(replace(good, right=False, cycle=7))
    document = certify(samples)
    assert document["verdict"] == "rejected"
    assert [found["reason"] for found in document["findings"]] == ["wrong_result"]


def test_lines_that_make_no_sense_are_skipped() -> None:
    lines = [
        *("certify {", 'certify {"kind":"rates"}', "certify []", 'certify {"kind":"inventory","keys":[1]}'),
        'certify {"kind":"rates","at":1,"round":0,"values":{"memory":"fast"}}',
        'certify {"kind":"rates","at":1e999,"round":0,"values":{"memory":1}}',
        'certify {"kind":"rates","at":1,"round":-1,"values":{"memory":1}}',
        'certify {"kind":"rates","at":1,"round":0,"values":{"memory":1e-300}}',
        'certify {"kind":"rates","at":1,"round":0,"values":{"memory":true}}',
        'certify {"kind":"rates","at":1,"round":0,"unit":[1,1],"values":{"network":1}}',
        'certify {"kind":"rates","at":1,"round":0,"unit":[1,99],"values":{"network":1}}',
        'certify {"kind":"rates","at":1,"round":0,"values":{"network":1}}',
        'certify {"kind":"collective","operation":"all_reduce","bytes":8,"ranks":[],"right":true,"times":[1]}',
        'certify {"kind":"training","ranks":[0,99],"steps":[1],"batch":1,"wall":1,"bytes":1,"write":1,"read":1}',
        'certify {"kind":"training","ranks":[0,1],"steps":[0],"batch":1,"wall":1,"bytes":1,"write":1,"read":1}',
        'certify {"kind":"silent","rank":99,"stage":"node"}',
        'certify {"kind":"scope","turns":false,"clocks":{"99":50}}',
        'certify {"kind":"screened","at":1,"cases":[["none",[0],[]],["memory",[99],[98,97]]]}',
        'certify {"kind":"rates","at":1,"round":0,"values":{"memory":5,"other":1}}',
    ]
    text = "\n".join(lines).encode() + b"\n\xff\xfe\n"
    samples = read_samples({rank: partial(io.BytesIO, text) for rank in range(5)}, 4, Evidence(1, 300.0))
    assert samples.evidence.rounds == {"memory": {(rank,): [5.0] for rank in range(4)}}
    assert not samples.together
    assert states(certify(samples)) == dict.fromkeys(NAMES[:4], ("failed", ["no_answer"]))


def test_only_rank_0_tells_who_is_silent_and_that_all_was_measured() -> None:
    lines = b'certify {"kind":"silent","rank":2,"stage":"node"}\ncertify {"kind":"end","at":9}\n'
    for rank, found in ((0, ({2: "node"}, 9.0)), (1, ({}, None))):
        samples = read_samples({rank: partial(io.BytesIO, lines)}, 4, Evidence(1, 300.0))
        assert (samples.silent, samples.ended) == found


def soaked(slow: dict[int, set[int]]) -> Samples:
    """Twelve cycles of a soak, in some of which some nodes are slow."""
    samples = healthy()
    for cycle in range(1, 13):
        for rank in range(8):
            rate = 80.0 if cycle in slow.get(rank, ()) else 100.0
            samples.evidence.add(Sample("memory", (rank,), rate, 10.0 * cycle, cycle=cycle))
    return samples


def test_a_node_that_is_slow_now_and_then_flaps_unless_all_do() -> None:
    document = certify(soaked({3: {2, 5, 6, 11}}))
    assert (states(document), document["scope"]["soak_cycles"]) == ({"n3": ("watch", ["flapping"])}, 12)
    assert document["verdict"] == "accepted"
    assert states(certify(soaked({rank: {rank + 1, rank + 2, rank + 4} for rank in range(8)}))) == {}


def test_a_node_that_is_slow_in_most_of_a_soak_blocks_accepted() -> None:
    document = certify(soaked({3: set(range(5, 13))}))
    assert states(document) == {"n3": ("watch", ["flapping"])}
    assert (document["verdict"], document["reason"]) == ("cannot_tell", "n3: slow in memory in 8 of 12 cycles")


def test_a_last_cycle_that_was_cut_short_hides_no_flapping() -> None:
    samples = soaked({3: {2, 5, 6, 11}})
    samples.evidence.add(Sample("memory", (0,), 100.0, 130.0, cycle=13))
    assert states(certify(samples)) == {"n3": ("watch", ["flapping"])}


def test_a_soak_that_is_cut_short_says_how_long_it_was() -> None:
    samples = soaked({})
    samples.ended = None
    document = certify(samples)
    assert (document["verdict"], document["is_partial"]) == ("cannot_tell", True)
    assert "in the soak, after 12 cycles" in document["reason"]


# --- lies -----------------------------------------------------------------------------------------------------------


def raise_screen(samples: Samples, victim: int) -> None:
    samples.evidence.rounds["matmul.burst"][victim,] = [1.0, 1.0, 1.0]


def raise_moments(samples: Samples, victim: int) -> None:
    change_moments(samples, lambda sample: sample._replace(rate=1.0) if sample.unit == (victim,) else sample)


def delete_moments(samples: Samples, victim: int) -> None:
    change_moments(samples, lambda sample: None if sample.unit == (victim,) else sample)


def change_moments(samples: Samples, change: Callable[[Sample], Sample | None]) -> None:
    for number, taken in samples.evidence.again.items():
        samples.evidence.again[number] = [found for sample in taken if (found := change(sample)) is not None]


def copy_another(samples: Samples, victim: int) -> None:
    for test in simulation.NODE_TESTS:
        by_unit = samples.evidence.rounds[test]
        by_unit[victim,] = by_unit[(victim + 1) % 8,]


def exchange_peers(samples: Samples, victim: int) -> None:
    (case,) = samples.evidence.cases
    others = set(range(8)) - {victim, *case.peers}
    samples.evidence.cases = [case._replace(peers=tuple(others)[:3])]


def invent_silence(samples: Samples, victim: int) -> None:
    samples.silent[victim] = "pairs"


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (invent_silence, "was measured with others after it had fallen silent"),
        (raise_screen, "is no suspect by its samples, but rank 0 measured it again"),
        (raise_moments, "was measured again after it was cleared"),
        (delete_moments, "lacks moments at which it was measured again"),
        (copy_another, "have measured the same to the last digit"),
        (exchange_peers, "was measured beside others than its peers"),
    ],
)
def test_samples_that_do_not_fit_what_rank_0_did_by_them_prove_nothing(
    lie: Callable[[Samples, int], None], said: str
) -> None:
    cluster = Cluster(8, "normal", 4, fault=0.2)
    samples = complete(cluster.samples())
    assert certify(samples)["contradictions"] == []
    lie(samples, cluster.victim)
    samples.evidence = fresh(samples.evidence)
    document = certify(samples)
    assert document["verdict"] == "cannot_tell"
    assert any(text.endswith(said) for text in document["contradictions"])


def test_a_node_that_never_started_has_measured_nothing() -> None:
    document = judge(healthy(), NAMES, [True] * 7 + [False])
    assert document["reason"] == "the evidence contradicts itself: n7 never started, and has measured"


# --- pairs ----------------------------------------------------------------------------------------------------------


def rates(nodes: int, slow: dict[tuple[int, ...], float]) -> dict[tuple[int, int], float]:
    """Of all pairs; a node or link is slower by a factor."""
    found = {}
    for pair in (pair for matched in make_rounds(range(nodes)) for pair in matched):
        factor = 1.0 + 0.001 * (sum(pair) % 7)
        for cause, much in slow.items():
            factor *= much if set(cause) <= set(pair) else 1.0
        found[pair] = 100 / factor
    return found


@pytest.mark.parametrize("nodes", [4, 5, 8, 16])
@pytest.mark.parametrize("slow", [{}, {(1,): 1.15}, {(1,): 1.25}, {(1,): 4.0}, {(0, 2): 1.25}])
def test_slow_nodes_and_links_explain_the_times_of_pairs(nodes: int, slow: dict[tuple[int, ...], float]) -> None:
    found = explain(rates(nodes, slow), 0.10)
    assert set(found.causes) == set(slow)
    assert not found.islands


def test_two_slow_nodes_are_no_slow_link_between_them() -> None:
    assert set(explain(rates(8, {(1,): 1.25, (3,): 1.25}), 0.10).causes) == {(1,), (3,)}
    assert set(explain(rates(16, {(1,): 1.25, (3,): 1.25, (7,): 1.6}), 0.10).causes) == {(1,), (3,), (7,)}


def test_a_boundary_between_two_groups_names_no_node() -> None:
    across: dict[tuple[int, ...], float] = {(a, b): 1.5 for a in range(4) for b in range(4, 8)}
    samples = healthy()
    pair_up(samples, across)
    document = certify(samples)
    assert (document["verdict"], states(document)) == ("rejected", {})
    (found,) = document["findings"]
    assert (found["reason"], found["groups"]) == ("boundary_slow", [["n0", "n1", "n2", "n3"], ["n4", "n5", "n6", "n7"]])


def measure_matchings(nodes: int, rate: Callable[[int, int], float]) -> Samples:
    """Healthy nodes, of which eight matchings were measured, three times each."""
    samples = healthy(nodes)
    pairs = [pair for matched in make_rounds(range(nodes), 8) for pair in matched]
    samples.evidence.rounds["network"] = {pair: [rate(*pair) for _ in range(3)] for pair in pairs}
    samples.evidence = fresh(samples.evidence)
    return samples


@pytest.mark.parametrize("size", [20, 50])
def test_a_boundary_that_matchings_cross_blocks_accepted_and_names_no_node(size: int) -> None:
    assert certify(measure_matchings(100, lambda a, b: 10.0))["verdict"] == "accepted"
    document = certify(measure_matchings(100, lambda a, b: 10.0 if a // size == b // size else 5.0))
    assert document["verdict"] == "cannot_tell"
    assert document["reason"].endswith("groups are faster than all others: a boundary may be slow")
    found = next(found for found in document["findings"] if found["reason"] == "boundary_slow")
    racks = [{int(node[1:]) // size for node in group} for group in found["groups"]]
    assert {len(rack) for rack in racks} == {1}
    assert not [node for node in document["nodes"] if node["state"] == "slow"]


@pytest.mark.parametrize("nodes", [8, 64])
def test_a_network_that_varies_too_much_to_reveal_a_slow_node_is_not_accepted(nodes: int) -> None:
    chance = Random(nodes)
    for _ in range(5):
        document = certify(measure_matchings(nodes, lambda a, b: chance.lognormvariate(0.0, 0.3)))
        assert document["fleet"]["network"]["smallest_shortfall"] > 0.3
        assert document["verdict"] == "cannot_tell"


def test_the_level_of_a_sign_test_is_divided_by_looks_and_suspects() -> None:
    assert [rules.need(8, 0.02 / 3), rules.need(8, 0.02 / 6), rules.need(16, 0.02 / 3)] == [8, 9, 14]
    assert [rules.need(12, 0.02 / 3), rules.need(12, 0.02 / 81), rules.need(12, 0.02 / 84)] == [11, 12, 13]
    slow = [(10.0 * number, True) for number in range(1, 17)]
    assert rules.confirm(slow[:12], 27, 120.0).is_named is True
    assert rules.confirm(slow[:12], 28, 120.0).is_named is None
    assert rules.confirm([*slow[:11], (120.0, False)], 1, 120.0).is_named is None  # it has recovered
    assert rules.confirm([(since, False) for since, _ in slow[:5]], 1, 80.0)[:3] == (False, 0, 5)
    assert [rules.confirm(slow[:count], 1, 150.0).is_named for count in (8, 12, 16)] == [None, None, True]
