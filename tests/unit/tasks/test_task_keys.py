"""Parameters and the keys of a task.yaml: what is read of them, at which limits, and how a mistake is named."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlbench_cli.errors import UsageError
from mlbench_cli.model.goals import GoalRule
from mlbench_cli.tasks.catalog import (
    MethodRule,
    Parameter,
    Task,
    WorkersRule,
    find_rules,
    load_task,
    parse_task,
    short,
)
from mlbench_cli.tasks.datafiles import DataFiles
from task_images.harness.settings import parameter


@dataclass(frozen=True)
class Settings:
    """The parameters of the task in these tests."""

    rate: float = parameter(0.1, "learning rate", min=0, max=1, formerly="lr")
    steps: int = parameter(5, "updates", min=1)
    kind: str = parameter("sgd", "optimizer", choices=("sgd", "adam"))
    goal_full: float = parameter(80.0, "goal")
    goal_light: float = parameter(70.0, "easier goal")


LEAST: dict[str, Any] = {
    "name": "t",
    "number": 1,
    "title": "T",
    "image": "i",
    "command": ["python", "-m", "t"],
    "backends": ["gloo"],
    "devices": ["cpu"],
    "data": "none",
}


def parse(**changes: Any) -> Task:
    return parse_task(yaml.safe_dump({**LEAST, **changes}), Path("t/task.yaml"))


def refuse(**changes: Any) -> str:
    with pytest.raises(UsageError) as caught:
        parse(**changes)
    assert caught.value.message.startswith("t/task.yaml: ")
    return caught.value.message.removeprefix("t/task.yaml: ")


# --- task.yaml --------------------------------------------------------------------------------------------------------


def test_a_short_task_has_defaults() -> None:
    assert parse() == Task(
        name="t",
        number="1",
        title="T",
        image="i",
        command=("python", "-m", "t"),
        backends=("gloo",),
        devices=("cpu",),
        data="none",
        parameters={},
        presets={"spec": {}},
    )
    assert parse().folder == Path("t")


def test_every_key_of_a_task_is_read() -> None:
    found = parse(
        backends=["gloo", "nccl", "mpi", "grpc", "jax"],
        devices=["gpu", "cpu"],
        settings=__name__,
        presets={"spec": {"steps": 9}, "tiny": {"rate": "0.5", "kind": "adam"}},
        goal={"metric": "Prec@1", "comparison": "<=", "wording": "{threshold}%"},
        method={"own": "bsp", "sync": ["every", "local:4"]},
        files={"wanted": [["a"]], "instead": "x"},
        free=["rate"],
        notes=["one", "two"],
        measured_on=["CPU"],
        preflight="t.preflight",
        legacy_name="old",
        packages=["numpy"],
        workers={"sensible": 32, "reason": "why"},
    )
    assert (found.backends, found.devices) == (("gloo", "nccl", "mpi", "grpc", "jax"), ("gpu", "cpu"))
    assert found.goal == GoalRule("Prec@1", "<=", "{threshold}%")
    assert found.method == MethodRule("bsp", {"sync": ("every", "local:4")})
    assert found.files == DataFiles({}, (".",), (("a",),), "x")
    assert (found.free, found.notes, found.measured_on) == (("rate",), ("one", "two"), ("CPU",))
    assert (found.preflight, found.legacy_name, found.packages) == ("t.preflight", "old", ("numpy",))
    assert (found.workers, found.settings, found.extends) == (WorkersRule(32, "why"), __name__, None)
    defaults = {"rate": 0.1, "steps": 9, "kind": "sgd", "goal_full": 80.0, "goal_light": 70.0}
    assert found.presets == {"spec": defaults, "tiny": {"rate": 0.5, "kind": "adam"}}
    assert found.resolve("tiny") == {**defaults, "rate": 0.5, "kind": "adam"}
    assert found.parameters["rate"] == Parameter("rate", "float", "learning rate", 0.0, 1.0, (), "lr")
    assert found.parameters["steps"] == Parameter("steps", "int", "updates", 1.0, None)


@pytest.mark.parametrize("key", ["backends", "command", "data", "devices", "image", "name", "number", "title"])
def test_every_required_key_is_missed_by_its_name(key: str) -> None:
    text = yaml.safe_dump({name: value for name, value in LEAST.items() if name != key})
    with pytest.raises(UsageError, match=f'^t/task.yaml: the key "{key}" is missing.$'):
        parse_task(text, Path("t/task.yaml"))


@pytest.mark.parametrize("key", ["name", "title", "image", "data", "preflight", "settings", "legacy_name"])
@pytest.mark.parametrize("value", ["", 3, ["x"]])
def test_texts_are_not_empty(key: str, value: Any) -> None:
    assert refuse(**{key: value}) == f'"{key}" is not a text.'


@pytest.mark.parametrize("key", ["command", "backends", "devices", "notes", "measured_on", "packages"])
@pytest.mark.parametrize("value", ["x", [], [1], {"a": 1}])
def test_lists_hold_texts_and_are_not_empty(key: str, value: Any) -> None:
    assert refuse(**{key: value}) == f'"{key}" is not a list of strings.'


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": ["tpu"]}, "'tpu' in \"devices\" is not one of cpu, gpu."),
        ({"backends": ["gloo", "xla"]}, "'xla' in \"backends\" is not one of gloo, nccl, mpi, grpc, jax."),
        (
            {"settings": __name__, "free": ["speed"]},
            "'speed' in \"free\" is not one of rate, steps, kind, goal_full, goal_light.",
        ),
        ({"method": "bsp"}, '"method" is not a mapping with a preset as "own".'),
        ({"method": {"sync": ["every"]}}, '"method" is not a mapping with a preset as "own".'),
        ({"method": {"own": "bsp", "sync": "every"}}, '"sync" is not a list of strings.'),
        ({"workers": 32}, '"workers" is not a mapping with a number as "sensible" and a text as "reason".'),
        (
            {"workers": {"sensible": 32}},
            '"workers" is not a mapping with a number as "sensible" and a text as "reason".',
        ),
        (
            {"workers": {"sensible": "32", "reason": "x"}},
            '"workers" is not a mapping with a number as "sensible" and a text as "reason".',
        ),
        (
            {"workers": {"sensible": 32, "reason": 1}},
            '"workers" is not a mapping with a number as "sensible" and a text as "reason".',
        ),
        ({"presets": {1: {}}}, '"presets" is not a mapping with texts as keys.'),
        ({"presets": {"tiny": 3}}, 'the preset "tiny" is not a mapping.'),
        ({"presets": {"spec": []}}, 'the preset "spec" is not a mapping.'),
        (
            {"settings": __name__, "presets": {"tiny": {"step": 1}}},
            'the preset "tiny" sets \'step\', which is not a parameter. Did you mean "steps"?',
        ),
        ({"goal": []}, "a goal has exactly metric, comparison and wording."),
        (
            {"goal": {"metric": "a", "comparison": ">=", "wording": "b", "more": 1}},
            "a goal has exactly metric, comparison and wording.",
        ),
        ({"settings": "a..b"}, "\"settings\" is not the name of a module: 'a..b'."),
    ],
)
def test_a_mistake_in_a_task_is_named(changes: dict[str, Any], message: str) -> None:
    assert refuse(**changes) == message


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"parameters": {}}, "settings: MODULE names the module whose class Settings declares the parameters."),
        ({"presets": {"tiny": {"x": 1}}}, "settings: MODULE names the module whose class Settings declares"),
        ({"settings": __name__, "presets": {"tiny": {"x": 1}}}, f"Declare it in the class Settings of {__name__}."),
    ],
)
def test_a_parameter_that_is_nowhere_declared_comes_with_the_place_to_declare_it(
    changes: dict[str, Any], hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        parse(**changes)
    assert str(caught.value.hint).startswith(hint)


# --- values -----------------------------------------------------------------------------------------------------------

TASK = parse(settings=__name__, presets={"tiny": {"steps": 2}})


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"rate": 0}, {"rate": 0.0}),
        ({"rate": "1"}, {"rate": 1.0}),
        ({"lr": "0.5"}, {"rate": 0.5}),
        ({"steps": "1"}, {"steps": 1}),
        ({"kind": "adam"}, {"kind": "adam"}),
        ({}, {}),
    ],
)
def test_values_at_the_limits_are_taken(changes: dict[str, Any], values: dict[str, Any]) -> None:
    assert TASK.resolve("tiny", changes) == {**TASK.resolve("tiny"), **values}


@pytest.mark.parametrize(
    ("preset", "changes", "message", "hint"),
    [
        (
            "tny",
            {},
            'The task "t" has no preset "tny", only spec, tiny. Did you mean "tiny"?',
            "mlbench tasks t",
        ),
        (
            "spec",
            {"rat": 1},
            'The task "t" has no parameter "rat". Did you mean "rate"?',
            "mlbench tasks t",
        ),
        ("spec", {"rate": 1.01}, 'The parameter "rate" is 1.01, the most is 1.', "--set rate=1"),
        ("spec", {"rate": -0.5}, 'The parameter "rate" is -0.5, the least is 0.', "--set rate=0"),
        ("spec", {"steps": "0"}, "The parameter \"steps\" is '0', the least is 1.", "--set steps=1"),
        (
            "spec",
            {"steps": "many"},
            "The parameter \"steps\" is 'many', which is not of type int.",
            "mlbench tasks t",
        ),
        ("spec", {"kind": "lion"}, "The parameter \"kind\" is 'lion', not one of sgd, adam.", "mlbench tasks t"),
        ("spec", {"lr": 1, "rate": 1}, '"lr" and "rate" are the same parameter.', "--set rate=VALUE"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_one_that_can(
    preset: str, changes: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        TASK.resolve(preset, changes)
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize(("limit", "shown"), [(0.5, "0.5"), (2.0, "2"), (1e6, "1000000")])
def test_a_limit_is_shown_as_it_can_be_typed(limit: float, shown: str) -> None:
    with pytest.raises(UsageError) as caught:
        Parameter("x", "float", "help", max=limit).check(limit + 1)
    assert caught.value.hint == f"--set x={shown}"


@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [
        ("int", 2**63 - 1, 2**63 - 1),
        ("int", -(2**63) + 1, -(2**63) + 1),
        ("int", "-5", -5),
        ("float", 3, 3.0),
        ("float", "-1e-3", -0.001),
        ("str", "", ""),
        ("bool", "YES", True),
        ("bool", False, False),
        ("list", [1, "a", 2.5], [1, "a", 2.5]),
        ("list", (1, 2), [1, 2]),
        ("list", " [ 1 , a, 1e3,] ", [1, "a", 1000.0]),
        ("sizes", [8, "16"], [8, 16]),
        ("sizes", "8:32:x2", [8, 16, 32]),
    ],
)
def test_values_of_every_type(kind: str, value: Any, read: Any) -> None:
    found = Parameter("x", kind, "help").check(value)
    assert (found, type(found)) == (read, type(read))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int", -(2**63)),
        ("int", 1.0),
        ("int", None),
        ("float", None),
        ("float", "-inf"),
        ("float", [1]),
        ("float", True),
        ("str", None),
        ("str", True),
        ("bool", 0),
        ("bool", ""),
        ("list", 3),
        ("list", [None]),
        ("list", [True]),
        ("sizes", 8),
        ("sizes", None),
    ],
)
def test_values_that_are_of_no_such_type(kind: str, value: Any) -> None:
    with pytest.raises(
        UsageError, match=re.escape(f'The parameter "x" is {short(value)}, which is not of type {kind}.')
    ):
        Parameter("x", kind, "help").check(value)


# --- rules ------------------------------------------------------------------------------------------------------------


def test_rules_are_those_of_the_preset_and_of_spec_for_an_unknown_one() -> None:
    task = load_task("digits_resnet")
    tiny, unknown = find_rules("digits_resnet", "tiny"), find_rules("digits_resnet", "mine")
    assert tiny is not None
    assert unknown is not None
    assert (tiny.spec, tiny.preset) == (task.resolve("spec"), task.resolve("tiny"))
    assert (unknown.spec, unknown.preset) == (task.resolve("spec"), task.resolve("spec"))
    assert (tiny.name, tiny.image, tiny.command, tiny.free) == (task.name, task.image, task.command, task.free)
    assert (tiny.goal, tiny.origin) == (task.goal, None)
