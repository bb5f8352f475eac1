"""Experiment files: what they ask for, in which order, and what they may spend."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model.run import LOCAL, Cluster
from mlbench_cli.results.analysis.series import name_settings
from mlbench_cli.runs.experiment import Candidate
from mlbench_cli.runs.experiment_file import (
    expand_file,
    find_file,
    list_shipped,
    parse_experiment_file,
    read_experiment_file,
)
from mlbench_cli.runs.launch import Machine
from mlbench_cli.util.yaml_text import read_yaml

MACHINE = Machine(cores=8, gpus=0)
REMOTE = Cluster("far", "attached", details={"namespace": "default", "registry": "ghcr.io/me"})

TWO_PARTS = """
title: Two parts
workers: [1, 2]
repeat: 2
num-cpus: 1
published: [survey-2020/BERT-Base]
runs:
  - {name: a, command: "true {x}", matrix: {set.x: [1, 2]}}
  - {name: b, command: "false"}
"""


def candidates_of(text: str, *clusters: Cluster) -> tuple[Candidate, ...]:
    return expand_file(parse_experiment_file(read_yaml(text), "demo"), clusters or (LOCAL,), MACHINE)


def settings_of(candidates: tuple[Candidate, ...]) -> list[dict[str, str]]:
    return name_settings([(candidate.spec.task, candidate.point) for candidate in candidates])


def test_what_stands_at_the_top_holds_for_every_entry() -> None:
    found = parse_experiment_file(read_yaml(TWO_PARTS), "demo")
    assert (found.name, found.title) == ("demo", "Two parts")
    assert found.published == ("survey-2020/BERT-Base",)
    assert [(entry, request.name, request.workers) for entry, request in found.entries] == [
        ("a", "demo-a", (1, 2)),
        ("b", "demo-b", (1, 2)),
    ]


def test_runs_alternate_between_settings_and_repeats_come_last() -> None:
    names = [candidate.spec.name for candidate in candidates_of(TWO_PARTS)]
    assert names == [
        *("demo-a-x1-1-r1", "demo-b-1-r1", "demo-a-x1-2-r1", "demo-b-2-r1", "demo-a-x2-1-r1", "demo-a-x2-2-r1"),
        *("demo-a-x1-1-r2", "demo-b-1-r2", "demo-a-x1-2-r2", "demo-b-2-r2", "demo-a-x2-1-r2", "demo-a-x2-2-r2"),
    ]


def test_rows_are_set_apart_by_entry_cluster_and_matrix() -> None:
    assert settings_of(candidates_of("command: 'true {x}'\nworkers: [1]\nmatrix: {set.x: [1]}")) == [
        {"task": "custom", "x": "1"}
    ]
    two = candidates_of("task: digits_resnet\nworkers: [1]", LOCAL, REMOTE)
    assert [candidate.spec.name for candidate in two] == ["demo-local-1", "demo-far-1"]
    assert [settings["cluster"] for settings in settings_of(two)] == ["local", "far"]
    assert [settings["series"] for settings in settings_of(candidates_of(TWO_PARTS))][:2] == ["a", "b"]


def test_a_series_is_named_only_where_entries_have_the_same_task() -> None:
    apart = "workers: [1]\nnum-cpus: 1\nruns: [{name: a, task: mnist}, {name: b, task: digits_resnet, preset: tiny}]"
    assert settings_of(candidates_of(apart)) == [{"task": "mnist"}, {"task": "digits_resnet"}]


def test_what_is_recorded_of_a_file_says_the_same_again() -> None:
    found = parse_experiment_file(read_yaml(TWO_PARTS), "demo")
    again = parse_experiment_file(found.to_document(), "another")
    assert (again.name, again.entries) == (found.name, found.entries)
    assert again == replace(found, common=replace(found.common, name="demo"))


def test_two_entries_that_are_the_same_run_are_refused() -> None:
    with pytest.raises(UsageError, match="demo-a-1 and demo-b-1 would be the same run"):
        candidates_of("workers: [1]\nnum-cpus: 1\nruns: [{name: a, command: 'true'}, {name: b, command: 'true'}]")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("published: ['']", '"published" is'),
        ("published: [1]", '"published" is'),
        ("metric: 3", "must be texts"),
        ("runs: [3]", "not a list of mappings"),
        ("runs: [{name: a}, {}, {name: '2'}]", "same name"),
        ("[1]", "not a mapping"),
        ("runs: 3", '"runs" is 3'),
        ("runs: []", '"runs" is'),
        ("runs: [{task: x, workerss: 1}]", 'Entry 1 of runs: Unknown key "workerss"'),
        ("workerss: 1", 'Unknown key "workerss".*workers'),
        ("runs: [{name: a}, {name: a}]", "same name"),
        ("clusters: {a: b}", "not a list of strings"),
        ("title: [a]", "must be texts"),
        ("cluster: far", "Name the clusters once"),
        ("runs: [{matrix: {cluster: [a, b]}}]", "Name the clusters once"),
    ],
)
def test_a_wrong_file_names_the_key(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_experiment_file(read_yaml(text), "demo")


def test_a_file_that_is_not_there_says_which_are_shipped(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="llm-scalin") as caught:
        find_file("llm-scalin")
    assert "llm-scaling" in str(caught.value.hint)
    assert find_file("llm-scaling").is_file()
    damaged = tmp_path / "x.yaml"
    damaged.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="cannot be read"):
        read_experiment_file(damaged)


GPUS = Machine(cores=64, gpus=64)


@pytest.mark.parametrize("name", list_shipped())
def test_every_shipped_file_resolves_to_runs(name: str) -> None:
    found = read_experiment_file(find_file(name))
    assert found.title != found.name
    local = ("seed-252", "thin-links", "thin-links-quick")
    clusters = (LOCAL,) if name in local else (REMOTE,)
    assert len(expand_file(found, clusters, GPUS)) > 2


def test_the_seeds_file_has_84_configurations_for_each_of_its_three_networks() -> None:
    candidates = expand_file(read_experiment_file(find_file("seed-252")), (LOCAL,), GPUS)
    assert len(candidates) == 5 * 252 // 3
