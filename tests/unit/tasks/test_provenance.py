"""Provenance: what is recorded of code, machine and command line, and what is refused when it is read."""

import contextlib
import json
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbench_cli import __version__
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.tasks.provenance import (
    MachineRecord,
    Provenance,
    SourceCommit,
    TaskCode,
    collect_provenance,
    find_commit,
    parse_provenance,
)
from task_images.facts import digest_code, list_packages


def spec(**changes: Any) -> RunSpec:
    fields: dict[str, Any] = {"task": "custom", "preset": "custom", "engine": "local", "argv": ("true",), **changes}
    return RunSpec(name="x-1", cluster="c", backend="gloo", workers=1, **fields)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "repository"
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    (folder / "train.py").write_text("pass\n")
    (folder / ".gitignore").write_text("*.log\n")
    git(folder, "add", "--all")
    git(folder, "-c", "user.name=me", "-c", "user.email=me@here", "commit", "--quiet", "--message", "one")
    return folder


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True, text=True).stdout.strip()


def fake_git(folder: Path, script: str) -> str:
    """A PATH with a `git` of our own."""
    folder.mkdir()
    (folder / "git").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "git").chmod(stat.S_IRWXU)
    return f"{folder}:/usr/bin:/bin"


# --- what is recorded -------------------------------------------------------------------------------------------------


def test_a_task_of_the_catalog_is_known_by_its_code() -> None:
    known = collect_provenance(spec(task="mnist", preset="tiny", argv=("python", "-m", "task_images.run", "mnist")))
    assert known.code == TaskCode("mnist", *digest_code("mnist"))
    assert known.source is None
    assert known.mlbench == __version__
    assert known.packages == list_packages()
    assert known.machine is not None
    assert known.machine.cores == len(os.sched_getaffinity(0))


def test_a_command_of_the_user_is_known_by_its_commit(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    known = collect_provenance(spec(), ["mlbench", "run", "x", "1", "--command", "x --api-key=secret"])
    assert known.source == SourceCommit(git(repository, "rev-parse", "HEAD"), modified=False, untracked=False)
    assert known.code is None
    assert "secret" not in str(known)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/home/me/libraries")
    nameless = collect_provenance(spec(anonymous=True), ["mlbench", "run", "x", "1", "--command", "mine"])
    assert (nameless.command_line, "/home/me" in str(nameless)) == ((), False)


def test_on_a_cluster_the_ranks_report_where_they_run(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    known = collect_provenance(spec(engine="kubernetes", image="x"))
    assert (known.source, known.packages, known.machine) == (None, None, None)


def test_it_survives_being_written_and_read(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    for known in (collect_provenance(spec()), collect_provenance(spec(task="mnist", preset="spec"))):
        assert parse_provenance(json.loads(json.dumps(known.to_dict()))) == known


# --- git --------------------------------------------------------------------------------------------------------------


def test_changes_are_told_from_files_that_git_does_not_know(repository: Path) -> None:
    (repository / "run.log").write_text("ignored")
    below = repository / "below"
    below.mkdir()
    commit = git(repository, "rev-parse", "HEAD")
    assert find_commit(below) == SourceCommit(commit, modified=False, untracked=False)
    (below / "new.py").write_text("new")
    assert find_commit(repository) == SourceCommit(commit, modified=False, untracked=True)
    (repository / "train.py").write_text("changed")
    assert find_commit(repository) == SourceCommit(commit, modified=True, untracked=True)


def test_without_a_repository_or_a_commit_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_commit(tmp_path) is None
    assert find_commit(tmp_path / "absent") is None
    subprocess.run(["git", "init", "--quiet", tmp_path / "empty"], check=True)
    assert find_commit(tmp_path / "empty") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_commit(tmp_path) is None


def test_the_folder_counts_and_not_the_variables_of_a_hook(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(repository / ".git"))
    assert find_commit(tmp_path) is None


@pytest.mark.parametrize("script", ["exit 3", "echo nonsense", "printf '# branch.oid \\377\\n'", "kill -9 $$"])
def test_a_git_that_fails_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setenv("PATH", fake_git(tmp_path / "bin", script))
    assert find_commit(tmp_path) is None


def test_a_git_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_git(tmp_path / "bin", "exec sleep 600"))
    assert find_commit(tmp_path, seconds=0.2) is None


# --- what is refused --------------------------------------------------------------------------------------------------

MACHINE = MachineRecord("Linux 6", "x86_64", 4, 1 << 30, "a CPU", 1.5, ("H100",), "570.1")
CODE, SOURCE = TaskCode("x", "0" * 64), SourceCommit("ab", modified=True, untracked=False)
WHOLE = Provenance("4.0.0", "3.12.1", ("mlbench",), CODE, source=SOURCE, packages={}, machine=MACHINE)


def test_what_a_newer_mlbench_adds_is_left_out() -> None:
    assert parse_provenance({**WHOLE.to_dict(), "weather": "fine"}) == WHOLE


def json_values() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    grow: Callable[[Any], Any] = lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)  # noqa: E731
    return st.recursive(leaves, grow, max_leaves=10)


@given(json_values(), st.sampled_from(["", *WHOLE.to_dict()]))
def test_no_document_ends_in_another_error(value: Any, field: str) -> None:
    with contextlib.suppress(ValueError):
        parse_provenance({**WHOLE.to_dict(), field: value} if field else value)
