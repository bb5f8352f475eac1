"""`make bench`: what each script needs is said, prepared once, and removed; what cannot be had leaves a script out."""

import os
import re
from pathlib import Path

import pytest

from tests.fakes.kind_tools import World
from tools import bench

SCRIPT = 'import os, sys\nprint("RUN", os.environ.get("KUBECONFIG"), *sys.argv[1:])\n'
KUBECTL = "#!/bin/sh\necho kind-mine\n"


@pytest.fixture
def scripts(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "scripts"
    folder.mkdir()
    for name in ("alone.py", "fetch.py", "submit.py", "_shared.py"):
        (folder / name).write_text(SCRIPT)
    return bench.list_scripts(folder)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    world = World(tmp_path / "world")
    (world.bin / "kubectl").write_text(KUBECTL)
    (world.bin / "kubectl").chmod(0o755)
    world.change(images={"bench:1": "sha256:1"})
    kept = {key: value for key, value in os.environ.items() if key not in ("KUBECONFIG", "MLBENCH_HOME")}
    path = f"{world.bin}{os.pathsep}{kept['PATH']}"
    return {**kept, "PATH": path, "KIND_WORLD": str(world.path), "MLBENCH_BENCH_IMAGE": "bench:1"}


def test_every_need_is_that_of_a_script_and_no_script_of_a_cluster_is_forgotten() -> None:
    folder = bench.ROOT / "benchmarks"
    assert bench.NEEDS.keys() <= {script.stem for script in bench.list_scripts(folder)}
    asking = {script.stem for script in bench.list_scripts(folder) if "KUBECONFIG=" in script.read_text()}
    assert asking == {name for name, need in bench.NEEDS.items() if need is bench.Need.CLUSTER}


def test_a_cluster_with_the_image_is_made_once_and_deleted(
    scripts: list[Path], environ: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert [script.name for script in scripts] == ["alone.py", "fetch.py", "submit.py"]
    assert bench.run_scripts(scripts, environ) == 0
    output = capfd.readouterr().out
    assert "== alone.py: needs this machine\nRUN None\n" in output
    assert len(re.findall(r"RUN /\S+/kubeconfig bench:1\n", output)) == 2
    world = World(tmp_path / "world")
    calls = world.state["log"]
    assert sum(call.startswith("kind create cluster") for call in calls) == 1
    assert any("docker save" in call or "kind load" in call for call in calls)
    assert world.left == []


def test_the_image_is_loaded_into_the_kind_cluster_that_is_given(
    scripts: list[Path], environ: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loads = tmp_path / "loads"
    (tmp_path / "world" / "bin" / "kind").write_text(f'#!/bin/sh\necho "$*" >>{loads}\n')
    assert bench.run_scripts(scripts[1:2], {**environ, "KUBECONFIG": "/given"}) == 0
    assert loads.read_text() == "load docker-image bench:1 --name mine\n"
    assert "RUN /given bench:1" in capfd.readouterr().out


def test_what_cannot_be_had_leaves_its_scripts_out(
    scripts: list[Path], environ: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "world" / "bin" / "kubectl").unlink()
    path = str(tmp_path / "world" / "bin")
    assert bench.run_scripts(scripts, {**environ, "PATH": path}) == 0
    output = capfd.readouterr().out
    assert output.count("left out: kubectl is not on the path") == 2
    assert "RUN None" in output


def test_a_failing_script_does_not_stop_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "b.py").write_text(SCRIPT)
    assert bench.run_scripts(bench.list_scripts(tmp_path), os.environ) == 3
    assert "a.py ended with exit code 3" in capfd.readouterr().out
