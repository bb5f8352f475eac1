"""Spec files say the same as flags, wrong ones are refused in words, and a request can be written as a command line."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model.run import LOCAL
from mlbench_cli.runs.launch import Machine, resolve
from mlbench_cli.runs.request import (
    OPTIONS,
    Request,
    apply_point,
    equivalent_command,
    format_file,
    matrix_of,
    merge,
    pairs,
    parse_file,
    parse_flags,
    read_file,
    request_document,
)

MACHINE = Machine(cores=4, gpus=0)
DIGITS = Request(name="run", workers=(1, 2), task="digits_resnet")
COMMAND = Request(name="run", workers=(2,), command="python train.py --rank {rank} 'two words'")
SPEC_FILE = """
name: run
workers: [1, 2]
task: digits_resnet
preset: tiny
set: {epochs: 3, rate: 1e-3}
num-cpus: 2
light: true
timeout: 90
"""


def test_a_spec_file_says_the_same_as_flags() -> None:
    flags = replace(DIGITS, preset="tiny", set={"epochs": "3", "rate": "1e-3"}, num_cpus=2, light=True, timeout="90s")
    from_file, from_flags = (resolve(request, LOCAL, MACHINE) for request in (parse_file(SPEC_FILE), flags))
    assert [spec.hash for spec in from_file] == [spec.hash for spec in from_flags]


def test_flags_go_before_the_file() -> None:
    top = Request(workers=(4,), set={"epochs": "9"}, light=False)
    merged = merge(parse_file(SPEC_FILE), top)
    assert (merged.name, merged.workers, merged.light) == ("run", (4,), False)
    assert merged.set == {"epochs": "9", "rate": "1e-3"}
    assert merge(merged, Request()) == merged


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tasks: digits_resnet", 'Unknown key "tasks". Did you mean "task"?'),
        ("num-cpu: 3", 'Did you mean "num-cpus"?'),
        ("workers: many", "not a number or a list"),
        ("workers: [1, true]", "not a number or a list"),
        ("num-cpus: many", "not a whole number"),
        ("gpu: 1", "not true or false"),
        ("backend: no", "not a text"),
        ("timeout: 2020-01-01", "not a text"),
        ("timeout: 0x" + "f" * 4000, "a giant number, not a text"),
        ("set: [epochs]", "not a mapping"),
        ("num-cpus: 1\nnum_cpus: 2", "given twice"),
        ("[1, 2]", "not a mapping"),
        ("a: [", "Not valid YAML"),
        ("a: !!python/object/apply:os.system ['true']", "Not valid YAML"),
        ("", "not a mapping"),
    ],
)
def test_wrong_spec_files(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_file(text)
    assert words in caught.value.message


def test_a_command_may_be_a_list() -> None:
    assert parse_file("command: [python, 'a b.py']").command == "python 'a b.py'"


def test_the_file_is_named_in_the_error(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    with pytest.raises(NotFoundError, match=r"no file .*spec\.yaml"):
        read_file(path)
    path.write_text("tsk: x")
    with pytest.raises(UsageError, match=r"spec\.yaml: Unknown key"):
        read_file(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        read_file(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_file(tmp_path)


def test_the_equivalent_command() -> None:
    request = replace(
        COMMAND,
        image="me/train:1",
        light=True,
        gpu=False,
        set={"a": [1, 2]},
        env={"LEVEL": "x y"},
        toleration=("spot",),
    )
    words = shlex.split(equivalent_command(request))
    assert words[:4] == ["mlbench", "run", "run", "2"]
    assert words[words.index("--command") + 1] == request.command
    assert {"--light", "--no-gpu", "a=1,2", "LEVEL=x y", "spot"} <= set(words)


# --- values of files, flags and matrices -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("workers: 3", {"workers": (3,)}),
        ("workers: [1, 2]", {"workers": (1, 2)}),
        ("num-cpus: 2", {"num_cpus": 2}),
        ("num_cpus: 9223372036854775807", {"num_cpus": 2**63 - 1}),
        ("gpu: true\nlight: false", {"gpu": True, "light": False}),
        ("timeout: 90", {"timeout": "90"}),
        ("toleration: spot", {"toleration": ("spot",)}),
        ("toleration: [spot, 'gpu:NoExecute']", {"toleration": ("spot", "gpu:NoExecute")}),
        ("env: {A: 1, B: x}", {"env": {"A": "1", "B": "x"}}),
        ("set: {a: 1.5, b: [1, 2], c: true}", {"set": {"a": 1.5, "b": [1, 2], "c": True}}),
        ("command: python a.py", {"command": "python a.py"}),
        ("task: null\nseed:", {}),
        (
            "matrix: {backend: [gloo, mpi], num-cpus: 2, set.a: [[1, 2], 3]}",
            {"matrix": {"backend": ("gloo", "mpi"), "num_cpus": (2,), "set.a": ((1, 2), 3)}},
        ),
        (
            "matrix: {gpu: [true, false], include: [{gpu: true, seed: 7}], exclude: [{gpu: false}]}",
            {"matrix": {"gpu": (True, False)}, "include": ({"gpu": True, "seed": 7},), "exclude": ({"gpu": False},)},
        ),
    ],
)
def test_values_of_a_spec_file(text: str, options: dict[str, Any]) -> None:
    assert parse_file(text) == Request(**options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num-cpus: true", '"num-cpus" is True, not a whole number.'),
        ("num-cpus: 9223372036854775808", "not a whole number."),
        ("num-cpus: '2'", "\"num-cpus\" is '2', not a whole number."),
        ("toleration: [1]", "not a list of strings."),
        ("env: {1: x}", "not a mapping of names to values."),
        ("env: {A: [1]}", '"env.A" is [1], not a text.'),
        ("set: text", "\"set\" is 'text', not a mapping of names to values."),
        ("command: [python, 1]", "not a text."),
        ("include: [{seed: 1}]\nmatrix: {seed: [2]}", '"include" must be under "matrix".'),
        ("matrix: {seed: []}", 'The matrix has no values for "seed".'),
        ("matrix: {num-cpus: [1], num_cpus: [2]}", '"num_cpus" is twice.'),
        ("matrix: {seed: [2, 1, '1']}", 'The matrix has the value "1" of "seed" twice.'),
        ("matrix: {seed: [[1]]}", "not a text or a number."),
        ("matrix: {set.a: ['']}", "not a text or a number."),
        ("matrix: {set.a: [.nan]}", "which is not a number."),
        ("matrix: {set.a: [.inf]}", "which is not a number."),
        ("matrix: {set.a: [9223372036854775808]}", "not a text or a number."),
        ("matrix: {include: [{}]}", "is not a point of a matrix"),
        ("matrix: {include: [3]}", "3 is not a point of a matrix"),
        ("matrix: {include: {seed: 1}}", "\"include\" is {'seed': 1}, not a list of mappings of options to values."),
        ("matrix: {env: [1]}", '"env" cannot be a key of a matrix; write env.KEY.'),
        ("matrix: {seed.x: [1]}", '"seed.x" cannot be a key of a matrix; write seed.'),
        ("matrix: {env.: [1]}", "write env.KEY."),
        ("matrix: {toleration: [a]}", '"toleration" cannot be a key of a matrix.'),
        ("matrix: {name: [a]}", '"name" cannot be a key of a matrix.'),
    ],
)
def test_values_that_a_spec_file_cannot_have(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_file(text)
    assert words in caught.value.message


def test_pairs_are_split_at_their_first_equals_sign() -> None:
    assert pairs(["a=1", "b=x=y", "c="], "set") == {"a": "1", "b": "x=y", "c": ""}
    assert pairs(["a=1", "a=1"], "set") == {"a": "1"}
    with pytest.raises(UsageError, match='--node-selector gives "a" twice: "1" and "2"'):
        pairs(["a=1", "a=2"], "node_selector")
    for entry in ("a", "=1"):
        with pytest.raises(UsageError, match="is not of the form KEY=VALUE"):
            pairs([entry], "set")


def test_flags_become_values_by_their_kind() -> None:
    found = parse_flags(
        {
            "task": " mnist \nsecond line",
            "gpu": "yes",
            "light": "no",
            "num_cpus": "4",
            "set": "a=1\n\n b=2 ",
            "toleration": "spot\ngpu:NoExecute",
            "matrix": "seed=1,2\nbackend=gloo",
            "exclude": "seed=2,backend=gloo",
            "queue": " \n ",
        }
    )
    assert found == Request(
        task="mnist",
        gpu=True,
        light=False,
        num_cpus=4,
        set={"a": "1", "b": "2"},
        toleration=("spot", "gpu:NoExecute"),
        matrix={"seed": ("1", "2"), "backend": ("gloo",)},
        exclude=({"seed": "2", "backend": "gloo"},),
    )


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpu", "true", '--gpu "true" is not yes or no.'),
        ("num_cpus", "-1", '--num-cpus "-1" is not a whole number.'),
        ("num_cpus", "1.5", "is not a whole number."),
        ("num_cpus", "²", "is not a whole number."),
        ("tsk", "x", 'Unknown option "tsk". Did you mean "task"?'),
    ],
)
def test_flags_of_the_wrong_kind_are_refused(name: str, text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_flags({name: text})
    assert words in caught.value.message


def test_what_is_said_last_counts_and_mappings_are_joined() -> None:
    base = Request(name="a", workers=(1,), gpu=True, toleration=("x",), set={"a": 1, "b": 2}, matrix={"seed": (1,)})
    top = Request(name="b", gpu=False, toleration=("y",), set={"b": 3}, matrix={"backend": ("mpi",)})
    assert merge(base, top) == Request(
        name="b",
        workers=(1,),
        gpu=False,
        toleration=("y",),
        set={"a": 1, "b": 3},
        matrix={"seed": (1,), "backend": ("mpi",)},
    )
    assert merge(base, Request()) == base


EVERYTHING = Request(
    name="run",
    workers=(1, 2),
    task="mnist",
    set={"a": [1, 2], "b": True},
    gpu=True,
    light=False,
    num_cpus=4,
    repeat=3,
    matrix={"seed": (1, 2), "set.x": ("a,b",)},
    include=({"seed": 3, "set.x": "c"},),
    exclude=({"seed": 2},),
    toleration=("spot", "gpu:NoExecute"),
    env={"LEVEL": "x y"},
)


def test_a_request_as_a_command_line() -> None:
    assert shlex.split(equivalent_command(EVERYTHING)) == [
        *("mlbench", "run", "run", "1", "2", "--task", "mnist", "--set", "a=1,2", "--set", "b=true"),
        *("--gpu", "--no-light", "--num-cpus", "4", "--repeat", "3"),
        *("--matrix", "seed=1,2", "--matrix", 'set.x=["a,b"]', "--include", "seed=3,set.x=c", "--exclude", "seed=2"),
        *("--toleration", "spot", "--toleration", "gpu:NoExecute", "--env", "LEVEL=x y"),
    ]
    assert equivalent_command(Request()) == "mlbench run NAME"


def test_a_request_as_a_document_and_as_a_file() -> None:
    assert request_document(EVERYTHING) == {
        "name": "run",
        "workers": [1, 2],
        "task": "mnist",
        "set": {"a": [1, 2], "b": True},
        "gpu": True,
        "light": False,
        "num-cpus": 4,
        "repeat": 3,
        "toleration": ["spot", "gpu:NoExecute"],
        "env": {"LEVEL": "x y"},
        "matrix": {
            "seed": [1, 2],
            "set.x": ["a,b"],
            "include": [{"seed": 3, "set.x": "c"}],
            "exclude": [{"seed": 2}],
        },
    }
    assert parse_file(format_file(EVERYTHING)) == EVERYTHING
    assert request_document(Request()) == {}


@pytest.mark.parametrize(
    ("point", "changes"),
    [
        ({"num_cpus": "3"}, {"num_cpus": 3}),
        ({"num_cpus": 3}, {"num_cpus": 3}),
        ({"seed": "-3"}, {"seed": -3}),
        ({"gpu": "true"}, {"gpu": True}),
        ({"gpu": "false"}, {"gpu": False}),
        ({"timeout": 90}, {"timeout": "90"}),
        ({"set.b": 2, "set.c": "3"}, {"set": {"a": 1, "b": 2, "c": "3"}}),
        ({"env.B": 2}, {"env": {"A": "x", "B": "2"}}),
    ],
)
def test_a_point_changes_the_request(point: dict[str, Any], changes: dict[str, Any]) -> None:
    base = Request(name="run", set={"a": 1}, env={"A": "x"}, matrix={"seed": (1,)}, exclude=({"seed": 1},), parallel=3)
    assert apply_point(base, point) == replace(
        base, **{"matrix": {}, "include": (), "exclude": (), "parallel": None, **changes}
    )


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ({"num_cpus": "3.5"}, "\"num_cpus\" is '3.5', not a whole number."),
        ({"num_cpus": "1" * 19}, "not a whole number."),
        ({"gpu": "yes"}, "\"gpu\" is 'yes', not true or false."),
        ({"env.A": 1.5}, '"env.A" is 1.5, not a text.'),
    ],
)
def test_a_point_with_a_value_of_the_wrong_kind_is_refused(point: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        apply_point(Request(), point)
    assert words in caught.value.message


def test_an_option_is_given_either_directly_or_in_the_matrix() -> None:
    matrix = matrix_of(Request(matrix={"set.a": (1,)}, set={"b": 2}, include=({"seed": 3},), exclude=({"seed": 4},)))
    assert (matrix.axes, matrix.include, matrix.exclude) == ({"set.a": (1,)}, ({"seed": 3},), ({"seed": 4},))
    for options, words in (
        ({"matrix": {"set.a": (1,)}, "set": {"a": 2}}, "--set a is set both directly and in the matrix."),
        ({"matrix": {"num_cpus": (1,)}, "num_cpus": 2}, "--num-cpus is set both directly and in the matrix."),
        ({"matrix": {"gpu": (True,)}, "gpu": False}, "--gpu is set both directly"),
    ):
        with pytest.raises(UsageError) as caught:
            matrix_of(Request(**options))  # type: ignore[arg-type]
        assert words in caught.value.message


def test_the_kind_of_an_option_is_that_of_its_type() -> None:
    """The command makes flags of kinds, and the checker of types reads types."""
    hints = get_type_hints(Request)
    kinds: dict[Any, set[str]] = {
        bool | None: {"switch"},
        int | None: {"integer"},
        str | None: {"text"},
        tuple[str, ...]: {"texts"},
        Mapping[str, str]: {"pairs"},
        Mapping[str, Any]: {"pairs"},
        Mapping[str, tuple[Any, ...]]: {"axes"},
        tuple[Mapping[str, Any], ...]: {"points"},
    }
    assert [item.name for item in OPTIONS if item.metadata["kind"] not in kinds[hints[item.name]]] == []


def test_no_two_options_have_the_same_letter() -> None:
    letters = [item.metadata["letter"] for item in OPTIONS if item.metadata["letter"]]
    assert sorted(letters) == sorted(set(letters))
    assert {len(letter) for letter in letters} == {1}
