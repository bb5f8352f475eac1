"""`mlbench run --from ARCHIVE`: nothing is executed, mounted or passed because a stranger's archive says so."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import fields, replace

from mlbench_cli import api
from mlbench_cli.api import repetition
from mlbench_cli.api.repetition import LEAVES, AuthorsProgram, Leaf
from mlbench_cli.app import run
from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import KubernetesOptions, RunSpec
from mlbench_cli.results.archive.record import write_run_document
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.runs.request import Request
from mlbench_cli.storage.store import Store
from mlbench_cli.tasks.catalog import find_rules, load_task
from task_images.methods.catalog import describe, find_class
from tests.contract.terminal import Terminal
from tests.unit.results.runs import event, new_run, observation_of, result_event

Captured = pytest.CaptureFixture[str]
EVIL = ("sh", "-c", "touch pwned")


@pytest.fixture(autouse=True)
def folder(home: Path) -> Path:
    return home.parent


def strangers_archive(folder: Path, identity: str | None = None, **changes: Any) -> str:
    """An archive that verifies, of a run that another store made; `identity`: the id that it claims."""
    options: dict[str, Any] = {"task": "custom", "preset": "custom", "argv": EVIL, "backend": "gloo", "workers": 1}
    options |= {"name": "x-1", "cluster": "local", "engine": "local"}
    spec = RunSpec(**{**options, **changes})
    rules = find_rules(spec.task, spec.preset)
    goal = rules and rules.find_goal(spec.parameters, spec.goal)
    log = ["done"]
    if goal:  # reached at once
        log.append(event("metric", at=2.0, name=goal.metric, value=goal.threshold))
        log.append(result_event(4.0, goal={**goal.to_dict(), "kind": "full", "value": goal.threshold}))
    recorded = new_run(folder / "theirs", spec, {0: log})
    recorded = replace(recorded, id=identity or recorded.id)
    write_run_document(recorded)
    seal(recorded, observation_of(1, 5.0))
    return str(recorded.folder)


def digits(**changes: Any) -> dict[str, Any]:
    task = load_task("digits_resnet")
    return {
        "task": task.name, "preset": "tiny", "argv": task.command, "parameters": task.resolve("tiny"), **changes
    }  # fmt: skip


def test_a_catalog_task_with_another_command_is_refused_whatever_is_agreed_to(folder: Path, capsys: Captured) -> None:
    archive = strangers_archive(folder, **digits(argv=EVIL))
    assert run(["run", "y", "--from", archive, "--yes", "--run-foreign-command"]) == 2
    assert "its command is not that of the catalog" in capsys.readouterr().err
    assert not Path("pwned").exists()
    assert not Store().runs()


def test_a_strangers_command_is_printed_and_needs_its_own_agreement(folder: Path, capsys: Captured) -> None:
    archive = strangers_archive(folder)
    for words in ([], ["--yes"]):
        assert run(["run", "y", "--from", archive, *words]) == 2
        error = capsys.readouterr().err
        assert "command: sh -c 'touch pwned'" in error
        assert "not signed by an allowed signer" in error
        assert "--run-foreign-command" in error
    assert run(["run", "y", "--from", archive, "--dry-run"]) == 0
    assert not Path("pwned").exists()
    assert not Store().runs()
    assert run(["run", "y", "--from", archive, "--run-foreign-command"]) == 0
    assert Path("pwned").exists()


def test_on_a_terminal_yes_is_typed_and_the_default_is_no(folder: Path) -> None:
    archive = strangers_archive(folder)
    for answer, happens in (("", False), ("y", True)):
        terminal = Terminal("run", "y", "--from", archive, "--yes", home=folder / "home", cwd=folder)
        terminal.answer("Run this? [y/N] ", answer)
        assert terminal.finish()[0] == (0 if happens else 130)
        assert Path("pwned").exists() is happens


def test_yes_is_enough_for_an_archive_of_an_allowed_signer(folder: Path, capsys: Captured) -> None:
    archive = strangers_archive(folder)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "key"], check=True)
    Path("signers").write_text(f"ada@example.org {Path('key.pub').read_text()}")
    words = ["run", "y", "--from", archive, "--yes", "--signers", "signers"]
    assert run(words) == 2
    assert "The origin is not proven: it has no signature" in capsys.readouterr().err
    assert run(["verify", archive, "--sign", "key"]) == 0
    assert run(["run", "y", "--from", archive, "--yes"]) == 2  # a signature by nobody knows whom
    assert not Path("pwned").exists()
    assert run(words) == 0
    assert "signed by ada@example.org" in capsys.readouterr().err
    assert Path("pwned").exists()


def test_an_archive_with_the_id_of_a_run_from_here_is_foreign(folder: Path, capsys: Captured) -> None:
    assert run(["run", "x", "1", "--command", "true"]) == 0
    assert run(["run", "y", "--from", "x-1"]) == 0  # one's own command
    (mine,) = (row.run for row in Store().runs() if row.run.name == "x-1")
    archive = strangers_archive(folder, identity=mine.id)
    capsys.readouterr()
    assert run(["run", "z", "--from", archive]) == 2
    assert "command: sh -c 'touch pwned'" in capsys.readouterr().err
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"data_dir": "/"}, "data_dir: /"),
        ({"task_path": "/tmp"}, "task_path: /tmp"),
        ({"image": "evil/image:1"}, "image: evil/image:1"),
    ],
)
def test_what_a_catalog_task_would_mount_or_import_is_agreed_to(
    folder: Path, capsys: Captured, changes: Mapping[str, Any], shown: str
) -> None:
    archive = strangers_archive(folder, **digits(**changes))
    assert run(["run", "y", "--from", archive, "--yes"]) == 2
    assert shown in capsys.readouterr().err


def test_every_right_in_a_cluster_is_agreed_to(folder: Path) -> None:
    rights: dict[str, Any] = {
        "namespace": "kube-system", "data_claim": "disk",
        "registry": "evil", "devices": {"a/b": "1"}, "pod_patch": {"metadata": {"labels": {"a": "b"}}},
        "network_policy": False, "pull_secret": "pull",
    }  # fmt: skip
    spec = RunSpec(
        "x-1", "lab", "kubernetes", "custom", "custom", EVIL, "gloo", 1, image="evil/image:1", env={"LD_PRELOAD": "x"},
        kubernetes=KubernetesOptions(**rights),
    )  # fmt: skip
    choices = dict(repetition._authors_choices(spec, Cluster("lab", "kind")))
    assert choices.keys() == {"command", "image", "env", *rights}


def test_every_field_of_a_spec_is_classified() -> None:
    """Whoever adds a field says whether an archive may decide it: by what the field holds."""
    names = {item.name for item in fields(RunSpec)}
    names |= {f"kubernetes.{item.name}" for item in fields(KubernetesOptions)}
    assert names <= LEAVES.keys(), names - LEAVES.keys()
    texts = {item.name for item in fields(RunSpec) if "str" in str(item.type)}
    # Free text may be a path; these are checked words, scripts of fixed words, and names that only label.
    checked = {"device", "goal", "network", "faults", "on_failure", "checkpoint_every"}
    assert {name for name in texts if LEAVES[name] is Leaf.VALUE} == checked


@pytest.mark.parametrize(
    "words", [["run", "y", "--from", "ARCHIVE", "--yes"], ["reproduce", "ARCHIVE", "--repeat", "2"]]
)
@pytest.mark.parametrize("place", ["/tmp", "output/rank-0"])
def test_a_method_in_a_file_is_never_imported(folder: Path, capsys: Captured, words: list[str], place: str) -> None:
    file = folder / place / "m.py" if not place.startswith("/") else folder / "m.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("open('pwned', 'w')\n")
    shown = str(file) if place.startswith("/") else f"{place}/m.py"
    method = {"name": "bsp", "engine": "registered", "file": shown}
    archive = strangers_archive(folder, **digits(method=method))
    assert run([archive if word == "ARCHIVE" else word for word in words]) == 2
    assert shown in capsys.readouterr().err
    assert not Path("pwned").exists()
    assert not Store().runs()


@pytest.mark.parametrize(
    "words", [["run", "y", "--from", "ARCHIVE", "--yes"], ["reproduce", "ARCHIVE", "--repeat", "2"]]
)
@pytest.mark.parametrize("name", ["checkpoint_dir", "resume"])
def test_no_folder_that_an_archive_names_is_written(
    folder: Path, capsys: Captured, words: list[str], name: str
) -> None:
    task = load_task("gpt_pretraining")
    parameters = {**task.resolve("tiny"), name: str(folder / "victim")}
    archive = strangers_archive(
        folder, task=task.name, preset="tiny", argv=task.command, parameters=parameters
    )  # fmt: skip
    assert run([archive if word == "ARCHIVE" else word for word in words]) == 2
    assert f"parameters.{name}: {folder / 'victim'}" in capsys.readouterr().err
    assert not Store().runs()


def test_what_a_stranger_changed_is_shown_before_anything_starts(folder: Path, capsys: Captured) -> None:
    task = load_task("digits_resnet")
    archive = strangers_archive(
        folder,
        **digits(
            parameters=task.resolve("tiny", {"batch_size": 16}), method=describe(find_class("powersgd")()), seed=7
        ),
    )
    assert run(["run", "y", "--from", archive, "--dry-run"]) == 0
    error = capsys.readouterr().err
    for change in ("batch_size 16", "method powersgd", "seed 7"):
        assert change in error


def test_a_catalog_task_as_installed_asks_for_nothing(folder: Path) -> None:
    archive = strangers_archive(folder, **digits())
    launch = api.Client().prepare_repetition(archive, Request(name="y"))
    assert [spec.argv for spec in launch.specs] == [load_task("digits_resnet").command]


def test_the_python_api_refuses_unless_somebody_agrees(folder: Path) -> None:
    archive = strangers_archive(folder)
    client, seen = api.Client(), list[AuthorsProgram]()
    with pytest.raises(Exception, match="It was not run"):
        client.prepare_repetition(archive, Request(name="y"))
    client.prepare_repetition(archive, Request(name="y"), agree=seen.append)
    assert [program.choices for program in seen] == [(("command", "sh -c 'touch pwned'"),)]
