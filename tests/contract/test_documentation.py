"""The documentation: its commands are run, its reference is generated and complete, its site is built and checked."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

import mlbench_cli.app
from mlbench_cli import commands
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from mlbench_cli.tasks.catalog import load_catalog
from task_images import contract
from tests.documentation import (
    NEEDS,
    PAGES,
    ROOT,
    all_blocks,
    page_name,
    read_blocks,
    run_page,
)
from tests.needs import missing
from tools import reference, results

FIRST = ROOT / "docs/tutorial/first-result.md"
RUNNABLE = [page for page in PAGES if any(block.commands and not block.needs for block in read_blocks(page))]


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("page", [page for page in RUNNABLE if page.stem != "own-training"], ids=page_name)
def test_commands_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_commands_of_the_first_page_run_in_order_with_a_small_training(tmp_path: Path) -> None:
    """In every `make test`; the trainings of the pages as they are take minutes, and run nightly."""

    def shorten(command: str) -> str:
        return f"{command} --preset tiny" if command.startswith("mlbench run ") else command

    ran = run_page(FIRST, tmp_path, adapt=shorten)
    assert "mlbench run first 1 2 --task digits_resnet --light --preset tiny" in ran


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("page", "needs"),
    [
        (page, needs)
        for page in PAGES
        for needs in ("time", "mpi")
        if needs in {block.needs for block in read_blocks(page)}
    ],
    ids=str,
)
def test_commands_that_take_time_or_mpi_run_with_small_trainings(page: Path, needs: str, tmp_path: Path) -> None:
    if needs == "mpi":
        pytest.importorskip("mpi4py")

    def adapt(command: str) -> str:
        if command.startswith("mlbench certify "):  # any verdict about a busy machine
            return f"{command} --only drift; code=$?; [ $code -eq 0 ] || [ $code -eq 7 ] || [ $code -eq 9 ]"
        if command.startswith("mlbench serve"):  # until it is stopped
            return f"timeout 10 {command}; [ $? -eq 124 ]"
        return f"{command} --set seconds_total=20" if "--task allreduce" in command else command

    assert run_page(page, tmp_path, needs=needs, adapt=adapt)


CLUSTERS = ("mine", "gpus")  # that the pages have attached


def as_plan(line: str) -> list[str]:
    """The words that only plan a documented command, which creates a cluster or runs on one; none for another."""
    if not line.startswith(("mlbench create-cluster ", "mlbench run ")):
        return []
    line = line.replace("--cluster test-4", "--cluster mine")  # which the page has created, and no plan does
    return [*(word for word in shlex.split(line, comments=True)[1:] if word != "--dry-run"), "--dry-run"]


@pytest.mark.slow
@pytest.mark.parametrize("needs", ["gke", "eks", "aks", "cluster"])
def test_what_needs_an_account_or_a_cluster_is_planned_as_documented(needs: str, tmp_path: Path) -> None:
    """Without credentials, and on clusters that do not answer: options, sizes and machines go together."""
    (tmp_path / "home").mkdir()
    store = Store(tmp_path / "home")
    for name in CLUSTERS:
        store.record_cluster(Cluster(name, "kind", "ready", details={"nodes": 16, "gpus_per_node": 8}))
    store.close()
    for name in ("patch.yaml", "topology.yaml", "rdma.yaml"):
        (tmp_path / name).write_text("metadata: {labels: {team: research}}\n")
    given = {"HOME": str(tmp_path), "MLBENCH_HOME": str(tmp_path / "home"), "MLBENCH_CLUSTER": "mine"}
    known = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "GOOGLE_", "AZURE_"))}
    lines = [line for block in all_blocks() if block.needs == needs for line in block.commands if as_plan(line)]
    failed = {}
    for line in lines:
        # A process of its own: a fork of this one would still have the credentials of a cloud's double.
        command = [sys.executable, "-m", "mlbench_cli", *as_plan(line)]
        done = subprocess.run(command, env={**known, **given}, cwd=tmp_path, capture_output=True, text=True)
        if done.returncode != 0:
            failed[line] = done.stderr
    assert (failed, bool(lines)) == ({}, True)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_tutorials_own_training_reaches_the_goal_in_the_open_division(tmp_path: Path) -> None:
    run_page(ROOT / "docs" / "tutorial" / "own-training.md", tmp_path)
    store = Store(tmp_path / "home")
    outcomes = {row.run.name: row.outcome for row in store.runs()}
    assert outcomes == {"mine-2": "completed", "open-2": "goal_reached", "nodes-2": "completed", "shell-1": "completed"}
    result = json.loads((store.run("open-2").run.folder / "result.json").read_text())
    assert result["division"]["word"] == "open"
    assert result["goal"]["value"] >= result["goal"]["threshold"] == 90
    metrics = (store.run("shell-1").run.folder / "metrics.jsonl").read_text()
    assert json.loads(metrics)["value"] == 42
    by_torchrun = (store.run("nodes-2").run.folder / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["rank"] for line in by_torchrun} == {0, 1}  # one world, not two


def test_every_block_of_commands_is_run_or_says_what_it_needs() -> None:
    languages = {block.language for block in all_blocks()}
    assert languages <= {"sh", "console", "text", "python", "yaml", "json", "toml"}, (
        "an unknown language hides commands"
    )
    assert {block.needs for block in all_blocks()} - {None} <= {*NEEDS}


def test_outputs_are_shown_by_blocks_whose_commands_are_run() -> None:
    pasted = re.compile(r"^(\$ |Error: |RUN  |Too few runs )", re.MULTILINE)
    assert not [
        page_name(block.page) for block in all_blocks() if block.language == "text" and pasted.search(block.text)
    ]
    assert not [block.page for block in all_blocks() if block.outputs and block.needs]
    assert any(block.outputs for block in all_blocks())


def test_every_command_line_is_one_that_mlbench_accepts() -> None:
    """Also those that need a cloud: their commands, options and arguments exist."""
    wrong = []
    lines = [(block.page, line) for block in all_blocks() for line in block.commands if line.startswith("mlbench ")]
    assert len(lines) > 200
    for page, line in lines:
        words = shlex.split(line, comments=True)[1:]
        ends = [index for index, word in enumerate(words) if word in ("|", ">", "&&")]
        try:
            parse_command(words[: ends[0]] if ends else words)
        except (AssertionError, typer.TyperException) as error:
            wrong.append(f"{page_name(page)}: {line}: {error!r}")
    assert wrong == []


def parse_command(words: list[str]) -> None:
    """Parse a command line as mlbench does, without running it. Raises the parser's error."""
    command: Any = typer.main.get_command(mlbench_cli.app.app)
    context = command.make_context("mlbench", [], resilient_parsing=True)
    while hasattr(command, "get_command") and words:
        name, *words = words
        command = command.get_command(context, name)
        assert command is not None, f"there is no command {name}"
        parent, context = context, None
        if hasattr(command, "get_command"):
            context = command.make_context(name, [], parent=parent, resilient_parsing=True)
        else:
            command.make_context(name, words, parent=parent)


def test_targets_of_make_in_the_documentation_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    lines = [command for block in all_blocks() for command in block.commands if command.startswith("make ")]
    assert lines
    for line in lines:
        assert re.search(rf"^{line.split()[1]}:", makefile, re.MULTILINE), line


def test_the_results_in_readme_are_those_of_the_archives() -> None:
    assert results.format_readme() == (ROOT / "README.md").read_text("utf-8"), "python -m tools.results readme"


def test_pictures_of_readme_exist_and_are_small() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", readme)
    assert pictures
    assert all((ROOT / picture).stat().st_size < 100_000 for picture in pictures)


def test_links_between_pages_lead_to_files_of_the_repository() -> None:
    """As GitHub shows them; the site has generated pages, too, and its links are checked where it is built."""
    dead = [
        f"{page_name(page)}: {link}"
        for page in PAGES
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
        if not (page.parent / link).exists()
    ]
    assert dead == []


def test_fakes_and_tests_named_by_the_assumptions_about_clouds_exist() -> None:
    page = (ROOT / "docs/development/clouds-assumptions.md").read_text("utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ") and line.count(" | ") > 2]
    named = {name for row in rows for name in re.findall(r"`(\w+\.py)`", row[1])}
    assert len(named) > 10
    assert [name for name in sorted(named) if not any((ROOT / "tests").rglob(name))] == []


# --- reference and site -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return reference.generate_pages(reference.make_sample(tmp_path_factory.mktemp("sample")))


def test_the_reference_has_every_command_task_exit_code_and_event(pages: dict[str, str]) -> None:
    assert all(f"\n### {name}\n" in pages["cli.md"] for name in commands.names())
    assert "\n#### create-cluster gke\n" in pages["cli.md"]
    assert all(f"\n## {name}\n" in pages["tasks.md"] for name in load_catalog())
    assert all(f"| `{code}` |" in pages["exit-codes.md"] for code in commands.EXIT_CODES)
    assert all(f"\n## {kind}\n" in pages["events.md"] for kind in contract.KINDS)
    variables = re.findall(r"MLBENCH_[A-Z_]+", contract.__doc__ or "")
    assert variables
    assert all(f"`{name}`" in pages["contract.md"] for name in variables)


def test_the_reference_describes_every_field_of_an_archive(pages: dict[str, str]) -> None:
    assert all(f"\n## {name}\n" in pages["archive.md"] for name in ("run.json", "result.json", "metrics.jsonl"))
    assert "| `goal.seconds.wall` | number |" in pages["archive.md"]


@pytest.mark.nightly  # `make docs` builds it for every pull request
def test_the_site_builds_with_all_links_and_without_the_network(tmp_path: Path) -> None:
    if importlib.util.find_spec("zensical") is None:
        missing("the generator of the site is not installed: make install")
    from tools.build_docs import main

    assert main([str(tmp_path / "build")]) == 0
    assert (tmp_path / "build" / "site" / "reference" / "cli.html").is_file()
