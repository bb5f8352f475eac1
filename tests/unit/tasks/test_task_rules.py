"""Parameters at their limits, optional keys of a task.yaml, and the rules that a run keeps of its task."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import MlbenchError, UsageError
from mlbench_cli.model.goals import GoalRule
from mlbench_cli.tasks.catalog import (
    MethodRule,
    Parameter,
    TaskRules,
    WorkersRule,
    find_rules,
    load_task,
    parse_task,
    rename_parameters,
)
from tests.unit.tasks.test_catalog import GOOD, parse, write_tasks


@pytest.mark.parametrize(
    ("value", "message", "hint"),
    [
        ("0.9", "\"x\" is '0.9', the least is 1.", "--set x=1"),
        (3.6, '"x" is 3.6, the most is 3.5.', "--set x=3.5"),
        ("y", "is 'y', which is not of type float", None),
    ],
)
def test_a_value_out_of_range_comes_with_the_limit(value: Any, message: str, hint: str | None) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        Parameter("x", "float", "help", 1.0, 3.5).check(value)
    assert caught.value.hint == hint


def test_the_limits_themselves_are_allowed() -> None:
    parameter = Parameter("x", "float", "help", 1.0, 3.5)
    assert [parameter.check(value) for value in (1, "3.5")] == [1.0, 3.5]
    assert Parameter("x", "int", "help").check(2**63 - 1) == 2**63 - 1
    assert Parameter("x", "int", "help").check(str(1 - 2**63)) == 1 - 2**63


def test_a_list_of_choices() -> None:
    parameter = Parameter("x", "list", "help", choices=("a", "b", "c"))
    assert parameter.check("b,a,b") == ["b", "a"]
    assert parameter.check("all") == ["a", "b", "c"]
    for text, words in (("a,d", "has 'd', not one of a, b, c"), ("", "has '', not one of"), ("all,a", "has 'all'")):
        with pytest.raises(UsageError, match=re.escape(words)):
            parameter.check(text)


@pytest.mark.parametrize(
    ("value", "sizes"),
    [
        ("8B,1KiB", [8, 1024]),
        (["1KiB", "2KiB"], [1024, 2048]),
        ([1024], [1024]),
        ("1KiB:4KiB:x2", [1024, 2048, 4096]),
        ("8 parsecs", None),
        (1024, None),
    ],
)
def test_sizes_are_bytes(value: Any, sizes: list[int] | None) -> None:
    parameter = Parameter("x", "sizes", "help")
    if sizes is not None:
        assert parameter.check(value) == sizes
        return
    with pytest.raises(UsageError, match='The parameter "x"'):
        parameter.check(value)


def test_numbers_and_words_of_a_list() -> None:
    parameter = Parameter("x", "list", "help")
    assert parameter.check(" [1, 2.5, a b, inf] ") == [1, 2.5, "a b", "inf"]
    assert parameter.check((1, "a", 0.5)) == [1, "a", 0.5]
    with pytest.raises(UsageError, match="not of type list"):
        parameter.check([1, float("nan")])
    with pytest.raises(UsageError, match="not of type list"):
        parameter.check([1, True])


def test_an_unknown_preset_or_parameter_comes_with_the_nearest() -> None:
    task = parse()
    with pytest.raises(UsageError, match=r'has no preset "tin", only spec, tiny\. Did you mean "tiny"') as caught:
        task.resolve("tin")
    assert caught.value.hint == "mlbench tasks t"
    with pytest.raises(UsageError, match=r'has no parameter "rat"\. Did you mean "rate"') as caught:
        task.resolve("spec", {"rat": 1})
    assert caught.value.hint == "mlbench tasks t"


# --- optional keys ----------------------------------------------------------------------------------------------------


def test_a_task_without_optional_keys() -> None:
    task = parse(goal=None, presets={})
    assert (task.goal, task.method, task.files, task.workers, task.preflight) == (None, None, None, None, None)
    assert (task.free, task.notes, task.measured_on, task.packages) == ((), (), (), ())
    assert (task.legacy_name, task.extends, task.origin, task.search_path) == (None, None, None, None)
    assert [*task.presets] == ["spec"]


def test_a_task_with_all_keys() -> None:
    task = parse(
        number=7,
        free=["rate"],
        notes=["a", "b"],
        measured_on=["CPU"],
        packages=["p"],
        preflight="x.y",
        legacy_name="old",
        method={"own": "bsp", "sync": ["every", "local"]},
        workers={"sensible": 32, "reason": "why"},
    )
    assert (task.number, task.free, task.notes, task.measured_on) == ("7", ("rate",), ("a", "b"), ("CPU",))
    assert (task.packages, task.preflight, task.legacy_name) == (("p",), "x.y", "old")
    assert task.method == MethodRule("bsp", {"sync": ("every", "local")})
    assert task.workers == WorkersRule(32, "why")
    assert task.goal == GoalRule("Prec@1", ">=", "{threshold}%")
    assert (task.command, task.backends, task.devices) == (("python", "-m", "t"), ("gloo",), ("cpu",))
    assert task.folder == Path("t")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "bsp"}, '"method" is not a mapping with a preset as "own"'),
        ({"method": {"sync": ["every"]}}, '"method" is not a mapping with a preset as "own"'),
        ({"method": {"own": "bsp", "sync": "every"}}, '"sync" is not a list of strings'),
        ({"workers": 32}, '"workers" is not a mapping'),
        ({"workers": {"sensible": 32}}, '"workers" is not a mapping'),
        ({"workers": {"sensible": "32", "reason": "x"}}, '"workers" is not a mapping'),
        ({"workers": {"sensible": 32, "reason": 3}}, '"workers" is not a mapping'),
        ({"workers": {"sensible": 32, "reason": "x", "more": 1}}, '"workers" is not a mapping'),
        ({"free": ["size"]}, "'size' in \"free\" is not one of rate, goal_full, goal_light"),
        ({"notes": "text"}, '"notes" is not a list of strings'),
        ({"packages": [1]}, '"packages" is not a list of strings'),
        ({"presets": {1: {}}}, '"presets" is not a mapping with texts as keys'),
        ({"presets": {"tiny": 3}}, 'the preset "tiny" is not a mapping'),
        ({"preflight": ""}, '"preflight" is not a text'),
        ({"devices": ["tpu"]}, "'tpu' in \"devices\" is not one of cpu, gpu"),
        ({"settings": None, "goal": None}, "sets 'rate', which is not a parameter"),
    ],
)
def test_wrong_optional_keys(changes: dict[str, Any], words: str) -> None:
    if changes.get("settings", "") is None:
        changes = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
        with pytest.raises(UsageError, match=re.escape(words)) as caught:
            parse_task(str(changes), Path("t/task.yaml"))
        assert "settings: MODULE" in str(caught.value.hint)
        return
    with pytest.raises(UsageError, match=re.escape(words)):
        parse(**changes)


@pytest.mark.parametrize(("depth", "fits"), [(5, True), (6, False)])
def test_a_task_has_at_most_five_ancestors(tmp_path: Path, depth: int, fits: bool) -> None:
    tasks: dict[str, Any] = {f"t{number}": {"extends": f"t{number + 1}"} for number in range(depth)}
    folder = write_tasks(tmp_path, **tasks, **{f"t{depth}": {**GOOD, "name": f"t{depth}"}})
    path = folder / "t0" / "task.yaml"
    if fits:
        task = parse_task(path.read_text(), path)
        assert (task.name, task.extends, task.title) == ("t0", "t1", "T")
        return
    with pytest.raises(UsageError, match="extend each other in a circle"):
        parse_task(path.read_text(), path)


# --- rules of a run ---------------------------------------------------------------------------------------------------


def test_the_rules_of_a_run_are_written_and_read() -> None:
    rules = TaskRules.of(parse(free=["rate"]), "tiny")
    spec = {"rate": 0.1, "goal_full": 80.0, "goal_light": 70.0}
    document = {
        "name": "t",
        "image": "t",
        "command": ["python", "-m", "t"],
        "goal": {"metric": "Prec@1", "comparison": ">=", "wording": "{threshold}%"},
        "free": ["rate"],
        "spec": spec,
        "preset": {**spec, "rate": 0.001},
    }
    assert rules.to_dict() == document
    assert TaskRules.from_dict(document) == rules
    external = replace(rules, origin="pack 1.0", goal=None, free=())
    assert external.to_dict() == {**document, "origin": "pack 1.0", "goal": None, "free": []}
    assert TaskRules.from_dict(external.to_dict()) == external


def test_a_preset_that_the_task_no_longer_has_is_the_spec() -> None:
    rules = TaskRules.of(parse(), "gone")
    assert rules.preset == rules.spec


@pytest.mark.parametrize("name", ["spec", "preset"])
def test_rules_without_a_preset_are_refused(name: str) -> None:
    document = TaskRules.of(parse(), "tiny").to_dict()
    for damaged in ({**document, name: []}, {key: value for key, value in document.items() if key != name}):
        with pytest.raises(ValueError, match="a preset is not an object"):
            TaskRules.from_dict(damaged)
    with pytest.raises(TypeError):
        TaskRules.from_dict({**document, "more": 1})


def test_the_goal_of_a_run_is_that_of_its_parameters() -> None:
    rules = TaskRules.of(parse(), "tiny")
    found = rules.find_goal({"goal_light": 70.0}, "light")
    assert found is not None
    assert found.to_dict() == {"metric": "Prec@1", "comparison": ">=", "threshold": 70.0}
    assert rules.find_goal({"goal_light": 70.0}, "full") is None
    assert replace(rules, goal=None).find_goal({"goal_light": 70.0}, "light") is None


@pytest.mark.parametrize("name", ["no_such_task", "../mnist", "", "mnist/../mnist", "comm"])
def test_what_is_no_task_has_no_rules(name: str) -> None:
    assert find_rules(name, "spec") is None
    assert rename_parameters(name, {"rate": 1}) == {"rate": 1}


def test_parameters_of_older_runs_have_their_present_names() -> None:
    task = load_task("mnist")
    former = {entry.formerly: name for name, entry in task.parameters.items() if entry.formerly}
    assert former
    assert rename_parameters("mnist", dict.fromkeys(former, 1)) == dict.fromkeys(former.values(), 1)
    both = {**dict.fromkeys(former, 1), **dict.fromkeys(former.values(), 2)}
    assert rename_parameters("mnist", both) == both
    rules = find_rules("mnist", "spec")
    assert rules is not None
    assert rules.spec == task.resolve()


def test_errors_of_tasks_are_errors_of_mlbench() -> None:
    with pytest.raises(MlbenchError, match='There is no task "mnst"') as caught:
        load_task("mnst", {"mnist": load_task("mnist")})
    assert caught.value.details == {"known": ["mnist"]}
