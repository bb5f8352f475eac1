"""The catalog: every shipped task is sound, and a task.yaml that is not is refused with file and key."""

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.tasks.catalog import Parameter, load_catalog, load_task, parse_task, short
from mlbench_cli.util.yaml_text import read_yaml
from task_images.parameters import SgdSettings, describe, parameter

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
    "settings": __name__,
    "presets": {"tiny": {"rate": "1e-3"}},
}


@dataclass(frozen=True)
class Settings:
    """What GOOD and its variants name: this module."""

    rate: float = parameter(0.1, "learning rate", min=0, max=1)
    goal_full: float = parameter(80.0, "goal")
    goal_light: float = parameter(70.0, "easier goal")


def parse(**changes: Any) -> Any:
    return parse_task(yaml.safe_dump({**GOOD, **changes}), Path("t/task.yaml"))


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


def test_the_catalog_is_in_the_order_of_numbers() -> None:
    numbers = [task.number for task in load_catalog().values()]
    assert numbers == sorted(numbers)


def test_an_unknown_task() -> None:
    with pytest.raises(NotFoundError, match='Did you mean "digits_resnet"') as caught:
        load_task("digit_resnet")
    assert caught.value.hint == "mlbench tasks"


def test_presets_change_spec() -> None:
    task = parse()
    assert task.resolve("tiny") == {"rate": 0.001, "goal_full": 80.0, "goal_light": 70.0}
    assert task.resolve("tiny", {"rate": "0.5"})["rate"] == 0.5


def test_a_parameter_is_found_by_its_former_name() -> None:
    task = load_task("mnist")
    assert task.resolve("spec", {"rate": "0.5"}) == task.resolve("spec", {"learning_rate": "0.5"})
    with pytest.raises(UsageError, match='"rate" and "learning_rate" are the same parameter'):
        task.resolve("spec", {"rate": "0.5", "learning_rate": "0.5"})


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
        ({"parameters": {}}, "unknown key 'parameters'"),
        ({"presets": []}, '"presets" is not a mapping'),
        ({"settings": 3}, '"settings" is not a text'),
        ({"settings": ".settings"}, "\"settings\" is not the name of a module: '.settings'"),
        ({"settings": "no_such.settings"}, 'class Settings of "no_such.settings" cannot be read: ModuleNotFoundError'),
        ({"settings": "json"}, 'class Settings of "json" cannot be read: AttributeError'),
        ({"settings": "task_images.allreduce.settings", "presets": {}}, "has the parameters goal_full and goal_light"),
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
    assert caught.value.message.startswith("t/task.yaml: ")


def wrong(**fields: Any) -> type:
    return make_dataclass("Settings", [(name, kind, default) for name, (kind, default) in fields.items()], frozen=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (wrong(a=(int, 3)), 'the parameter "a" needs a type (int, float, str, bool, list, sizes) and a help text'),
        (wrong(a=(dict, field(default_factory=dict, metadata={"help": "h"}))), 'the parameter "a" needs a type'),
        (wrong(a=(int, parameter(7, "h", max=5))), 'a default in mine: The parameter "a" is 7, the most is 5'),
        (wrong(a=(str, parameter("x", "h", choices=("y",)))), "The parameter \"a\" is 'x', not one of y"),
        (int, 'the class Settings of "mine" cannot be read: TypeError'),
    ],
)
def test_a_wrong_declaration_is_refused(monkeypatch: pytest.MonkeyPatch, settings: type, words: str) -> None:
    module = ModuleType("mine")
    module.__dict__["Settings"] = settings
    monkeypatch.setitem(sys.modules, "mine", module)
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        parse(settings="mine", goal=None, presets={})
    assert caught.value.message.startswith("t/task.yaml: ")


def test_a_subclass_changes_a_default_and_keeps_help_and_range() -> None:
    @dataclass(frozen=True)
    class Changed(SgdSettings):
        steps: list[int] = parameter([1, 2], "own", formerly="marks")
        momentum: float = 0.5
        weight_decay: float = parameter(0.0, "another meaning")

    found = describe(Changed)
    assert list(found) == ["steps", "momentum", "weight_decay", "nesterov"]
    assert found["steps"] == {"type": "list", "help": "own", "default": [1, 2], "formerly": "marks"}
    assert found["momentum"] == {**describe(SgdSettings)["momentum"], "default": 0.5}
    assert found["weight_decay"] == {"type": "float", "help": "another meaning", "default": 0.0}
    assert Changed().steps is not Changed().steps


def test_reading_every_declaration_loads_no_framework() -> None:
    code = "import sys; from mlbench_cli.tasks.catalog import load_catalog; load_catalog(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "task_images.mnist.settings" in loaded
    assert {"torch", "numpy", "tensorflow"}.isdisjoint(loaded)


def test_a_missing_key() -> None:
    with pytest.raises(UsageError, match='the key "data" is missing'):
        parse_task(yaml.safe_dump({key: GOOD[key] for key in GOOD if key != "data"}), Path("t/task.yaml"))
    with pytest.raises(UsageError, match="is not a mapping"):
        parse_task("- a", Path("t/task.yaml"))


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("int", "12", 12),
        ("int", "-1", -1),
        ("float", "1e-3", 0.001),  # a text in YAML 1.1
        ("float", "2", 2.0),
        ("str", "no", "no"),  # a boolean in YAML 1.1
        ("str", "1:30", "1:30"),  # ninety in YAML 1.1
        ("bool", "true", True),
        ("bool", "No", False),
        ("list", "1,2, 4", [1, 2, 4]),
        ("list", "[fp32, fp16]", ["fp32", "fp16"]),
        ("list", "0.5", [0.5]),
        ("list", "", []),
    ],
)
def test_texts_are_read_by_their_type(kind: str, text: str, value: Any) -> None:
    read = Parameter("x", kind, "help").check(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int", "1.5"),
        ("int", True),
        ("int", 2**63),
        ("float", "inf"),
        ("float", float("nan")),
        ("float", 10**400),
        ("str", 3),
        ("bool", "maybe"),
        ("bool", 1),
        ("list", [[1]]),
        ("list", {"a": 1}),
    ],
)
def test_values_of_another_type(kind: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"not of type {kind}"):
        Parameter("x", kind, "help").check(value)


def test_choices() -> None:
    with pytest.raises(UsageError, match=r'not one of sgd, adam\. Did you mean "adam"\?'):
        Parameter("x", "str", "help", choices=("sgd", "adam")).check("adan")


@pytest.mark.parametrize(
    "text", ["!!float ''", "!!bool x", "2001-99-99", "[" * 5000, "- " * 200_000, "{a: " * 200_000, "\0", "a: b: c"]
)
def test_wrong_yaml(text: str) -> None:
    with pytest.raises(UsageError, match="Not valid YAML"):
        read_yaml(text)


def test_giants_are_shown_short() -> None:
    assert len(short(["x" * 1000] * 1000)) < 300
    assert short(10**5000) == "a giant number"
    laughs = read_yaml(
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(
            f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n"
            for before, name in zip("abcdefgh", "bcdefghi", strict=True)
        )
    )
    assert len(short(laughs)) < 1000


# --- extends ---------------------------------------------------------------------------------------------------------


def write_tasks(folder: Path, **tasks: Any) -> Path:
    for name, entries in tasks.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "task.yaml").write_text(yaml.safe_dump({"name": name, **entries}))
    return folder


def parse_in(folder: Path, name: str) -> Any:
    path = folder / name / "task.yaml"
    return parse_task(path.read_text(), path)


def test_a_task_extends_a_sibling_key_by_key(tmp_path: Path) -> None:
    child = {
        "extends": "parent",
        "title": "Child",
        "legacy_name": None,
        "presets": {"spec": {"rate": 0.3}, "tiny": {"goal_full": 1}},
    }
    folder = write_tasks(tmp_path, parent={**GOOD, "name": "parent", "legacy_name": "old"}, child=child)
    task = parse_in(folder, "child")
    assert (task.name, task.title, task.image, task.legacy_name) == ("child", "Child", "t", None)
    assert task.resolve() == {"rate": 0.3, "goal_full": 80.0, "goal_light": 70.0}
    assert task.resolve("tiny") == {**task.resolve(), "goal_full": 1.0}  # replaced, not merged


def test_a_preset_can_be_removed_and_a_shipped_task_be_extended(tmp_path: Path) -> None:
    folder = write_tasks(
        tmp_path, mine={"extends": "cifar10_resnet20", "presets": {"legacy": None, "spec": {"depth": 32}}}
    )
    task, parent = parse_in(folder, "mine"), load_task("cifar10_resnet20")
    assert set(task.presets) == set(parent.presets) - {"legacy"}
    assert task.resolve() == {**parent.resolve(), "depth": 32}


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"extends": "nobody"}, '"extends: nobody": no such task'),
        ({"extends": "mine"}, '"extends: mine": no such task'),
        ({"extends": "other"}, "extend each other in a circle"),
        ({"extends": "digits_resnet", "presets": 3}, '"presets" is not a mapping'),
        ({**GOOD, "groups": ["sgd"]}, "unknown key 'groups'"),
    ],
)
def test_wrong_inheritance_is_refused_with_the_file(tmp_path: Path, entries: Mapping[str, Any], words: str) -> None:
    folder = write_tasks(tmp_path, mine={**entries, "name": "mine"}, other={"extends": "mine"})
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        parse_in(folder, "mine")
    assert "task.yaml" in str(caught.value)


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
