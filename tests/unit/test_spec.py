"""RunSpec: what it holds, what it refuses, and that it survives being written down."""

import json
from dataclasses import replace
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.spec import KubernetesOptions, RunSpec, canonical_json, check_name

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
    kubernetes=KubernetesOptions(memory="8Gi", tolerations=("spot",), env={"A": "1"}),
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
    ],
)
def test_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        replace(SPEC, **change)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "not an object"),
        ({1: 2}, "not an object"),
        ({**SPEC.to_dict(), "spec_version": 2}, "has version 2"),
        ({**SPEC.to_dict(), "worker": 2}, 'Did you mean "workers"?'),
        ({**SPEC.to_dict(), "workers": True}, "not of type int"),
        ({**SPEC.to_dict(), "workers": "2"}, "not of type int"),
        ({**SPEC.to_dict(), "argv": ["a", 1]}, "list of texts"),
        ({**SPEC.to_dict(), "kubernetes": {"memry": "8Gi"}}, 'Did you mean "memory"?'),
        ({**SPEC.to_dict(), "kubernetes": {"env": {"A": 1}}}, "map texts to texts"),
        ({key: value for key, value in SPEC.to_dict().items() if key != "backend"}, 'lacks "backend"'),
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
