"""The catalog: every shipped task is sound, and an entry that is not is refused with file and key."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.tasks.catalog import OWN, load_catalog, load_task, parse_task, read_entries
from mlbench_cli.util.yaml_text import read_yaml
from task_images.describe import describe_folder
from task_images.parameters import describe, parameter


@dataclass(frozen=True)
class Settings:
    """The parameters of GOOD."""

    rate: float = parameter(0.1, "learning rate", min=0, max=1)
    goal_full: float = parameter(80.0, "goal")
    goal_light: float = parameter(70.0, "easier goal")


GOOD: dict[str, Any] = {
    "name": "t",
    "number": "1a",
    "title": "T",
    "image": "t",
    "command": ["python", "-m", "t"],
    "backends": ["gloo"],
    "devices": ["cpu"],
    "data": "none",
    "goal": {"metric": "Prec@1", "comparison": ">=", "wording": "{threshold}%"},
    "parameters": describe(Settings),
    "presets": {"tiny": {"rate": "1e-3"}},
}
PLACE = Path("t/catalog.json")


def parse(**changes: Any) -> Any:
    return parse_task({**GOOD, **changes}, PLACE)


def test_the_catalog_is_what_the_tasks_declare() -> None:
    """If it fails: python -m task_images.describe."""
    assert OWN.read_text() == describe_folder(OWN.parent)


@pytest.mark.parametrize("name", sorted(load_catalog()))
def test_shipped_tasks(name: str) -> None:
    task = load_task(name)
    assert task.name == task.folder.name == name
    assert {"spec", "tiny"} <= set(task.presets)
    for preset in task.presets:
        assert set(task.resolve(preset)) == set(task.parameters)
    if task.goal is not None:
        assert "{threshold}" in task.goal.wording
        better = max if task.goal.comparison == ">=" else min
        values = task.resolve("spec")
        assert better(values["goal_full"], values["goal_light"]) == values["goal_full"]


# The published specification: MLBench's documentation of the releases 2020 (spec) and 2018. Another value is another
# benchmark, with which published results are not comparable.
SPECIFIED: dict[tuple[str, str], dict[str, Any]] = {
    ("allreduce", "spec"): {"min_exponent": 0, "max_exponent": 8, "count": 80, "samples": 100}
    | {"seconds_per_size": 0, "seconds_total": 0},
    ("cifar10_resnet20", "spec"): {"depth": 20, "version": 1, "batch_size": 128, "epochs": 164, "learning_rate": 0.02}
    | {"schedule": "plateau", "plateau_patience": 1, "scale_rate": True, "warmup_epochs": -1}
    | {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4, "goal_full": 80},
    ("cifar10_resnet20", "2018"): {"batch_size": 32, "learning_rate": 0.1 / 256 * 32, "warmup_epochs": 5}
    | {"schedule": "multistep", "milestones": [82, 109], "step_factor": 0.1, "nesterov": True},
    ("epsilon_logistic_regression", "spec"): {"batch_size": 128, "epochs": 164, "learning_rate": 4, "l1": 0}
    | {"l2": 2.5e-6, "schedule": "plateau", "plateau_patience": 1, "scale_limit": 0, "goal_full": 89, "goal_light": 80},
    ("epsilon_logistic_regression", "2018"): {"batch_size": 100, "schedule": "sqrt", "alpha": 0, "l2": 2.5e-6},
    ("wikitext2_awd_lstm", "spec"): {"batch_size": 80, "sequence_length": 70, "short_sequence_share": 0.05}
    | {"epochs": 750, "learning_rate": 30, "weight_decay": 1.2e-6, "warmup_epochs_per_rank": 3, "clip": 0.25}
    | {"switch_patience": 5, "activation_penalty": 2, "temporal_penalty": 1, "goal_full": 70},
    ("wmt16_gnmt", "spec"): {"longest": 75, "longest_test": 150, "global_batch": 2048, "largest_pass": 128, "epochs": 8}
    | {"learning_rate": 2e-3, "warmup_updates": 200, "warmup_start": 0, "decay_from": 0.4, "decay_every": 0.05}
    | {"decays": 4, "decay_factor": 0.5, "clip": 5, "precision": "fp16", "loss_scale": 2**10}
    | {"largest_loss_scale": 2**13, "loss_scale_window": 128, "goal_full": 24},
    ("wmt17_transformer", "spec"): {"longest": 80, "longest_test": 80, "global_batch": 2**17, "largest_pass": 8192}
    | {"epochs": 10, "learning_rate": 1.976e-3, "warmup_updates": 1000, "precision": "fp16", "loss_scale": 2**7}
    | {"loss_scale_window": 2000, "goal_full": 25},
}
NAMES_OF_MLBENCH_3 = {
    "allreduce": "PyTorch Distributed Backend benchmarking",
    "cifar10_resnet20": "PyTorch Cifar-10 ResNet-20",
    "cifar10_resnet20_ddp": "PyTorch Cifar-10 ResNet-20 (DDP)",
    "cifar10_resnet20_tensorflow": "Tensorflow Cifar-10 ResNet-20 Open-MPI",
    "epsilon_logistic_regression": "PyTorch Linear Logistic Regression",
    "wikitext2_awd_lstm": "PyTorch Language Modeling (AWD-LSTM)",
    "wmt16_gnmt": "PyTorch Machine Translation GNMT",
    "wmt17_transformer": "PyTorch Machine Translation Transformer",
}


def test_tasks_of_mlbench_3_are_as_specified() -> None:
    for (task, preset), specified in SPECIFIED.items():
        resolved = load_task(task).resolve(preset)
        assert {name: resolved[name] for name in specified} == specified, f"{task}, {preset}"
    known = {name: task.legacy_name for name, task in load_catalog().items() if task.legacy_name}
    assert known == NAMES_OF_MLBENCH_3


def test_an_unknown_task() -> None:
    with pytest.raises(NotFoundError, match='Did you mean "digits_resnet"') as caught:
        load_task("digit_resnet")
    assert caught.value.hint == "mlbench tasks"


def test_presets_change_spec() -> None:
    task = parse()
    assert task.resolve("tiny") == {"rate": 0.001, "goal_full": 80.0, "goal_light": 70.0}
    assert task.resolve("tiny", {"rate": "0.5"})["rate"] == 0.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nmae": "x"}, "unknown key 'nmae'. Did you mean \"name\"?"),
        ({"title": ""}, '"title" is not a text'),
        ({"legacy_name": 3}, '"legacy_name" is not a text'),
        ({"backends": ["gloo", "carrier-pigeon"]}, "'carrier-pigeon' in \"backends\""),
        ({"backends": []}, '"backends" is not a list'),
        ({"devices": "cpu"}, '"devices" is not a list'),
        ({"goal": {"metric": "x"}}, "exactly metric, comparison and wording"),
        ({"goal": {"metric": "x", "comparison": ">", "wording": "x"}}, "neither >= nor <="),
        ({"presets": []}, '"presets" is not a mapping'),
        ({"parameters": 3}, '"parameters" is not a mapping'),
        ({"parameters": {}, "presets": {}}, "has the parameters goal_full and goal_light"),
        ({"presets": {**GOOD["presets"], "tiny": {"size": 1}}}, "sets 'size', which is not a parameter"),
        (
            {"presets": {**GOOD["presets"], "tiny": {"rate": 2}}},
            'preset "tiny": The parameter "rate" is 2, the most is 1',
        ),
    ],
)
def test_wrong_tasks(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        parse(**changes)
    assert caught.value.message.startswith("t/catalog.json: ")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (
            {"type": "int", "default": 3},
            'the parameter "a" needs a type (int, float, str, bool, list, sizes) and a help',
        ),
        ({"type": "dict", "help": "h", "default": {}}, 'the parameter "a" needs a type'),
        ({"type": "int", "help": "h", "max": 5, "default": 7}, 'a default: The parameter "a" is 7, the most is 5'),
        ({"type": "int", "help": "h", "max": "five", "default": 7}, 'a limit of the parameter "a" is not a number'),
        ({"type": "str", "help": "h", "choices": ["y"], "default": "x"}, "The parameter \"a\" is 'x', not one of y"),
        (
            {"type": "str", "help": "h", "choices": [3], "default": "x"},
            "the choices of the parameter",
        ),
        ({"type": "int", "help": "h"}, 'The parameter "a" is None, which is not of type int'),
        (3, 'the parameter "a" needs a type'),
    ],
)
def test_a_wrong_parameter_is_refused(entry: object, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        parse(parameters={"a": entry}, goal=None, presets={})
    assert caught.value.message.startswith("t/catalog.json: ")


def test_reading_the_catalog_loads_no_task_and_no_framework() -> None:
    code = "import sys; from mlbench_cli.tasks.catalog import load_catalog; load_catalog(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"torch", "numpy", "tensorflow", "task_images.mnist"}.isdisjoint(loaded)


def test_a_missing_key() -> None:
    with pytest.raises(UsageError, match='the key "data" is missing'):
        parse_task({key: GOOD[key] for key in GOOD if key != "data"}, PLACE)


@pytest.mark.parametrize("text", ["", "[", "[]", "{}", '{"tasks": 3}', '{"tasks": [3]}', "[" * 5000, "\0"])
def test_a_damaged_catalog_is_refused_with_what_writes_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "catalog.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=re.escape(str(file))) as caught:
        read_entries(file)
    assert caught.value.hint == f"python -m task_images.describe {tmp_path}"


@pytest.mark.parametrize(
    "text", ["!!float ''", "!!bool x", "2001-99-99", "[" * 5000, "- " * 200_000, "{a: " * 200_000, "\0", "a: b: c"]
)
def test_wrong_yaml(text: str) -> None:
    with pytest.raises(UsageError, match="Not valid YAML"):
        read_yaml(text)


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"epochs": "0"}, "--set epochs=1"),
        ({"momentum": "1.5"}, "--set momentum=1"),
        ({"epochs": "x"}, "mlbench tasks"),
    ],
)
def test_a_parameter_that_cannot_be_comes_with_one_that_can(changes: dict[str, str], hint: str) -> None:
    with pytest.raises(UsageError) as error:
        load_task("digits_resnet").resolve("spec", changes)
    assert error.value.hint is not None
    assert error.value.hint.startswith(hint)
