"""What can be chosen before a run: proposed names, presets in words, missing data, clusters with GPUs, last answers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.model.run import Cluster
from mlbench_cli.runs.questions import (
    describe_preset,
    find_lack,
    has_gpus,
    propose_name,
)
from mlbench_cli.tasks.catalog import load_task


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without GPUs and data, whose user has answered nothing yet."""
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
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


# --- the last answers -----------------------------------------------------------------------------------------------
