"""A command of the user in pods: its files of this machine are there, without an image of one's own."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlbench_cli.app import run
from mlbench_cli.results.archive.verify import find_problems
from tests.fakes.kube_api import KubeApi
from tests.fakes.kubelet import IMAGE_ID, Kubelet

TRAIN = """import os
from parts.model import size
from task_images.contract import emit
print("working in", os.path.basename(os.getcwd()), open("settings.yaml").read().strip(), flush=True)
emit("metric", name="size", value=size() + int(os.environ["RANK"]))
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    """The cluster "there", which is the default; the current folder has a small project."""
    home, project = tmp_path / "home", tmp_path / "project"
    (project / "parts").mkdir(parents=True)
    (project / "train.py").write_text(TRAIN)
    (project / "parts" / "model.py").write_text("def size():\n    return 40\n")
    (project / "settings.yaml").write_text("depth: 3\n")
    (project / "data.bin").write_bytes(os.urandom(2 << 20))
    home.mkdir()
    monkeypatch.setenv("MLBENCH_HOME", str(home))
    monkeypatch.chdir(project)
    with KubeApi() as server, Kubelet(server, tmp_path / "pods"):
        server.record(home)
        yield server


def start(name: str, command: str, *options: str) -> int:
    return run(["run", name, "2", "--cluster", "there", "--command", command, "--yes", *options])


def archive_of(home: Path, name: str) -> Path:
    (found,) = (path.parent for path in home.glob("runs/*/run.json") if json.loads(path.read_text())["name"] == name)
    return found


def test_a_script_finds_its_modules_and_settings(
    server: KubeApi, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start("own", "python train.py --config settings.yaml") == 0
    assert "Workers get parts/model.py, settings.yaml, train.py of this folder." in capfd.readouterr().err
    archive = archive_of(tmp_path / "home", "own-2")
    assert "working in files depth: 3" in (archive / "logs/rank-1.log").read_text()
    assert (archive / "code/train.py").read_text() == TRAIN
    result = json.loads((archive / "result.json").read_text())
    assert result["metrics"] == {"size": 40}
    assert {state["image_digest"] for state in result["worker_states"]} == {IMAGE_ID.rpartition("@")[2]}
    assert json.loads((archive / "run.json").read_text())["provenance"]["command"]["digest"]
    assert find_problems(archive) == []
    (manifest,) = (archive / "manifests").glob("configmap.yaml")
    assert "files.tar.gz" not in manifest.read_text()  # they are in the archive as they are
    # Nothing else of the folder is sent, and another version of the script is not a repeat.
    maps, _ = server.list_objects("configmaps", {}, "")
    assert sum(len(text) for item in maps for text in item["binaryData"].values()) < 1 << 20
    (tmp_path / "project/parts/model.py").write_text("def size():\n    return 41\n")
    assert start("own-later", "python train.py --config settings.yaml") == 0
    capfd.readouterr()
    assert run(["compare", "own", "own-later", "--metric", "size"]) == 0
    assert "\ncode" in capfd.readouterr().out  # among the differences


def test_each_command_of_a_matrix_brings_its_own_files_and_programs_stay_executable(
    server: KubeApi, tmp_path: Path
) -> None:
    for name in ("go", "other"):
        program = tmp_path / f"project/{name}.sh"
        program.write_text(f"#!/bin/sh\necho {name} runs\n")
        program.chmod(0o755)
    assert run(["run", "own", "1", "--cluster", "there", "--matrix", "command=./go.sh,./other.sh", "--yes"]) == 0
    archives = list((tmp_path / "home").glob("runs/*"))
    assert {path.read_text() for path in (tmp_path / "home").glob("runs/*/logs/rank-0.log")} == {
        *("go runs\n", "other runs\n")
    }
    assert {path.name for archive in archives for path in (archive / "code").iterdir()} == {"go.sh", "other.sh"}


def test_an_anonymous_run_gets_its_files_and_keeps_none(server: KubeApi, tmp_path: Path) -> None:
    assert start("own", "python train.py --config settings.yaml", "--anonymous") == 0
    assert not (archive_of(tmp_path / "home", "own-2") / "code").exists()


def test_an_image_of_ones_own_has_its_own_files_unless_some_are_included(
    server: KubeApi, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    image = ("--image", "mine/trainer:1")
    assert start("own", "python train.py --config settings.yaml", *image) == 7
    assert "the image's train.py; --include train.py sends this folder's" in capfd.readouterr().err
    assert not (archive_of(tmp_path / "home", "own-2") / "code").exists()
    folder = tmp_path / "project/configuration"
    folder.mkdir()
    for name in ("model.yaml", "secrets.yaml"):
        (folder / name).touch()
    assert start("sent", "python train.py", *image, "--include", "settings.yaml", "--include", folder.name) == 0
    archive = archive_of(tmp_path / "home", "sent-2")
    assert "working in files depth: 3" in (archive / "logs/rank-1.log").read_text()
    assert (archive / "code/settings.yaml").exists()
    assert [path.name for path in (archive / "code" / folder.name).iterdir()] == ["model.yaml"]  # and no secrets


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python other.py", ["There is no file other.py in this folder", "--image NAME:TAG"]),
        ("python ../project/train.py", ["../project/train.py is not", "cd /", "name it train.py"]),
        ("python {project}/train.py", ["Workers get files below this folder", "name it train.py"]),
        ("python train.py data.bin", ["The files of the command have 2.1 MB, compressed", "--data-claim CLAIM"]),
    ],
)
def test_files_that_pods_cannot_get_are_named(
    server: KubeApi, tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str, words: list[str]
) -> None:
    assert start("own", command.format(project=tmp_path / "project")) == 2
    told = " ".join(capfd.readouterr().err.split())
    assert [word for word in words if word not in told] == []
    assert server.list_objects("jobs", {}, "")[0] == []
