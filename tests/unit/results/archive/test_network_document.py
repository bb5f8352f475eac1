"""network.json: what follows from the probes of a run, and how its figures are shown and compared."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.results.analysis.compare import compare
from mlbench_cli.results.analysis.series import collect
from mlbench_cli.results.archive.conditions import find_least_sent, network_document
from mlbench_cli.results.archive.evidence import SampleWatch
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.archive.record import write_run_document
from mlbench_cli.results.archive.seal import seal, write_sums
from mlbench_cli.results.archive.verify import find_problems
from mlbench_cli.util.json_text import format_parsed
from tests.unit.results.runs import new_run, observation_of, sealed_run, spec

Report = dict[str, Any]


def probe(stage: str = "before", rate: float = 9.4e9, trip: float = 2e-4, **changes: Any) -> Report:
    links = [
        {"from": 0, "to": 1, "rtt_p50_seconds": trip, "alone_bits_per_second": rate, "together_bits_per_second": rate},
        {"from": 1, "to": 0, "rtt_p50_seconds": 2 * trip, "together_bits_per_second": 0.9 * rate},
    ]
    sent = 1000 if stage == "before" else 5000
    counters = [
        {"interface": "eth0", "tx_bytes": sent * (rank + 1), "rx_bytes": sent, "tx_dropped": 0, "rx_dropped": sent}
        | {"retransmits": sent}
        for rank in range(2)
    ]
    facts = {"form": "full", "nodes": 2, "networks": 2, "links": links, "counters": counters, "seconds": 1.2}
    return {"stage": stage, **facts, **changes}


def rows(*probes: Report) -> list[Report]:
    """What agents write: the probe before the ranks start, and each node's counters after they have ended."""
    return [
        row
        for report in probes
        for row in (
            [{"kind": "network", **report}]
            if report["stage"] == "before"
            else [{"kind": "interface", "worker": node, **counters} for node, counters in enumerate(report["counters"])]
        )
    ]


def document_of(asked: str | None, *probes: Report, shaping: Any = None, least_sent: float | None = None) -> Any:
    samples = SampleWatch()
    assert len(list(samples.watch(rows(*probes)))) == len(rows(*probes))
    return network_document(asked, samples, shaping, least_sent)


def sealed_with(folder: Path, *probes: Report, shaping: Any = None, **changes: Any) -> Path:
    run = new_run(folder, spec(**changes))
    (folder / "resources.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows(*probes)))
    if shaping is not None:
        (folder / "shaping.json").write_bytes(format_parsed({"schema_version": 1, **shaping}))
    write_run_document(run)
    seal(run, observation_of())
    return folder


def test_a_run_that_measured_nothing_has_no_document(tmp_path: Path) -> None:
    assert document_of(None) is None
    folder = sealed_run(tmp_path / "a")
    assert not (folder / "network.json").exists()
    assert "network" not in json.loads((folder / "result.json").read_text())
    assert find_problems(folder) == []


def test_the_table_of_charts_has_the_measured_network(tmp_path: Path) -> None:
    runs = [
        [],
        [probe(networks=1)],
        [probe(rate=1e9, trip=1e-3)],
        [probe(rate=2e9, trip=1e-3)],
    ]
    found = [Archive.open(sealed_with(tmp_path / str(index), *probes)) for index, probes in enumerate(runs)]

    def table(*archives: Archive) -> list[tuple[str, str]]:
        rows = csv.DictReader(collect(archives).to_csv().splitlines())
        return [(row["network_bits_per_second"], row["network_rtt_seconds"]) for row in rows]

    assert table(found[0]) == table(found[1]) == [("", "")]
    assert table(found[2]) == [("9e+08", "0.002")]
    assert table(*found[2:]) == [("1.27279e+09", "0.002")]  # geometric means


def test_the_probe_between_the_nodes_becomes_a_document(tmp_path: Path) -> None:
    folder = sealed_with(tmp_path / "a", probe(), probe("after"))
    document = json.loads((folder / "network.json").read_text())
    assert document["summary"] == {
        "asked": None,
        "method": "none",
        "networks": 2,
        "rtt_seconds": 4e-4,
        "alone_bits_per_second": 9.4e9,
        "together_bits_per_second": 0.9 * 9.4e9,
        "first_bits_per_second": None,
        "held": None,
        "problems": [],
    }
    assert document["traffic"] == {
        "max_sent_bytes": 8000,
        "max_received_bytes": 4000,
        "dropped_packets": 8000,
        "retransmitted_segments": 8000,
    }
    assert json.loads((folder / "result.json").read_text())["network"] == document["summary"]
    official = (folder / "official_result.txt").read_text()
    assert "Network between the workers: 8.46 Gbit/s, RTT 400 us." in official
    assert find_problems(folder) == []


def test_nodes_of_one_machine_say_nothing_in_the_official_file(tmp_path: Path) -> None:
    folder = sealed_with(tmp_path / "a", probe(networks=1))
    assert "Network" not in (folder / "official_result.txt").read_text()


def test_what_is_malformed_in_a_report_is_left_out() -> None:
    bad = probe(links=[{"from": 0, "rtt_p50_seconds": "fast", "x": 1}, 7], counters="none", seconds=-1, networks="2")
    document = document_of(None, bad)
    (found,) = document["probes"]
    assert (found["links"], found["counters"], found["seconds"], found["networks"]) == ([{"from": 0}], [], None, 0)
    assert document["summary"]["rtt_seconds"] is None


def test_a_probe_that_failed_is_kept_with_its_reason() -> None:
    document = document_of(None, {"stage": "before", "error": "refused\n\x1b[2J", "seconds": 1.0})
    assert document["probes"][0]["error"] == "refused [2J"


@pytest.mark.parametrize(("trip", "is_held"), [(2e-3, True), (9e-3, False)])
def test_a_shaped_network_is_held_against_its_probes(tmp_path: Path, trip: float, is_held: bool) -> None:
    """By the last probe of those before the training, which is set up again until it holds."""
    reports = [probe(stage, 0.97e9) for stage in ("before", "before", "after")]
    for report, seconds in zip(reports, (9e-3, trip, trip), strict=True):
        for one in report["links"]:
            one.update(rtt_p50_seconds=seconds, together_bits_per_second=0.97e9)
    folder = sealed_with(
        tmp_path / "a", shaping={"method": "packet", "probes": reports, "attempts": 2}, network="1gbit,1ms"
    )
    document = json.loads((folder / "network.json").read_text())
    assert (document["method"], document["summary"]["held"], document["setup"]["attempts"]) == ("packet", is_held, 2)
    official = (folder / "official_result.txt").read_text()
    assert "emulated 1gbit,1ms (got 970 Mbit/s" in official
    assert ("did not hold" in official) is not is_held
    assert find_problems(folder) == []


def test_a_shaped_network_without_a_probe_did_not_hold(tmp_path: Path) -> None:
    folder = sealed_with(tmp_path / "a", network="1gbit,1ms")
    assert json.loads((folder / "network.json").read_text())["summary"]["problems"] == ["it was not measured"]


def test_a_modeled_network_is_labeled_as_such(tmp_path: Path) -> None:
    folder = sealed_with(tmp_path / "a", probe(networks=1), network="model:1gbit,1ms")
    assert "modeled 1gbit,1ms, computed by a formula" in (folder / "official_result.txt").read_text()


def test_verify_finds_a_network_that_does_not_follow_from_the_evidence(tmp_path: Path) -> None:
    folder = sealed_with(tmp_path / "a", probe())
    path = folder / "network.json"
    changed = path.read_text().replace('"networks": 2', '"networks": 3')
    path.write_text(changed)
    write_sums(folder)
    assert {problem.code for problem in find_problems(folder)} == {"inconsistent"}
    plain = sealed_run(tmp_path / "b")
    (plain / "network.json").write_text(changed)
    write_sums(plain)
    assert [problem.file for problem in find_problems(plain)] == ["network.json"]


@pytest.mark.parametrize(
    ("a", "b", "texts"),
    [
        (None, "1gbit,5ms", ["The networks differ: none and 1gbit,5ms."]),
        ("1gbit,5ms", "1gbit,5ms", []),
        ("1gbit,5ms", "model:1gbit,5ms", ["The networks differ: 1gbit,5ms and model:1gbit,5ms."]),
    ],
)
def test_runs_on_other_networks_are_not_comparable(
    tmp_path: Path, a: str | None, b: str | None, texts: list[str]
) -> None:
    one, other = (Archive.open(sealed_run(tmp_path / name, network=value)) for name, value in (("a", a), ("b", b)))
    found = compare([one], [other]).obstacles
    assert [obstacle.text for obstacle in found if obstacle.word == "network"] == texts
    assert [obstacle for obstacle in compare([one], [other], across=["network"]).obstacles if obstacle.word] == []


@pytest.mark.parametrize(
    ("rate", "trip", "networks", "differs"),
    [
        (9.4e9, 2e-4, 2, False),
        (6.5e9, 2e-4, 2, False),
        (0.94e9, 2e-4, 2, True),
        (9.4e9, 9e-4, 2, True),
        (0.94e9, 2e-4, 1, False),
    ],
)
def test_measured_networks_differ_only_beyond_noise(
    tmp_path: Path, rate: float, trip: float, networks: int, differs: bool
) -> None:
    one = Archive.open(sealed_with(tmp_path / "a", probe()))
    other = Archive.open(sealed_with(tmp_path / "b", probe(rate=rate, trip=trip, networks=networks)))
    texts = [obstacle.text for obstacle in compare([one], [other]).obstacles if obstacle.word == "network"]
    assert bool(texts) is differs
    assert all(text.startswith("The measured networks differ: 8.46 Gbit/s, RTT 400 us and ") for text in texts)


@pytest.mark.parametrize(("counted", "held"), [(4_000_000, True), (3_000_000, False), (0, False)])
def test_bytes_that_went_another_way_are_found(counted: int, held: bool) -> None:
    """MPI and NCCL between ranks of one machine may use its memory: the links then count less than the ranks sent."""
    link = {"from": 0, "to": 1, "rtt_p50_seconds": 1e-4, "together_bits_per_second": 0.97e9}
    probes = [probe(stage, links=[link]) for stage in ("before", "after")]
    task = {"switch": None, "sent_bytes": [counted, counted // 2]}
    by_switch = document_of("1gbit", shaping={"method": "packet", "probes": probes, "task": task}, least_sent=4e6)
    for number, entry in enumerate(probes):
        entry["counters"] = [{"interface": "eth0", "tx_bytes": number * counted}] * 2
    by_interface = document_of("1gbit", shaping={"method": "netem", "probes": probes}, least_sent=4e6)
    for document in (by_switch, by_interface):
        assert document["summary"]["held"] is held
        reason = f"its links counted {counted / 1e6:.1f} MB, but the ranks sent 4.0 MB or more"
        assert (reason in document["summary"]["problems"]) is not held


def test_what_rank_0_must_have_sent_follows_from_its_methods_messages() -> None:
    details = {"communication": {"messages": 10, "bytes": 4e6}}
    assert find_least_sent(spec(workers=2), details) == 2e6
    assert find_least_sent(spec(workers=4), details) == 3e6
    assert find_least_sent(spec(workers=2, processes_per_worker=2), details) is None
    assert find_least_sent(spec(workers=2), {"communication": "none"}) is None
