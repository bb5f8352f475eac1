"""Matrices: their points, their names, and that a file and a command line mean the same."""

import json
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbench_cli.errors import MlbenchError, UsageError
from mlbench_cli.model.run import LOCAL, Cluster
from mlbench_cli.model.spec import NAME_LENGTH, NAME_PATTERN
from mlbench_cli.runs.experiment import expand
from mlbench_cli.runs.launch import Machine
from mlbench_cli.runs.matrix import (
    Matrix,
    format_axis,
    format_point,
    parse_axes,
    parse_point,
    point_suffix,
    point_text,
)
from mlbench_cli.runs.request import (
    OF_EXPERIMENT,
    OPTIONS,
    Request,
    equivalent_command,
    flag,
    format_file,
    given_value,
    matrix_of,
    merge,
    parse_file,
)
from mlbench_cli.tasks.catalog import load_catalog

MACHINE = Machine(cores=4, gpus=0)
TASKS = load_catalog()


def request(**options: Any) -> Request:
    return Request(**{"name": "demo", "workers": (1, 2), "task": "digits_resnet", **options})


# --- points ----------------------------------------------------------------------------------------------------------


def test_all_combinations_in_the_order_given() -> None:
    assert Matrix({"a": (1, 2), "b": ("x", "y")}).points() == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]
    assert Matrix().points() == [{}]


def test_an_axis_that_is_given_twice_has_the_values_of_both() -> None:
    assert parse_axes(["seed=1,2", "backend=mpi", "seed=3"]) == {"seed": ("1", "2", "3"), "backend": ("mpi",)}


def test_exclude_drops_what_has_all_its_values() -> None:
    matrix = Matrix({"a": (1, 2), "b": ("x", "y")}, exclude=({"a": "1", "b": "x"}, {"b": "y"}))
    assert matrix.points() == [{"a": 2, "b": "x"}]


def test_include_adds_options_to_fitting_points_and_is_a_point_otherwise() -> None:
    matrix = Matrix({"a": (1, 2)}, include=({"a": 2, "c": 9}, {"a": 3}, {"d": 5}))
    assert matrix.points() == [{"a": 1, "d": 5}, {"a": 2, "c": 9, "d": 5}, {"a": 3}]
    assert Matrix(include=({"a": 1}, {"a": 2})).points() == [{"a": 1}, {"a": 2}]


def test_a_matrix_without_points_or_with_too_many_is_refused() -> None:
    with pytest.raises(UsageError, match="all points are excluded"):
        Matrix({"a": (1,)}, exclude=({"a": 1},)).points()
    with pytest.raises(UsageError, match="exclude needs a matrix"):
        Matrix(exclude=({"a": 1},)).points()
    with pytest.raises(UsageError, match="1000000 points"):
        Matrix({key: tuple(range(100)) for key in "abc"}).points()


@pytest.mark.parametrize("entry", ["a", "=1", "a=1,a=2", "a=1,", "{", "{]"])
def test_a_point_that_cannot_be_read_names_its_flag(entry: str) -> None:
    with pytest.raises(UsageError, match="--exclude"):
        parse_point(entry, "--exclude")


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "suffix"),
    [
        ({"backend": "gloo"}, "gloo"),
        ({"backend": "mpi", "set.batch_size": 64}, "mpi-batchsize64"),
        ({"seed": 43}, "seed43"),
        ({"set.rate": 0.5}, "rate0p5"),
        ({"gpu": True}, "gpu"),
        ({"gpu": False}, "nogpu"),
    ],
)
def test_suffixes_are_readable(point: dict[str, object], suffix: str) -> None:
    assert point_suffix(point, 30) == suffix
    assert point_suffix({key: str(value).lower() for key, value in point.items()}, 30) == suffix


def test_a_suffix_that_says_less_than_the_value_gets_a_hash() -> None:
    first, second = (point_suffix({"backend": value}, 30) for value in ("custom:a.b", "custom:a-b"))
    assert first != second
    assert first.startswith("custom-a-b-")
    assert len(point_suffix({"image": "registry.example.com/me/image:1.2.3"}, 20)) == 20


@given(
    st.dictionaries(
        st.sampled_from(["backend", "seed", "set.x", "gpu"]), st.text(min_size=1) | st.integers(), min_size=1
    )
)
def test_names_of_points_are_labels(point: dict[str, object]) -> None:
    suffix = point_suffix(point, 25)
    assert len(suffix) <= 25
    assert NAME_PATTERN.fullmatch(f"x-{suffix}-2")


def test_members_are_named_with_point_size_and_repeat() -> None:
    candidates = expand(request(matrix={"backend": ("gloo", "mpi")}, repeat=2), LOCAL, MACHINE, TASKS)
    assert [candidate.spec.name for candidate in candidates] == [
        *("demo-gloo-1-r1", "demo-gloo-2-r1", "demo-mpi-1-r1", "demo-mpi-2-r1"),
        *("demo-gloo-1-r2", "demo-gloo-2-r2", "demo-mpi-1-r2", "demo-mpi-2-r2"),
    ]
    assert {candidate.spec.backend for candidate in candidates if "mpi" in candidate.spec.name} == {"mpi"}
    assert candidates[0].point == {"backend": "gloo"}
    plain = expand(request(), LOCAL, MACHINE, TASKS)
    assert [candidate.spec.name for candidate in plain] == ["demo-1", "demo-2"]


def test_a_long_name_is_refused_before_anything_else() -> None:
    with pytest.raises(UsageError, match=r"40 are allowed|too long to append"):
        expand(request(name="d" * 37, matrix={"backend": ("gloo", "mpi")}), LOCAL, MACHINE, TASKS)
    (first, *_) = expand(request(name="d" * 25, matrix={"preset": ("spec", "tiny")}), LOCAL, MACHINE, TASKS)
    assert len(first.spec.name) <= NAME_LENGTH


# --- what can be an axis ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [item.name for item in OPTIONS if item.kind in ("text", "integer", "switch")])
def test_every_option_of_a_run_can_be_an_axis(option: str) -> None:
    if option in OF_EXPERIMENT:
        with pytest.raises(UsageError, match="cannot be a key of a matrix"):
            given_value("matrix", [f"{option}=1"])
    else:
        assert given_value("matrix", [f"{option.replace('_', '-')}=1"]) == {option: ("1",)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("backend", "not of the form"),
        ("=x", "not of the form"),
        ("bakend=gloo", 'Did you mean "backend"'),
        ("set=1", "write set.KEY"),
        ("backend.x=1", "write backend"),
        ("workers=1,2", "cannot be a key"),
        ("backend=gloo,gloo", "twice"),
        ("backend=", "not a text or a number"),
        ("backend=[", "not a JSON list"),
        ("backend=[{}]", "not a text or a number"),
    ],
)
def test_bad_axes_are_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words.replace(".", r"\.")):
        given_value("matrix", [text])


def test_an_option_is_given_once() -> None:
    for options in ({"backend": "gloo"}, {"matrix": {"set.lr": ("1",)}, "set": {"lr": "2"}}):
        with pytest.raises(UsageError, match="set both directly and in the matrix"):
            matrix_of(request(**{"matrix": {"backend": ("gloo",)}, **options}))


def test_a_value_of_the_wrong_kind_names_its_point() -> None:
    with pytest.raises(UsageError, match="At num_cpus=many of the matrix"):
        expand(request(matrix={"num_cpus": ("many",)}), LOCAL, MACHINE, TASKS)


def test_runs_that_would_be_the_same_are_refused() -> None:
    with pytest.raises(UsageError, match="would be the same run"):
        expand(request(matrix={"seed": (42, 43)}, repeat=2), LOCAL, MACHINE, TASKS)
    with pytest.raises(UsageError, match="would be the same run"):
        expand(request(matrix={"backend": ("gloo", "GLOO")}), LOCAL, MACHINE, TASKS)


def test_parallel_is_for_clusters() -> None:
    with pytest.raises(UsageError, match=r"run\.parallel is for clusters"):
        expand(request(parallel=2), LOCAL, MACHINE, TASKS)


def test_an_axis_of_clusters_gives_runs_for_different_engines() -> None:
    known = {
        "local": LOCAL,
        "lab": Cluster("lab", "slurm", details={"folder": "/shared"}),
        "kind": Cluster("kind", "attached", details={"registry": "registry.example/mlbench"}),
    }
    asked = request(matrix={"cluster": ("local", "lab", "kind")})
    found = expand(asked, LOCAL, MACHINE, TASKS, known.__getitem__)
    specs = {candidate.spec.name: candidate.spec for candidate in found}
    assert [(spec.engine, spec.cluster) for spec in specs.values()][::2] == [
        ("local", "local"),
        ("slurm", "lab"),
        ("kubernetes", "kind"),
    ]
    assert specs["demo-lab-1"].image is None
    assert specs["demo-kind-2"].image is not None
    with pytest.raises(UsageError, match=r"run\.parallel is for clusters"):
        expand(request(parallel=2, matrix={"cluster": ("lab", "local")}), LOCAL, MACHINE, TASKS, known.__getitem__)
    with pytest.raises(UsageError, match="cannot be a key of this matrix"):
        expand(asked, LOCAL, MACHINE, TASKS)


# --- files and command lines -----------------------------------------------------------------------------------------


def test_a_matrix_in_a_file_holds_include_and_exclude() -> None:
    text = """
name: demo
workers: [1, 2]
task: digits_resnet
matrix:
  backend: [gloo, mpi]
  set.batch_size: [32, 64]
  exclude: [{backend: mpi, set.batch_size: 64}]
  include: [{backend: gloo, seed: 7}]
"""
    found = parse_file(text)
    assert found.matrix == {"backend": ("gloo", "mpi"), "set.batch_size": (32, 64)}
    assert (found.include, found.exclude) == (
        ({"backend": "gloo", "seed": 7},),
        ({"backend": "mpi", "set.batch_size": 64},),
    )
    with pytest.raises(UsageError, match="is not a point of a matrix"):
        parse_file("matrix: {include: [3]}")


# Texts that YAML, JSON or a flag might take for something else.
awkward = st.sampled_from(
    ["gloo", "1", "true", "null", "0.1", "a,b", "a=b", "[1]", "{x}", "é", " ", "'", '"', "-", "~", "1e3"]
)
scalars = awkward | st.integers(-9, 9) | st.booleans()
keys = st.sampled_from(["backend", "seed", "set.a", "set.b,c", "set.d=e", "preset"])
points = st.lists(st.dictionaries(keys, scalars, min_size=1, max_size=3), max_size=2).map(tuple)
axes = st.dictionaries(
    keys,
    st.lists(scalars, min_size=1, max_size=3, unique_by=lambda value: point_text({"k": value})["k"]).map(tuple),
    max_size=2,
)
requests = st.builds(
    Request,
    name=st.none() | st.just("demo"),
    workers=st.lists(st.integers(1, 9), max_size=3).map(tuple),
    task=st.none() | awkward,
    command=st.none() | awkward,
    set=st.dictionaries(st.sampled_from(["lr", "1", "x y"]), scalars, max_size=2),
    gpu=st.none() | st.booleans(),
    repeat=st.none() | st.integers(1, 5),
    timeout=st.none() | st.just("90"),
    env=st.dictionaries(st.just("A"), awkward, max_size=1),
    matrix=axes,
    include=points,
    exclude=points,
)


@given(requests)
def test_a_saved_file_says_the_same(found: Request) -> None:
    assert parse_file(format_file(found)) == found


@given(axes, points)
def test_flags_of_a_matrix_say_the_same(given_axes: dict[str, tuple[Any, ...]], given_points: tuple[Any, ...]) -> None:
    for key, values in given_axes.items():
        if "=" not in key:
            (again,) = parse_axes([format_axis(key, values)]).values()
            assert point_text(dict(enumerate(again))) == point_text(dict(enumerate(values)))  # type: ignore[arg-type]
    for point in given_points:
        assert point_text(parse_point(format_point(point), "--include")) == point_text(point)


@given(requests)
def test_the_equivalent_command_can_be_split(found: Request) -> None:
    words = shlex.split(equivalent_command(found))
    assert words.count(flag("matrix")) == len(found.matrix)
    assert json.dumps(words)


@given(requests)
def test_any_matrix_is_expanded_or_refused_in_words(found: Request) -> None:
    base = merge(Request(name="demo", workers=(1,), command="true"), found)
    try:
        candidates = expand(base, LOCAL, MACHINE, TASKS)
    except MlbenchError:
        return
    names = [candidate.spec.name for candidate in candidates]
    assert len(set(names)) == len(names) == len({candidate.content_hash for candidate in candidates})
    assert all(len(name) <= NAME_LENGTH for name in names)
