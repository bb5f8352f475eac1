"""The action for GitHub and the template for GitLab: their form, and their steps, run here as there."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from mlbench_cli.model.run import JsonObject
from tests.needs import needs

ROOT = Path(__file__).parents[2]
ACTION: JsonObject = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
STEPS: list[JsonObject] = ACTION["runs"]["steps"]
GITLAB = ROOT / "ci" / "mlbench.gitlab-ci.yml"
MLBENCH = Path(sys.executable).with_name("mlbench")
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
# Stands for GitHub's own program: notes its arguments, and knows one comment if COMMENTS says so.
GH = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in *--paginate*) printf '%s' "$COMMENTS" ;; *fails*) exit 1 ;; esac
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to work in, with a data folder that all steps share."""
    folder = tmp_path_factory.mktemp("ci")
    (folder / "bin").mkdir()
    (folder / "bin" / "gh").write_text(GH)
    (folder / "bin" / "gh").chmod(0o755)
    (folder / "bin" / "mlbench").symlink_to(MLBENCH)
    return folder


def environment_of(world: Path, **more: str) -> dict[str, str]:
    own = {
        "MLBENCH_HOME": str(world / "home"),
        "OMP_NUM_THREADS": "1",
        "CALLS": str(world / "calls"),
        "COMMENTS": "",
        "PATH": f"{world / 'bin'}:{os.environ['PATH']}",
    }
    github = {name: str(world / name.lower()) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "GITHUB_ENV")}
    return {**os.environ, **own, **github, **more}


def run_step(world: Path, name: str, inputs: Mapping[str, str], **more: str) -> subprocess.CompletedProcess[str]:
    """A step of the action as GitHub runs it: its expressions become variables, its text a file for bash."""
    (step,) = [step for step in STEPS if step["name"] == name]
    values = {
        **{f"inputs.{key}": str(item.get("default", "")) for key, item in ACTION["inputs"].items()},
        **{f"inputs.{key}": value for key, value in inputs.items()},
        "github.repository": "me/here",
        "github.event.pull_request.number": "7",
        "inputs.token": "secret",
    }
    given = {key: values[text.strip("${} ")] for key, text in step.get("env", {}).items()}
    script = world / "step.sh"
    script.write_text(step["run"])
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]
    environment = environment_of(world, **given, **more)
    return subprocess.run(command, cwd=world, env=environment, capture_output=True, text=True, check=False, timeout=280)


def outputs(world: Path) -> dict[str, str]:
    lines = (world / "github_output").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


INPUTS = {"requirement": "", "name": "ci", "workers": "1", "check": "seconds=1.1"}


# --- the action -----------------------------------------------------------------------------------------------------


def test_every_step_says_how_it_runs_and_takes_no_expression_into_its_script() -> None:
    for step in STEPS:
        assert ("uses" in step) != ("run" in step), step["name"]
        if "run" in step:
            assert step["shell"] == "bash"
            assert "${{" not in step["run"]  # a title of a pull request must not become part of a script
        else:
            assert PINNED.fullmatch(step["uses"])
    assert STEPS[-1]["name"] == "Gate"  # report and artifact are there when it fails


def test_inputs_and_outputs_are_described_and_used() -> None:
    text = (ROOT / "action.yml").read_text("utf-8")
    for name, item in ACTION["inputs"].items():
        assert item["description"]
        assert isinstance(item["default"], str), name
        assert f"inputs.{name}" in text
    known = {f"inputs.{name}" for name in ACTION["inputs"]}
    assert set(re.findall(r"inputs\.[a-z-]+", text)) == known
    steps = {step["id"]: step["run"] for step in STEPS if "id" in step}
    for item in ACTION["outputs"].values():
        match = re.fullmatch(r"\$\{\{ steps\.(\w+)\.outputs\.(\w+) \}\}", item["value"])
        assert match
        assert f"{match[2]}=" in steps[match[1]]


def test_every_action_of_a_workflow_is_pinned_by_its_hash() -> None:
    """A tag can be moved: whoever does that would run in a job that may publish packages."""
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    steps = [
        (path.name, step["uses"])
        for path in workflows
        for job in yaml.safe_load(path.read_text("utf-8"))["jobs"].values()
        for step in job["steps"]
        if "uses" in step
    ]
    assert len(steps) > 10
    assert [(name, action) for name, action in steps if action != "./" and not PINNED.fullmatch(action)] == []


def test_no_script_of_the_templates_has_a_finding_of_shellcheck(tmp_path: Path) -> None:
    needs("shellcheck", "apt-get install shellcheck")
    scripts = {step["name"]: step["run"] for step in STEPS if "run" in step}
    scripts["gitlab"] = "\n".join(read_gitlab()["mlbench"]["script"])
    for name, text in scripts.items():
        path = tmp_path / f"{name}.sh"
        path.write_text(text)
        # Numbers of workers are words of their own (SC2086); runners set the variables (SC2153, SC2154).
        words = ["shellcheck", "--shell=bash", "--exclude=SC2086,SC2153,SC2154", str(path)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_no_workflow_has_a_finding_of_actionlint() -> None:
    """Also inputs and outputs of the action, if workflows use it."""
    beside = shutil.which("actionlint", path=str(Path(sys.executable).parent))
    actionlint = beside or needs("actionlint", "make actionlint")
    paths = sorted(map(str, (ROOT / ".github" / "workflows").glob("*.yml")))
    done = subprocess.run([actionlint, "-no-color", *paths], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_steps_run_report_comment_and_gate(world: Path, forked_ranks: Path) -> None:
    """One training, whose results the other steps of both templates use."""
    (world / "bin" / "mlbench").unlink()
    (world / "bin" / "mlbench").symlink_to(forked_ranks / "mlbench")
    assert run_step(world, "Install", INPUTS).returncode == 0
    hostile = {**INPUTS, "name": 'x"; touch hacked; $(touch hacked)'}
    refused = run_step(world, "Run", hostile)
    assert refused.returncode == 2
    assert not (world / "hacked").exists()
    done = run_step(world, "Run", INPUTS)
    assert done.returncode == 0, done.stderr
    done = run_step(world, "Report", INPUTS)
    assert done.returncode == 0, done.stderr
    found = outputs(world)
    assert (world / found["report"]).read_text().startswith("<!doctype html>")
    assert [path.name for path in (world / found["archives"]).iterdir()] == ["ci-1.zip"]
    assert "digits" in (world / "github_step_summary").read_text()

    assert run_step(world, "Comment", INPUTS).returncode == 0
    assert run_step(world, "Comment", INPUTS, COMMENTS="42").returncode == 0
    calls = (world / "calls").read_text().splitlines()
    assert [call.split()[2] for call in calls if "--method" in call] == ["POST", "PATCH"]
    assert any("repos/me/here/issues/comments/42" in call for call in calls)
    assert (world / "mlbench-results" / "comment.md").read_text().startswith("<!-- mlbench report -->\n")

    first = run_step(world, "Gate", {**INPUTS, "baseline": "benchmarks/baseline"})  # the first pull request has none
    assert (first.returncode, outputs(world)["verdict"]) == (0, "no_baseline")
    assert "commit the archives of this run there: mlbench-results/archives" in first.stdout
    gate = {**INPUTS, "baseline": found["archives"]}  # the same run is no earlier one: nothing can be decided
    assert run_step(world, "Gate", gate).returncode == 9
    assert outputs(world)["verdict"] == "cannot_tell"
    assert run_step(world, "Gate", {**gate, "allow-undecided": "true"}).returncode == 0
    ElementTree.parse(world / "mlbench-results" / "gate.xml")
    script = read_gitlab()["mlbench"]["script"]
    values = {"REQUIREMENT": "", "NAME": "ci", "TASK": "digits_resnet", "PRESET": "tiny", "WORKERS": "1"}
    values |= {"REPEAT": "1", "CHECK": "seconds=1.1"}
    whole = world / "gitlab.sh"
    whole.write_text("set -e\n" + "\n".join(script))
    for baseline in ("none-yet", found["archives"]):
        environment = environment_of(world, **values, BASELINE=baseline)
        done = subprocess.run(
            ["bash", str(whole)], cwd=world, env=environment, capture_output=True, text=True, check=False, timeout=280
        )
        assert done.returncode in read_gitlab()["mlbench"]["allow_failure"]["exit_codes"], done.stderr


# --- the template for GitLab ----------------------------------------------------------------------------------------


def read_gitlab() -> JsonObject:
    _, document = yaml.safe_load_all(GITLAB.read_text("utf-8"))
    found: JsonObject = document
    return found


def test_the_template_uses_the_inputs_that_it_declares() -> None:
    text = GITLAB.read_text("utf-8")
    header = next(iter(yaml.safe_load_all(text)))
    declared = header["spec"]["inputs"]
    assert set(re.findall(r"\$\[\[ inputs\.(\w+) \]\]", text)) == set(declared)
    assert all(item["description"] and isinstance(item["default"], str) for item in declared.values())
    assert "$[[" not in str(read_gitlab()["mlbench"]["script"])
