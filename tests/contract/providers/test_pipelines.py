"""The pipelines of ci/ that create a cluster, run, gate and delete: their steps, one after the other as there."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlbench_cli.storage.store import Store
from tests import NIGHTLY
from tests.fakes.kind_tools import World
from tests.fakes.kube_api import KubeApi
from tests.needs import needs

CI = Path(__file__).parents[3] / "ci"
GITHUB: Any = yaml.safe_load((CI / "mlbench-cluster.github.yml").read_text("utf-8"))
GITLAB_INPUTS, GITLAB = yaml.safe_load_all((CI / "mlbench-cluster.gitlab-ci.yml").read_text("utf-8"))
VALUES = {
    "NAME": "ci-7", "CLOUD": "kind", "OPTIONS": "--num-cpus 1 --set goal_full=20", "TASK": "digits_resnet",
    "PRESET": "tiny",
    "WORKERS": "1", "REPEAT": "1", "CHECK": "seconds=1.1", "BASELINE": "", "REQUIREMENT": "",
}  # fmt: skip
STEPS = {step["name"]: step for step in GITHUB["jobs"]["benchmark"]["steps"] if "name" in step}


class Runner:
    """A machine that runs the steps of one job, with the doubles in its PATH."""

    def __init__(self, folder: Path, temporary: str) -> None:
        self.folder, self.temporary = folder, temporary
        (folder / "bin").mkdir()
        (folder / "bin" / "mlbench").symlink_to(Path(sys.executable).with_name("mlbench"))

    def run(self, lines: Sequence[str], **more: str) -> int:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        environment = {**os.environ, **VALUES, **more, "PATH": path, "TMPDIR": self.temporary}
        (self.folder / "step.sh").write_text("\n".join(lines))
        words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(self.folder / "step.sh")]
        with open(self.folder / "output", "ab") as output:
            return subprocess.run(words, cwd=self.folder, env=environment, stdout=output, stderr=output).returncode


@pytest.fixture
def runner(world: World, nodes: KubeApi, tmp_path: Path) -> Iterator[Runner]:
    # A machine has one lock for each name of a cluster, and these tests use one name. Paths of sockets must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        yield Runner(tmp_path, temporary)


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_the_steps_create_run_report_gate_and_leave_nothing(runner: Runner, world: World) -> None:
    for name in ("Create, run and delete", "Delete what is left", "Report", "Gate"):
        code = runner.run([STEPS[name]["run"]], BASELINE=GITHUB["env"]["BASELINE"])
        assert code == 0, (runner.folder / "output").read_text()
    results = runner.folder / "mlbench-results"
    assert sorted(path.name for path in (results / "archives").iterdir()) == ["ci-7-1.zip"]
    assert world.left == []
    # Results of KIND are functional, so no gate can pass them: it cannot tell.
    assert runner.run([STEPS["Gate"]["run"]], BASELINE=str(results / "archives")) == 9
    if not NIGHTLY:
        return
    # GitLab's job finds that all of it has been done.
    assert runner.run(GITLAB["mlbench-cluster"]["script"], BASELINE=str(results / "archives")) == 9
    assert runner.run(GITLAB["mlbench-cluster"]["after_script"]) == 0
    assert world.left == []


@pytest.mark.slow
@pytest.mark.parametrize("knows_it", [False, True] if NIGHTLY else [False], ids=str)
def test_what_a_killed_command_left_is_deleted_by_the_step_that_always_runs(
    runner: Runner, world: World, monkeypatch: pytest.MonkeyPatch, knows_it: bool
) -> None:
    before = len(world.state["log"])
    assert runner.run([STEPS["Create, run and delete"]["run"]], OPTIONS="--num-cpus two") == 2
    created = before + 12  # a call while the cluster is being created
    world.change(trouble={str(created): "kill-after"})
    assert runner.run([STEPS["Create, run and delete"]["run"]]) == 137, (runner.folder / "output").read_text()
    world.change(trouble={})
    assert world.left != []
    home = str(Store().folder) if knows_it else str(runner.folder / "elsewhere")
    step = STEPS["Delete what is left"] if knows_it else GITHUB["jobs"]["clean-up"]["steps"][-1]
    assert runner.run([step["run"]], MLBENCH_HOME=home) == 0, (runner.folder / "output").read_text()
    assert world.left == []
    assert runner.run(GITLAB["mlbench-clean-up"]["script"], MLBENCH_HOME=home) == 0  # there is nothing any more


def test_deletion_always_runs_and_texts_of_people_stay_out_of_the_scripts() -> None:
    for job in GITHUB["jobs"].values():
        deletes = [step for step in job["steps"] if step.get("name") == "Delete what is left"]
        assert len(deletes) == 1
        assert "always()" in (deletes[0].get("if") or job["if"])
        assert not any("${{" in step.get("run", "") for step in job["steps"])
    assert GITLAB["mlbench-clean-up"]["when"] == "always"
    assert GITLAB["mlbench-cluster"]["after_script"] == GITLAB["mlbench-clean-up"]["script"]
    inputs = GITLAB_INPUTS["spec"]["inputs"].values()
    assert all(item["description"] and isinstance(item["default"], str) for item in inputs)


def test_the_workflow_has_no_finding_of_actionlint() -> None:
    beside = Path(sys.executable).with_name("actionlint")
    actionlint = str(beside) if beside.exists() else needs("actionlint", "make actionlint")
    words = [actionlint, "-no-color", str(CI / "mlbench-cluster.github.yml")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
