"""Whatever is thrown at a parser, it answers or raises an MlbenchError: never anything else.

Three thousand inputs in `make test`, the same in each run, and twelve thousand new ones in `make test-nightly`.
A wider search: HYPOTHESIS_PROFILE=wide pytest THIS_FILE
"""

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlbench_cli import console
from mlbench_cli.engines.follow import without_event
from mlbench_cli.errors import MlbenchError
from mlbench_cli.model.run import LOCAL, Cluster
from mlbench_cli.model.spec import KubernetesOptions, RunSpec, canonical_json
from mlbench_cli.runs import launch
from mlbench_cli.runs.request import OPTIONS, Request, equivalent_command, merge, parse_duration, parse_file
from mlbench_cli.tasks.catalog import TYPES, Parameter, load_catalog, parse_task
from mlbench_cli.util.yaml_text import read_yaml
from task_images import contract
from task_images.parameters import parameter

WIDE = os.environ.get("HYPOTHESIS_PROFILE") == "wide"
NEW = os.environ.get("MLBENCH_TEST_INPUTS") == "new"


def many(count: int) -> settings:
    return settings(
        max_examples=count * 20 if WIDE else count if NEW else count // 4,
        derandomize=not (WIDE or NEW),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


CLUSTER = Cluster("far", "kind")
MACHINE = launch.Machine(cores=4, gpus=2)
TASKS = list(load_catalog().values())

texts = st.text(max_size=12) | st.text(alphabet="ab19-._ :=,{}[]'\"\\\n\0&*!\ud800", max_size=20)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.just(10**400) | texts
documents = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
# What is nearly right gets further than noise does.
pieces = st.sampled_from(
    ["- ", "a", ": ", "\n", "  ", "[", "]", "{", "}", "|\n", ">-\n", "'", '"', "? ", "~", "no", "1:30", "0x1f", "\x00"]
    + ["&x ", "*x", "<<: ", "1e400", ".nan", "2001-99-99", "0001-01-01T00:00:00+23:59", "\ufeff", "%YAML 9\n---\n"]
    + ["timeout: ", "seed: ", "name: ", "0x" + "f" * 4000]
    + [f"!!{tag} " for tag in ("int", "float ''", "timestamp", "bool x", "binary x", "set", "omap", "python/name:os")]
)
yaml_texts = st.lists(pieces, max_size=14).map("".join) | st.text(max_size=40)


def dump_yaml(value: Any) -> str:
    return yaml.safe_dump(value, allow_unicode=True)


def is_refused(call: Any, *arguments: Any) -> bool:
    """Whether the call refused in words; anything but a clean answer or a clean refusal is an error of the test."""
    try:
        call(*arguments)
    except MlbenchError as error:
        refusal = error
    else:
        return False
    assert refusal.message
    assert json.dumps(refusal.to_dict())
    return True


# --- spec files ------------------------------------------------------------------------------------------------------

file_keys = st.sampled_from([*Request.__struct_fields__, "num-cpus", "Task", "set ", "workres", "node-selector"])
axis_keys = (
    st.sampled_from(["backend", "num-cpus", "seed", "gpu", "set.batch_size", "env.A", "task", "cluster"]) | texts
)
fitting = {
    "text": texts,
    "integer": st.integers(),
    "switch": st.booleans(),
    "cluster": texts | st.dictionaries(st.just("provider") | texts, texts | st.booleans(), max_size=2),
    "texts": st.lists(texts, max_size=2),
    "pairs": st.dictionaries(texts, texts | st.integers(), max_size=2),
    "axes": st.dictionaries(axis_keys, st.lists(texts | st.integers(), max_size=3), max_size=3),
    "points": st.lists(st.dictionaries(axis_keys, texts | st.integers(), max_size=2), max_size=2),
}
right_keys = st.fixed_dictionaries(
    {"name": texts, "workers": st.lists(st.integers(), max_size=3)},
    optional={item.name: fitting[item.kind] for item in OPTIONS},
)
file_documents = st.dictionaries(file_keys | texts, documents, max_size=6) | right_keys


@many(1000)
@given(yaml_texts)
def test_yaml(text: str) -> None:
    is_refused(read_yaml, text)


@pytest.mark.slow
@many(1200)
@given(file_documents.map(dump_yaml) | yaml_texts)
def test_spec_files(text: str) -> None:
    is_refused(parse_file, text)


good_words = st.sampled_from(
    ["gloo", "nccl", "mpi", "custom", "custom:x", "spec", "tiny", "8Gi", "90s", "rank0", "all"]
)
words = st.none() | good_words | texts
requests = st.builds(
    Request,
    name=st.none() | st.sampled_from(["a", "my-run"]) | texts,
    workers=st.lists(st.integers(-1, 5000) | st.integers(), max_size=3).map(tuple),
    task=st.none() | st.sampled_from([task.name for task in TASKS]) | texts,
    command=words | st.just("python train.py --rank {rank}"),
    preset=words,
    set=st.dictionaries(texts | st.sampled_from(sorted(TASKS[0].parameters)), documents, max_size=2),
    **{item.name: words for item in OPTIONS if item.kind == "text" and item.name not in ("task", "preset", "command")},
    **{item.name: st.none() | st.booleans() for item in OPTIONS if item.kind == "switch"},
    **{item.name: st.none() | st.integers(-1, 70) for item in OPTIONS if item.kind == "integer"},
    node_selector=st.dictionaries(texts, texts, max_size=2),
    env=st.dictionaries(texts | st.just("LEVEL"), texts, max_size=2),
)
# Alone, almost every random request is refused at its first wrong option; with few options set, many pass.
small_requests = st.builds(
    lambda request, base, names: merge(base, Request(**{name: getattr(request, name) for name in names})),
    requests,
    st.sampled_from(
        [
            Request(name="run", workers=(1, 2), task=TASKS[0].name),
            Request(name="run", workers=(1,), command="true", image="me/x"),
        ]
    ),
    st.sets(st.sampled_from([item.name for item in OPTIONS]), max_size=2),
)


@pytest.mark.slow
@many(1200)
@given(requests | small_requests, st.sampled_from([LOCAL, CLUSTER]))
def test_launch(request: Request, cluster: Cluster) -> None:
    if is_refused(launch.resolve, request, cluster, MACHINE):
        return
    specs = launch.resolve(request, cluster, MACHINE)
    assert len(specs) == len({spec.name for spec in specs}) == len(request.workers) * (request.repeat or 1)
    for spec in specs:
        assert RunSpec.from_dict(json.loads(canonical_json(spec.to_dict()))).hash == spec.hash
    shlex.split(equivalent_command(request))


# --- parameters and tasks --------------------------------------------------------------------------------------------

numbers = st.none() | st.integers() | st.floats(allow_nan=False)
parameters = st.builds(
    lambda kind, low, high, choices: Parameter(
        "x",
        kind,
        "help",
        low if kind in ("int", "float") else None,
        high if kind in ("int", "float") else None,
        choices,
    ),
    st.sampled_from(TYPES),
    numbers,
    numbers,
    st.just(()) | st.just(("a", "b")),
)
number_texts = st.from_regex(r"[-+]?[0-9_.]{1,8}(e[-+]?[0-9]{1,4})?", fullmatch=True)


@many(1200)
@given(
    parameters, documents | number_texts | st.sampled_from(["inf", "nan", "1e999", "true", "[1,2", "0x10", "9" * 5000])
)
def test_parameters(parameter: Parameter, value: Any) -> None:
    if not is_refused(parameter.check, value):
        json.dumps(parameter.check(value), allow_nan=False)
        assert parameter.check(parameter.check(value)) == parameter.check(value)


TASK_KEYS = ["name", "number", "title", "legacy_name", "image", "command", "backends", "devices", "goal", "data"]
TASK_KEYS += ["settings", "presets"]


@dataclass(frozen=True)
class Settings:
    a: int = parameter(1, "h", min=1)


TASK = {
    "name": "t",
    "number": "1",
    "title": "T",
    "image": "t",
    "command": ["python"],
    "backends": ["gloo"],
    "devices": ["cpu"],
    "data": "none",
    "parameters": {"a": {"type": "int", "help": "h", "default": 1}},
    "presets": {"spec": {"a": 1}},
}
task_changes = st.one_of(
    st.fixed_dictionaries({}, optional={"title": texts, "data": texts, "number": scalars, "legacy_name": texts}),
    st.dictionaries(st.sampled_from(TASK_KEYS), documents, max_size=3),
    st.fixed_dictionaries({"parameters": st.dictionaries(st.just("a") | texts, documents, max_size=3)}),
    st.fixed_dictionaries({"presets": st.dictionaries(st.just("spec") | texts, documents, max_size=3)}),
)


@pytest.mark.slow
@many(1100)
@given(task_changes)
def test_tasks(changes: dict[str, Any]) -> None:
    is_refused(parse_task, {**TASK, **changes}, Path("t/catalog.json"))


def test_the_unchanged_task_is_right() -> None:
    assert parse_task(TASK, Path("t/catalog.json")).resolve() == {"a": 1}


# --- run specs, names, durations -------------------------------------------------------------------------------------

SPEC = RunSpec(
    "a-1", "k", "kubernetes", "custom", "custom", ("true",), "gloo", 1, image="i:1", kubernetes=KubernetesOptions()
).to_dict()
spec_changes = st.dictionaries(st.sampled_from(sorted(SPEC)) | texts, documents, max_size=3)
option_changes = st.dictionaries(st.sampled_from(sorted(SPEC["kubernetes"])) | texts, documents, max_size=3)


@pytest.mark.slow
@many(900)
@given(
    spec_changes.map(lambda changes: {**SPEC, **changes})
    | option_changes.map(lambda changes: {**SPEC, "kubernetes": {**SPEC["kubernetes"], **changes}})
    | documents
)
def test_run_specs(document: Any) -> None:
    if not is_refused(RunSpec.from_dict, document):
        spec = RunSpec.from_dict(document)
        assert RunSpec.from_dict(spec.to_dict()) == spec


@many(800)
@given(texts | st.from_regex(r"[0-9]{1,30}(\.[0-9])?[smhdw]?([0-9]+[smhd])?", fullmatch=True) | st.just("9" * 400))
def test_durations(text: str) -> None:
    if not is_refused(parse_duration, text):
        assert parse_duration(text) >= 0


# --- what ranks write, and what a terminal shows ---------------------------------------------------------------------

events = st.fixed_dictionaries(
    {"v": st.just(1) | scalars, "event": st.sampled_from(contract.KINDS) | texts, "rank": scalars, "time": scalars},
    optional={"name": texts, "value": documents},
)
lines = (
    events.map(lambda event: contract.PREFIX.encode() + json.dumps(event).encode())
    | st.binary(max_size=60)
    | st.binary(max_size=40).map(lambda data: contract.PREFIX.encode() + b"{" + data)
    | st.just(contract.PREFIX.encode() + b'{"a":' * 5000)
)


@many(1200)
@given(lines, st.booleans())
def test_events(line: bytes, behind_a_bar: bool) -> None:
    line = b"\r 40%|####" + line if behind_a_bar else line
    event = contract.parse_event(line)
    assert event == contract.parse_event(line) or event is not None
    assert event is None or (event["rank"] >= 0 and event["event"] in contract.KINDS)
    assert event is not None or without_event(line) == line


@many(400)
@given(
    st.sampled_from(contract.KINDS), st.integers(0, 9999), st.dictionaries(st.text(max_size=8), documents, max_size=4)
)
def test_events_survive(kind: str, rank: int, more: dict[str, object]) -> None:
    record = {**more, "v": 1, "event": kind, "rank": rank, "time": 1.5}
    event = contract.parse_event(contract.format_event(record))
    assert event is not None
    assert (event["event"], event["rank"], event["time"]) == (kind, rank, 1.5)


@many(400)
@given(
    st.lists(st.tuples(scalars, scalars, scalars | st.text(" a日", max_size=40)), max_size=5),
    st.integers(1, 60),
    st.booleans(),
)
def test_tables(rows: list[tuple[object, ...]], width: int, wrap: bool) -> None:
    table = console.format_table(["ONE", "TWO", "THREE"], rows, width=width, droppable=["TWO"], wrap=wrap)
    assert len(table.split("\n")) >= len(rows) + 1
    assert wrap or len(table.split("\n")) == len(rows) + 1
    assert table.replace("\n", "").isprintable()
    assert all(console.display_width(line) <= max(width, 36) for line in table.split("\n"))
