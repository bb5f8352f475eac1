"""Which figures of runs are compared with what their machines are expected to reach, and which links are slow."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.results.analysis.expected import (
    CheckedFigure,
    Expected,
    SlowLink,
    check_figures,
    find_slow_links,
    list_expected,
    name_machine,
    read_recorded,
    record_expected,
)
from mlbench_cli.results.analysis.verdict import Verdict
from mlbench_cli.results.archive.reader import Archive
from tests.unit.results.runs import sealed_run

PLACE = Expected("gke/n1", 2, 2, "gloo", "throughput", 0.0, "", "unknown-task", "spec")


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sealed_run(tmp_path_factory.mktemp("archives") / "a", cluster_kind="gke/n1")


def archive(path: Path, run: str = "a", rate: float = 100.0, **result: Any) -> Archive:
    """A run of 100 s with so many samples per second."""
    found = Archive.open(path)
    found.run["id"] = found.run["name"] = run
    fields = {"task_seconds": {"wall": 100.0, "training": 100.0}, "timings": {}, "samples": 100.0 * rate}
    found.result.update({**fields, **result})  # type: ignore[typeddict-item]
    return found


def test_a_throughput_is_expected_of_machine_size_backend_task_and_preset(sealed: Path) -> None:
    expected = replace(PLACE, value=200.0, source="a datasheet")
    other = replace(expected, workers=4, value=1.0)
    [found] = check_figures([archive(sealed, "a", 180.0), archive(sealed, "b", 220.0)], [other, expected])
    assert found == CheckedFigure(("a", "b"), expected, "throughput", "gke/n1", 200.0, 1.0, Verdict.PASSED)


@pytest.mark.parametrize(
    ("rate", "share", "verdict"),
    [
        (190.0, 0.95, Verdict.PASSED),
        (189.9, 0.95, Verdict.FAILED),
        (160.0, 0.8, Verdict.PASSED),
        (300.0, 0.95, Verdict.PASSED),
    ],
)
def test_a_figure_may_be_a_share_below_what_is_expected(
    sealed: Path, rate: float, share: float, verdict: Verdict
) -> None:
    [found] = check_figures([archive(sealed, rate=rate)], [replace(PLACE, value=200.0)], share)
    assert (found.verdict, found.share) == (verdict, rate / 200.0)


@pytest.mark.parametrize(
    "change",
    [{"machine": "gke/n2"}, {"workers": 3}, {"ranks": 3}, {"backend": "mpi"}, {"task": "other"}, {"preset": "legacy"}],
)
def test_without_a_figure_for_the_same_place_nothing_can_be_told(sealed: Path, change: dict[str, Any]) -> None:
    [found] = check_figures([archive(sealed)], [replace(PLACE, value=200.0, **change)])
    assert (found.verdict, found.expected, found.share, found.links) == (Verdict.CANNOT_TELL, None, None, ())


@pytest.mark.parametrize(
    "change",
    [
        {"outcome": "failed"},
        {"outcome": "goal_missed"},
        {"label": {"word": "functional", "reason": "x"}},
        {"samples": None},
    ],
)
def test_runs_that_measured_nothing_do_not_count(sealed: Path, change: dict[str, Any]) -> None:
    assert check_figures([archive(sealed, **change)], [replace(PLACE, value=1.0)]) == []


def test_machines_are_known_by_their_type_or_by_their_processors(sealed: Path) -> None:
    found = archive(sealed)
    assert name_machine(found) == "gke/n1"
    found.run["spec"]["cluster_kind"] = "kind"
    found.run["provenance"] = {"machine": {"cpu": "EPYC", "cores": 2}}
    assert name_machine(found) == "EPYC, 2 cores"
    found.run["provenance"] = None
    assert name_machine(found) == "unknown"


def test_a_checked_figure_as_a_document() -> None:
    link = SlowLink(0, 1, ("a", "b"), 1e9, 0.5)
    found = CheckedFigure(
        ("r",), replace(PLACE, value=200.0, source="s"), "throughput", "m", 100.0, 0.5, Verdict.FAILED, (link,)
    )
    assert found.to_dict() == {
        "runs": ["r"],
        "figure": "throughput",
        "machine": "m",
        "value": 100.0,
        "expected": {
            "machine": "gke/n1",
            "workers": 2,
            "ranks": 2,
            "backend": "gloo",
            "figure": "throughput",
            "value": 200.0,
            "source": "s",
            "task": "unknown-task",
            "preset": "spec",
        },
        "share": 0.5,
        "verdict": "failed",
        "suspects": ["a", "b"],
        "slow_links": [{"sender": 0, "receiver": 1, "nodes": ("a", "b"), "bits_per_second": 1e9, "share": 0.5}],
    }
    assert replace(found, expected=None).to_dict()["expected"] is None


@pytest.mark.parametrize(
    ("ends", "suspects"),
    [
        ([], []),
        ([("b", "a")], ["a", "b"]),
        ([("a", "b"), ("b", "c")], ["b"]),
        ([("a", "b"), ("c", "d")], []),
    ],
)
def test_a_machine_at_an_end_of_every_slow_link_is_suspect(ends: list[tuple[str, str]], suspects: list[str]) -> None:
    links = tuple(SlowLink(0, 1, each, 1.0, 0.5) for each in ends)
    assert CheckedFigure((), None, "x", "m", 1.0, None, Verdict.FAILED, links).suspects == suspects


# --- links ----------------------------------------------------------------------------------------------------------


class Probed:
    """An archive whose probe before the task measured these links."""

    def __init__(self, *rates: Any, engine: str = "local", each: int = 1, stage: str = "before") -> None:
        links = [
            {"from": at, "to": (at + 1) % len(rates), "alone_bits_per_second": rate} for at, rate in enumerate(rates)
        ]
        self.probes: list[dict[str, Any]] = [{"stage": stage, "links": links}]
        self.names: tuple[str, ...] = ("network.json",)
        self.run = {"spec": {"engine": engine, "processes_per_worker": each}}
        self.result = {"worker_states": [{"rank": rank, "node": f"n{rank}"} for rank in range(len(rates) // each)]}

    def document(self, name: str) -> dict[str, Any]:
        assert name == "network.json"
        return {"probes": self.probes}


def slow(probed: Probed, share: float = 0.95) -> list[SlowLink]:
    return find_slow_links(probed, share)  # type: ignore[arg-type]


def test_a_link_below_a_share_of_the_median_is_slow() -> None:
    assert slow(Probed(100.0, 100.0, 100.0, 95.0, 94.0)) == [SlowLink(4, 0, ("n4", "n0"), 94.0, 0.94)]
    assert slow(Probed(100.0, 100.0, 95.0)) == []
    assert [link.sender for link in slow(Probed(100.0, 100.0, 79.0), 0.8)] == [2]


@pytest.mark.parametrize("rates", [(100.0, 1.0), (100.0, 1.0, None), (100.0, 1.0, 0.0), (100.0, 1.0, "x"), ()])
def test_fewer_than_three_measured_links_have_no_median_to_compare_with(rates: tuple[Any, ...]) -> None:
    assert slow(Probed(*rates)) == []


def test_only_the_first_probe_before_the_task_counts() -> None:
    assert slow(Probed(100.0, 100.0, 1.0, stage="after")) == []
    probed = Probed(100.0, 100.0, 100.0)
    probed.probes.append(Probed(100.0, 100.0, 1.0).probes[0])
    assert slow(probed) == []
    probed.probes.reverse()
    assert len(slow(probed)) == 1
    probed.names = ()
    assert slow(probed) == []


def test_processes_of_a_pod_are_on_its_node() -> None:
    assert slow(Probed(100.0, 100.0, 1.0, 100.0, engine="kubernetes", each=2))[0].nodes == ("n1", "n1")
    assert slow(Probed(100.0, 1.0, 100.0, 100.0, engine="kubernetes", each=2))[0].nodes == ("n0", "n1")
    probed = Probed(100.0, 100.0, 1.0)
    probed.result["worker_states"][2]["node"] = None
    del probed.result["worker_states"][0]
    assert slow(probed)[0].nodes == ("?", "?")


# --- what is recorded -----------------------------------------------------------------------------------------------


def test_means_of_repeats_are_recorded_and_replace_what_was_recorded_before(sealed: Path, tmp_path: Path) -> None:
    assert read_recorded(tmp_path) == []
    record_expected(tmp_path, [archive(sealed, rate=1.0, backend="mpi")])
    record_expected(tmp_path, [archive(sealed, rate=5.0)])
    [made] = record_expected(tmp_path, [archive(sealed, "a", 100.0), archive(sealed, "b", 300.0)])
    assert replace(made, source="") == replace(PLACE, value=200.0)
    assert made.source.startswith("recorded 20")
    assert made.source.endswith(": a, b")
    found = read_recorded(tmp_path)
    assert [(each.backend, each.value) for each in found] == [("mpi", 1.0), ("gloo", 200.0)]
    document = json.loads((tmp_path / "baselines.json").read_text())
    assert document["schema_version"] == 1
    assert list_expected(tmp_path)[:2] == found


def test_runs_without_a_figure_cannot_be_recorded(sealed: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="None of these runs has a valid throughput or bandwidth"):
        record_expected(tmp_path, [archive(sealed, samples=None)])
    assert not (tmp_path / "baselines.json").exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"figures": [{"value": 1}]}', '{"figures": [{"value": 1, "x": 2}]}'])
def test_a_broken_file_of_recorded_figures_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "baselines.json").write_text(text)
    with pytest.raises(UsageError, match=r"baselines\.json cannot be read"):
        read_recorded(tmp_path)


def test_what_was_recorded_counts_before_what_is_shipped(tmp_path: Path) -> None:
    shipped = list_expected(tmp_path)
    assert len({each.key for each in shipped}) == len(shipped)
    own = replace(shipped[0], value=1.0, source="recorded")
    (tmp_path / "baselines.json").write_text(
        json.dumps({"figures": [{**vars(own)}, {**vars(own), "value": None, "machine": "x"}]})
    )
    assert list_expected(tmp_path)[0] == own
    assert len(list_expected(tmp_path)) == len(shipped)


def test_the_published_all_reduces_are_expected_of_one_worker_per_machine(tmp_path: Path) -> None:
    """gloo on 4 CPUs: 400 MB in 1.1 s are 0.545 GB/s of bus bandwidth, 2 * 3 / 4 times size / time."""
    found = {each.key[:5]: each for each in list_expected(tmp_path)}
    each = found["gke/n1-standard-4", 4, 4, "gloo", "all_reduce fp32, best busbw GB/s"]
    assert each.value >= 0.4 / 1.1 * 1.5
    assert (each.source, each.task, each.preset) == ("original MLBench, release 2020, read off its plots", "", "")
