"""RunSpec: what it holds, what it refuses, and that it survives being written down."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.errors import UsageError
from mlbench_cli.model.spec import (
    KubernetesOptions,
    RunSpec,
    canonical_json,
    check_name,
    common_name,
)

Change = Mapping[str, Any]  # fields to replace
SPEC = RunSpec(
    "run-2",
    "far",
    "kubernetes",
    "custom",
    "custom",
    ("python", "x.py"),
    "gloo",
    2,
    parameters={"a": [1, 2.5, "x"]},
    processes_per_worker=4,
    kubernetes=KubernetesOptions(memory="8Gi", tolerations=("spot",)),
)


def test_it_survives_json() -> None:
    back = RunSpec.from_dict(json.loads(canonical_json(SPEC.to_dict())))
    assert back == SPEC
    assert back.hash == SPEC.hash
    assert back.world_size == 8


def test_the_hash_is_of_the_content() -> None:
    assert len({replace(SPEC, **change).hash for change in ({}, {"seed": 43}, {"argv": ("python", "y.py")})}) == 3
    reordered = dict(reversed(SPEC.to_dict().items()))
    assert RunSpec.from_dict(reordered).hash == SPEC.hash


def test_canonical_json_is_ascii() -> None:
    assert canonical_json({"b": "é\ud800", "a": 1}) == b'{"a":1,"b":"\\u00e9\\ud800"}'


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"workers": 0}, "from 1 to 4096"),
        ({"workers": 4097}, "from 1 to 4096"),
        ({"processes_per_worker": 65}, "from 1 to 64"),
        ({"device": "tpu"}, "neither cpu nor gpu"),
        ({"goal": "best"}, "neither full nor light"),
        ({"argv": ()}, "is empty"),
        ({"argv": ("python", "\0")}, "zero byte"),
        ({"argv": ("python", "\udcff")}, "not UTF-8"),
        ({"data_dir": "a\0"}, "zero byte"),
        ({"timeout": 0.0}, "above 0"),
        ({"timeout": float("nan")}, "above 0"),
        ({"timeout": 10**400}, "at most 30 days"),
        ({"gpus_per_worker": -1}, "from 0 to 64"),
        ({"cpus": float("inf")}, "at most 4096"),
        ({"seed": 2**32}, "4294967295"),
        ({"name": "Run"}, "not a DNS label"),
        ({"network": "1gbit,loss=1%"}, "loss is not supported"),
    ],
)
def test_refused(change: Change, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        replace(SPEC, **change)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "not an object"),
        ({1: 2}, "not an object"),
        ({**SPEC.to_dict(), "spec_version": 3}, "has version 3"),
        ({**SPEC.to_dict(), "worker": 2}, 'Did you mean "workers"?'),
        ({**SPEC.to_dict(), "workers": True}, "not of type int"),
        ({**SPEC.to_dict(), "workers": "2"}, "not of type int"),
        ({**SPEC.to_dict(), "argv": ["a", 1]}, "list of strings"),
        ({**SPEC.to_dict(), "kubernetes": {"memry": "8Gi"}}, 'Did you mean "memory"?'),
        ({**SPEC.to_dict(), "kubernetes": 3}, "The kubernetes is not an object"),
        ({**SPEC.to_dict(), "env": {"A": 1}}, "map strings to strings"),
    ],
)
def test_wrong_documents(document: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        RunSpec.from_dict(document)
    assert words in caught.value.message


@pytest.mark.parametrize("name", ["a", "a-1", "x" * 40, "run2"])
def test_good_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "1a", "a_b", "a.b", "a b", "ä", "a\n", "x" * 41])
def test_bad_names(name: str) -> None:
    with pytest.raises(UsageError):
        check_name(name)


def test_the_content_hash_leaves_out_the_name_and_what_is_only_known_of_the_cluster() -> None:
    for change in ({"name": "other-2"}, {"price": {"per_hour": 1.0}}, {"functional_only": "one machine"}):
        changed = replace(SPEC, **change)
        assert changed.content_hash == SPEC.content_hash
        assert changed.hash != SPEC.hash
    assert replace(SPEC, seed=43).content_hash != SPEC.content_hash


@pytest.mark.parametrize("key", ["name", "cluster", "engine", "task", "preset", "argv", "backend", "workers"])
def test_a_spec_without_a_required_key_names_it(key: str) -> None:
    document = SPEC.to_dict()
    del document[key]
    with pytest.raises(UsageError, match=f'lacks "{key}"'):
        RunSpec.from_dict(document)


@pytest.mark.parametrize(
    ("task", "preset", "runs"),
    [("t", "spec", True), ("custom", "custom", False), ("t", "open", False), ("t", "custom", False)],
)
def test_only_a_tasks_own_preset_runs_its_program(task: str, preset: str, runs: bool) -> None:
    assert replace(SPEC, task=task, preset=preset).runs_task_program is runs


def test_repeats_have_a_name_in_common() -> None:
    assert [common_name(name) for name in ("demo-2-r3", "demo-2", "demo-r3")] == ["demo-2", None, None]
