"""`mlbench baselines`: results against what their machines are expected to reach, and the slow links of a run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mlbench_cli.app import run
from mlbench_cli.model.run import Observation, WorkerState
from mlbench_cli.results.analysis.expected import find_slow_links
from mlbench_cli.results.archive.documents import write_run_document
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.archive.seal import seal
from tests.unit.results.runs import START, event, new_run, observation_of, result_event, spec

GOOD = (10e9, 10.1e9, 9.9e9, 10e9)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def collective_run(
    folder: Path,
    bandwidth: float,
    links: tuple[float, ...] = GOOD,
    kind: str = "gke/n1-standard-4",
    name: str = "c-4",
    engine: str = "kubernetes",
    each: int = 1,
) -> str:
    """A sealed run of the task allreduce with 4 ranks, `each` of them on a machine, with a probe of their ring before.

    Kubernetes has a state for each pod, the other engines one for each rank.
    """
    workers = 4 // each
    states = workers if engine == "kubernetes" else 4
    ring = [
        {"from": rank, "to": (rank + 1) % 4, "alone_bits_per_second": rate, "rtt_p50_seconds": 1e-4}
        for rank, rate in enumerate(links)
    ]
    probe = event("network", stage="before", form="full", ranks=4, networks=4, links=ring, seconds=1.0)
    run_spec = spec(name, workers, task="allreduce", parameters={}, cluster="far", engine=engine, cluster_kind=kind)
    made = new_run(
        folder,
        replace(run_spec, processes_per_worker=each),
        {0: [probe, result_event(9.0, "completed", samples=None)], 1: [], 2: [], 3: []},
    )
    place = {"collective": "all_reduce", "dtype": "fp32", "place": "in_place"}
    time = 1e6 * 1e8 / (bandwidth * 1e9)
    rows = [{**place, "bytes": 10**8, "p50_us": time, "mean_us": time, "busbw": bandwidth}]
    results = folder / "output" / "rank-0" / "results"
    results.mkdir(parents=True)
    (results / "collectives.json").write_text(json.dumps({"ranks": 4, "rows": rows, "series": []}))
    write_run_document(made)
    seal(made, on_nodes(observation_of(states, 12.0), states // workers))
    return str(folder)


def on_nodes(observation: Observation, states: int) -> Observation:
    workers = (
        WorkerState(each.rank, each.phase, None, f"node-{each.rank // states}", 0, START, START + 12.0)
        for each in observation.workers
    )
    return Observation(time=observation.time, workers=tuple(workers), ended=observation.ended)


def test_a_result_that_reaches_what_is_published_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = collective_run(tmp_path / "good", 0.54)
    assert run(["baselines", "check", good]) == 0
    assert "99 %" in capsys.readouterr().out


def test_the_slow_node_of_a_slow_result_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = collective_run(tmp_path / "slow", 0.3, links=(10e9, 4e9, 3e9, 10e9))
    assert run(["baselines", "check", slow]) == 7
    text = capsys.readouterr().out
    assert "rank 1 (node-1) to rank 2 (node-2): 4.00 Gbit/s, 57 % of the median" in text
    assert "All slow links involve node-2." in text
    assert run(["baselines", "check", slow, "-o", "json"]) == 7
    (check,) = json.loads(capsys.readouterr().out)["checks"]
    assert (check["verdict"], check["suspects"], len(check["slow_links"])) == ("failed", ["node-2"], 2)
    assert check["expected"]["source"].startswith("original MLBench")


@pytest.mark.parametrize("engine", ["kubernetes", "hosts"])
def test_the_machines_of_a_link_are_those_of_its_ranks(tmp_path: Path, engine: str) -> None:
    folder = collective_run(tmp_path / "slow", 0.3, links=(10e9, 4e9, 10e9, 10e9), engine=engine, each=2)
    with Archive.open(Path(folder)) as archive:
        (link,) = find_slow_links(archive)
    assert (link.sender, link.receiver, link.nodes) == (1, 2, ("node-0", "node-1"))


def test_of_a_machine_of_which_nothing_is_known_nothing_can_be_said(tmp_path: Path) -> None:
    other = collective_run(tmp_path / "other", 5.0, kind="eks/c9.large")
    assert run(["baselines", "check", other]) == 9


def test_what_was_recorded_counts_from_then_on(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = [
        collective_run(tmp_path / f"{n}", value, kind="eks/c9.large", name=f"c-4-r{n}")
        for n, value in ((1, 4.9), (2, 5.1))
    ]
    assert run(["baselines", "record", *first]) == 0
    assert "5.00 " in capsys.readouterr().out
    slow = collective_run(tmp_path / "slow", 4.0, kind="eks/c9.large", name="later-4")
    assert run(["baselines", "check", slow]) == 7
    assert run(["baselines", "check", slow, "--at-least", "75"]) == 0
    capsys.readouterr()
    assert run(["baselines", "--machine", "eks", "-o", "json"]) == 0
    (kept,) = json.loads(capsys.readouterr().out)["figures"]
    assert (kept["value"], kept["machine"]) == (5.0, "eks/c9.large")
    assert "c-4-r1, c-4-r2" in kept["source"]


def test_every_shipped_figure_has_a_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["baselines", "-o", "json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert len(figures) > 8
    assert all(each["source"] and each["value"] > 0 for each in figures)


def test_a_broken_file_and_bad_words_are_named(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.mkdir()
    (home / "baselines.json").write_text('{"figures": [{"x": 1}]}')
    assert run(["baselines"]) == 2
    assert "record again" in capsys.readouterr().err
    (home / "baselines.json").unlink()
    assert run(["baselines", "check", collective_run(tmp_path / "a", 1.0), "--at-least", "0"]) == 2
    assert run(["baselines", "check", str(tmp_path / "none.zip")]) == 4
