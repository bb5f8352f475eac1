"""What can be chosen before a run: proposed names, presets in words, missing data, clusters with GPUs, last answers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.model.run import LOCAL, Cluster
from mlbench_cli.runs import questions
from mlbench_cli.runs.launch import Machine
from mlbench_cli.runs.questions import (
    ask_questions,
    describe_preset,
    find_lack,
    has_gpus,
    propose_name,
    recall,
    remember,
)
from mlbench_cli.runs.request import Request
from mlbench_cli.tasks.catalog import load_task


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without GPUs and data, whose user has answered nothing yet."""
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("mlbench_cli.runs.launch.local_machine", lambda: Machine(2, 0, None))
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("taken", "name"),
    [
        ([], "my-run"),
        (["other-1", "my-runs", "my-run2-1"], "my-run"),
        (["my-run"], "my-run2"),
        (["my-run-1"], "my-run2"),
        (["my-run-1", "my-run2-4", "my-run3"], "my-run4"),
        (["my-run", "my-run3"], "my-run2"),
    ],
)
def test_the_proposed_name_is_free_for_all_sizes(taken: list[str], name: str) -> None:
    assert propose_name(taken) == name


@pytest.mark.parametrize(
    ("details", "gpus"), [({}, False), ({"gpus_per_node": 0}, False), ({"gpus_per_node": 8}, True)]
)
def test_a_cluster_has_gpus_if_its_machines_have(details: dict[str, Any], gpus: bool) -> None:
    assert has_gpus(Cluster("c", "gke", details=details)) is gpus


@pytest.mark.parametrize(("gpus", "has"), [(0, False), (1, True)])
def test_this_machine_is_looked_at(monkeypatch: pytest.MonkeyPatch, gpus: int, has: bool) -> None:
    monkeypatch.setattr("mlbench_cli.runs.launch.local_machine", lambda: Machine(2, gpus, None))
    assert has_gpus(LOCAL) is has


@pytest.mark.parametrize(
    ("preset", "text"),
    [
        ("spec", "as in the benchmark's specification"),
        ("four", "a=1, b=2, c=x, d=4.5"),
        ("five", "a=1, b=2, c=3, d=4, …"),
        ("lists", "b=2"),
        ("none", ""),
    ],
)
def test_a_preset_in_a_few_words(preset: str, text: str) -> None:
    presets: dict[str, dict[str, Any]] = {
        "spec": {"a": 1},
        "four": {"a": 1, "b": 2, "c": "x", "d": 4.5},
        "five": {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5},
        "lists": {"a": [1, 2], "b": 2},
        "none": {},
    }
    assert describe_preset(replace(load_task("mnist"), presets=presets), preset) == text


@pytest.mark.parametrize(
    ("task", "preset", "options", "lack"),
    [
        ("mnist", "spec", {}, "downloads 12 MB"),
        ("mnist", "tiny", {}, ""),
        ("mnist", "tiny", {"changes": {"data": "mnist"}}, "downloads 12 MB"),
        ("mnist", "spec", {"changes": {"data": "synthetic"}}, ""),
        ("mnist", "spec", {"changes": {"data": "synthetic", "depth": 8}}, "downloads 12 MB"),  # of another task
        ("mnist", "spec", {"is_local": False}, ""),
        ("imagenet_resnet", "spec", {}, "data missing"),
        ("imagenet_resnet", "tiny", {}, ""),
        ("digits_resnet", "spec", {}, ""),
    ],
)
def test_what_is_missing_of_the_data(task: str, preset: str, options: dict[str, Any], lack: str) -> None:
    assert find_lack(load_task(task), preset, **{"is_local": True, **options}) == lack


def test_data_in_a_folder_are_not_missing(tmp_path: Path) -> None:
    folder = tmp_path / "imagenet"
    folder.mkdir()
    for name in ("train", "val"):
        assert find_lack(load_task("imagenet_resnet"), "spec", is_local=True, data_dir=str(tmp_path)) == "data missing"
        (folder / name).mkdir()
    assert find_lack(load_task("imagenet_resnet"), "spec", is_local=True, data_dir=str(tmp_path)) == ""


def test_the_questions_of_a_form(home: Path) -> None:
    clusters = [LOCAL, Cluster("far", "gke", "creating", details={"gpus_per_node": 1})]
    document = ask_questions(clusters, "far", ["my-run-1"]).to_dict()
    tasks = {task["name"]: task for task in document.pop("tasks")}
    assert document == {
        "name": "my-run2",
        "clusters": (
            {"name": "local", "provider": "local", "state": "ready", "is_local": True, "has_gpus": False},
            {"name": "far", "provider": "gke", "state": "creating", "is_local": False, "has_gpus": True},
        ),
        "cluster": "far",
        "own_backends": ("gloo", "nccl", "mpi"),
        "answers": dict.fromkeys(questions.REMEMBERED),
    }
    imagenet, mnist, digits = (tasks[name] for name in ("imagenet_resnet", "mnist", "digits_resnet"))
    assert imagenet["data"].startswith("ImageNet (ILSVRC 2012")
    assert (mnist["data"], digits["data"]) == (None, None)  # what a task downloads itself need not be put anywhere
    assert (digits["backends"], digits["has_gpu"]) == (("gloo", "nccl", "mpi", "jax"), True)
    assert digits["title"] == "ResNet-20 on handwritten digits"
    presets = {preset["name"]: preset for preset in mnist["presets"]}
    assert presets["throughput"] == {
        "name": "throughput",
        "note": "data=synthetic, training_images=12800, validation_images=1000, blocks=10",
        "lack": "",
    }
    assert presets["spec"]["lack"] == "downloads 12 MB"


@pytest.mark.parametrize(("current", "chosen"), [("b", "b"), ("gone", "a")])
def test_a_cluster_that_is_gone_is_not_chosen(current: str, chosen: str) -> None:
    assert ask_questions([Cluster("b", "gke"), Cluster("a", "gke")], current, []).cluster == chosen
    assert ask_questions([], current, []).cluster == current


# --- the last answers -----------------------------------------------------------------------------------------------


def test_answers_are_kept_on_top_of_older_ones(home: Path) -> None:
    assert remember(Request(name="x", workers=(1,), task="mnist", preset="tiny", backend="mpi", seed=3)) is None
    assert recall() == {"task": "mnist", "preset": "tiny", "backend": "mpi"}
    assert remember(Request(name="x", command="true", custom_backend="mine", run_on_all=False)) is None
    assert recall() == {
        "task": "custom",
        "preset": "tiny",
        "command": "true",
        "backend": "custom",
        "custom_backend": "mine",
        "run_on_all": False,
    }
    assert ask_questions([LOCAL], "local", []).answers == {
        **dict.fromkeys(("image", "cluster", "data_dir")),
        **recall(),
    }


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '"x"'])
def test_damaged_answers_are_none(home: Path, text: str) -> None:
    home.mkdir()
    (home / "answers.json").write_text(text)
    assert recall() == {}
    assert remember(Request(task="mnist")) is None
    assert json.loads((home / "answers.json").read_text()) == {"task": "mnist"}


def test_answers_that_cannot_be_saved_are_told(home: Path) -> None:
    home.write_text("a file where the folder would be")
    problem = remember(Request(task="mnist"))
    assert problem == f"The answers could not be saved to {home / 'answers.json'}: File exists."
