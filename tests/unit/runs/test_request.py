"""Spec files say the same as flags, wrong ones are refused in words, and a request can be written as a command line."""

import shlex
from pathlib import Path

import pytest
from msgspec.structs import replace

from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model.run import LOCAL
from mlbench_cli.runs.launch import Machine, resolve
from mlbench_cli.runs.request import (
    Request,
    equivalent_command,
    merge,
    parse_file,
    read_file,
)

MACHINE = Machine(cores=4, gpus=0)
DIGITS = Request(name="run", workers=(1, 2), task="digits_resnet")
COMMAND = Request(name="run", workers=(2,), command="python train.py --rank {rank} 'two words'")
SPEC_FILE = """
name: run
workers: [1, 2]
task: digits_resnet
preset: tiny
set: {epochs: 3, learning_rate: 1e-3}
num-cpus: 2
light: true
timeout: 90
"""


def test_a_spec_file_says_the_same_as_flags() -> None:
    flags = replace(
        DIGITS, preset="tiny", set={"epochs": "3", "learning_rate": "1e-3"}, num_cpus=2, light=True, timeout="90s"
    )
    from_file, from_flags = (resolve(request, LOCAL, MACHINE) for request in (parse_file(SPEC_FILE), flags))
    assert [spec.hash for spec in from_file] == [spec.hash for spec in from_flags]


def test_flags_go_before_the_file() -> None:
    top = Request(workers=(4,), set={"epochs": "9"}, light=False)
    merged = merge(parse_file(SPEC_FILE), top)
    assert (merged.name, merged.workers, merged.light) == ("run", (4,), False)
    assert merged.set == {"epochs": "9", "learning_rate": "1e-3"}
    assert merge(merged, Request()) == merged


def test_rare_settings_of_a_run_are_written_in_a_file_as_on_the_command_line() -> None:
    read = parse_file("set: {run.budget: 5s, run.servers: 1, run.pin: true, batch_size: 16}")
    assert (read.budget, read.servers, read.pin, read.set) == ("5s", 1, True, {"batch_size": 16})
    with pytest.raises(UsageError, match="no setting"):
        parse_file("set: {run.bugdet: 5s}")


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
        ("workers: 1\nname: a\nworkers: 2", 'the key "workers" is given twice, in line 3'),
        ("set: {a: 1, b: 2, a: 3}", 'the key "a" is given twice'),
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
        node_selector={"pool": "spot"},
    )
    words = shlex.split(equivalent_command(request))
    assert words[:4] == ["mlbench", "run", "run", "2"]
    assert words[words.index("--command") + 1] == request.command
    assert {"--light", "--no-gpu", "a=1,2", "LEVEL=x y", "pool=spot"} <= set(words)
