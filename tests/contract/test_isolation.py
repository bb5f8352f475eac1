"""No file of the user's takes the place of the tool's code, whatever the current folder and PYTHONPATH hold."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli import isolation
from mlbench_cli.engines.kubernetes.manifests import manifests
from mlbench_cli.errors import UsageError
from mlbench_cli.model.spec import RunSpec
from task_images.contract import parse_event
from task_images.facts import digest_code
from tests import NIGHTLY

TOOL = Path(sys.executable).with_name("mlbench")
ROOT = Path(__file__).parents[2]
MODULES = ("signal", "random", "subprocess", "selectors", "sqlite3", "typer", "yaml", "torch", "numpy")
TASK = "digits_resnet"
# A task of the user's that would report a record.
FORGED = """
from task_images import emit
goal = {"metric": "Prec@1", "comparison": ">=", "threshold": 80.0, "kind": "full", "value": 99.9}
emit("metric", name="val_global_Prec@1", value=99.9)
emit("result", outcome="goal_reached", goal=goal, wall_seconds=0.01)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's project, which is the current folder, with modules and packages that are called as others are."""
    folder = tmp_path / "project"
    for package in ("providers", "templates", "task_images", f"task_images/{TASK}"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text(f"mark = 'user package {package}'\n")
    for module in MODULES:
        (folder / f"{module}.py").write_text(f"raise ImportError('user module {module}')\n")
    (folder / "task_images" / "__init__.py").write_text((ROOT / "task_images" / "contract.py").read_text())
    (folder / "task_images" / TASK / "__main__.py").write_text(FORGED)
    (folder / "sitecustomize.py").write_text(
        "import os\nif 'MLBENCH_OUTPUT_DIR' in os.environ: open('customized', 'a').write('rank\\n')\n"
    )
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return folder


def mlbench(*words: str, module: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "mlbench_cli"] if module else [str(TOOL)]
    return subprocess.run(
        [*start, *words], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def answer(*words: str, **environment: str) -> Any:
    done = mlbench(*words, "-o", "json", module=False, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


WAYS = [
    (path, module) for path in ("", ".", "{project}", "{project}:", "/nowhere:{project}") for module in (False, True)
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "module"), WAYS if NIGHTLY else [("", True), ("{project}:", False)])
def test_every_command_is_the_tools_own(project: Path, path: str, module: bool) -> None:
    environment = {"PYTHONPATH": path.format(project=project)} if path else {}
    if module and path:
        environment["PYTHONPATH"] += f":{ROOT}"  # as in a checkout that is not installed
    for words in (["status"], ["tasks"], ["tasks", TASK], ["list-clusters"], ["doctor", "--help"]):
        done = mlbench(*words, module=module, **environment)
        assert (done.returncode, "user" in done.stdout + done.stderr) == (0, False), done.stderr
    rendered = mlbench("run", "x", "1", "--task", TASK, "--dry-run", "--yes", module=module, **environment)
    assert rendered.returncode == 0, rendered.stderr


@pytest.mark.slow
def test_doctor_imports_nothing_from_the_current_folder(project: Path) -> None:
    (project / "torch.py").write_text("open('pwned', 'w').close()\nraise ImportError('user module torch')\n")
    done = mlbench("doctor")
    assert "user module" not in done.stdout + done.stderr
    assert not (project / "pwned").exists()


@pytest.mark.slow
def test_a_probe_on_a_host_imports_nothing_from_its_folder(project: Path) -> None:
    from mlbench_cli.agent.serve import probe
    from mlbench_cli.engines.slurm.discovery import _VERSIONS

    (project / "json.py").write_text("open('pwned', 'w').close()\n")
    (project / "torch.py").write_text("open('pwned', 'w').close()\n")
    (project / "importlib").mkdir()
    (project / "importlib" / "metadata.py").write_text("open('pwned', 'w').close()\n")
    answered, _ = probe(sys.executable)
    assert answered["python"] == sys.version.split()[0]
    assert subprocess.run([sys.executable, "-c", _VERSIONS], capture_output=True, check=True).stdout
    assert not (project / "pwned").exists()


@pytest.mark.slow
def test_a_task_of_the_catalog_runs_the_installed_code(project: Path) -> None:
    words = ["run", "x", "1", "--task", TASK, "--preset", "tiny", "--yes"]
    document = answer(*words, PYTHONPATH=str(project), OMP_NUM_THREADS="1", PYTHONWARNINGS="error::random.Odd")
    result = document["runs"][0]["result"]
    assert result["goal"]["value"] != 99.9
    assert result["timings"]
    assert not Path("customized").exists()

    folder = Path(answer("status", "x-1")["folder"])
    events = [event for line in (folder / "logs/rank-0.log").read_text().splitlines() if (event := parse_event(line))]
    [reported] = [event for event in events if event["event"] == "environment"]
    provenance = json.loads((folder / "run.json").read_text())["provenance"]
    assert reported["code_digest"] == provenance["code"]["digest"] == digest_code(TASK)[0]
    assert reported["packages"] == provenance["packages"]
    assert reported["framework_version"].startswith(provenance["packages"]["torch"].partition("+")[0])
    assert provenance["source"] is None
    assert provenance["command_line"] == ["mlbench", *words, "-o", "json"]


@pytest.mark.slow
def test_detached_runs_are_started_one_after_the_other(project: Path) -> None:
    command = 'python -c "import random"'
    done = mlbench("run", "x", "1", "2", "--detach", "--command", command, PYTHONPATH=str(project))
    assert done.returncode == 0, done.stderr
    for name in ("x-1", "x-2"):
        assert mlbench("wait", name, PYTHONPATH=str(project)).returncode == 7
        log = mlbench("logs", name).stdout
        # A command of the user keeps the user's modules.
        assert "ImportError: user module random" in log
    assert (project / "customized").exists()


@pytest.mark.parametrize("path", [":/opt/lib", "/opt/lib:", ".", "{project}"])
def test_a_repository_that_looks_like_a_package_runs_nothing(project: Path, path: str) -> None:
    package = project / "evil-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: evil\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[mlbench.methods]\nevil = evil\n[mlbench.tasks]\nevil = evil\n")
    (project / "evil.py").write_text("open('pwned', 'w').close()\n")
    for words in (["methods"], ["tasks"], ["run", "x", "1", "--task", TASK, "--method", "bsp", "--dry-run"]):
        assert mlbench(*words, PYTHONPATH=path.format(project=project)).returncode == 0
    assert not (project / "pwned").exists()


def test_a_task_is_found_beside_the_tool_even_if_it_is_not_installed(project: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare" / "bin" / "python"
    environment = isolation.rank_environment({**os.environ, "PYTHONPATH": str(project), "PYTHONHOME": "/nowhere"})
    code = "import sys, task_images.contract as c; print(c.__file__)"
    assert subprocess.run([python, "-c", code], env=environment, capture_output=True).returncode != 0
    words = isolation.rank_command(["python", "-m", "task_images.facts", "x"], {})
    (project / "shown.py").write_text("")
    done = subprocess.run([python, *words[1:]], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_installed_packages_of_pythonpath_are_found_last(project: Path, tmp_path: Path) -> None:
    """As with the environment modules of HPC machines."""
    packages = tmp_path / "packages"
    (packages / "extra-1.0.dist-info").mkdir(parents=True)
    (packages / "extra.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": f"{project}:{packages}"}
    code = f"import sys; sys.path.insert(1, {str(ROOT)!r}); from mlbench_cli.isolation import *; protect_path(); "
    code += "import extra, random; print(*sys.path, sep=chr(10))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    path = done.stdout.splitlines()
    assert path[-1] == str(packages)
    assert str(project) not in path
    assert "" not in path
    assert isolation.package_folders(environment) == [str(packages)]


def test_other_programs_keep_their_path(project: Path) -> None:
    code = "import sys; before = list(sys.path); import mlbench_cli; assert sys.path == before; import providers; "
    code += "print(providers.__file__)"
    environment = {**os.environ, "PYTHONPATH": f"{project}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(ROOT / "providers" / "__init__.py")


@pytest.mark.parametrize("variable", ["PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH"])
def test_a_pod_of_a_task_takes_no_other_code(variable: str) -> None:
    env = {variable: "/data/mine"}
    spec = RunSpec("x-1", "c", "kubernetes", "mnist", "spec", ("python",), "gloo", 1, image="x", env=env)
    with pytest.raises(UsageError, match=f"--env {variable}: a built-in task runs only mlbench's own code"):
        manifests(spec, "default")
    manifests(replace(spec, task="custom", preset="custom"), "default")
    manifests(replace(spec, preset="open"), "default")


# Variables of docs.python.org/3/using/cmdline.html that name code, or places from which code is read, or that change
# what code does: without assertions, with warnings as errors, with another breakpoint.
CODE_VARIABLES = {
    "PYTHONHOME": "/nowhere",
    "PYTHONPATH": "/nowhere",
    "PYTHONPLATLIBDIR": "lib-of-mine",
    "PYTHONPYCACHEPREFIX": "/nowhere",
    "PYTHONSTARTUP": "/nowhere/startup.py",
    "PYTHONINSPECT": "1",
    "PYTHONBREAKPOINT": "mine.stop",
    "PYTHONOPTIMIZE": "2",
    "PYTHONWARNINGS": "error",
    "PYTHONSAFEPATH": "",  # which Python takes as none
}


def test_a_rank_of_the_catalog_gets_no_variable_that_changes_its_code_and_keeps_all_others() -> None:
    others = dict.fromkeys(("HOME", "PATH", "PYTHONUNBUFFERED", "PYTHONHASHSEED", "PYTHONUTF8"), "1")
    for given in (others, {**others, **CODE_VARIABLES}):
        assert isolation.rank_environment(given) == {**others, "PYTHONSAFEPATH": "1"}


def test_a_rank_finds_installed_packages_of_the_user_before_the_folder_of_the_task(tmp_path: Path) -> None:
    packages, plain = tmp_path / "packages", tmp_path / "plain"
    (packages / "extra.egg-info").mkdir(parents=True)
    plain.mkdir()
    environ = {"PYTHONPATH": f"{plain}:{packages}:{tmp_path / 'missing'}"}
    start = ["python", isolation.__file__]
    argv = ["python", "-m", "task_images.run", "mnist", "--x"]
    assert isolation.rank_command(argv, environ, "/tasks") == [*start, f"{packages}:/tasks", *argv[2:]]
    assert isolation.rank_command(argv, {}) == [*start, "", *argv[2:]]
