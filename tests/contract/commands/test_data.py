"""`mlbench data prepare`: fetched or imported, converted once, identified; and what cannot be, in a line."""

import json
import zipfile
from pathlib import Path

import pytest

from mlbench_cli.app import run
from mlbench_cli.commands.data import request_filling
from mlbench_cli.model.run import Cluster
from mlbench_cli.runs.launch import resolve
from mlbench_cli.tasks.catalog import load_task
from tests.contract.clients import answer
from tests.contract.terminal import Terminal

Captured = pytest.CaptureFixture[str]


def write_wikitext(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for split in ("train", "valid", "test"):
            archive.writestr(f"wikitext-2/wiki.{split}.tokens", " one two \n \n three two \n")
    return path


@pytest.mark.slow
def test_data_are_imported_converted_once_and_identified(tmp_path: Path, capsys: Captured) -> None:
    archive, folder = write_wikitext(tmp_path / "wikitext-2-v1.zip"), tmp_path / "data"
    command = ["data", "prepare", "wikitext2_awd_lstm", "--data-dir", str(folder), "--import", str(archive)]
    document = answer(capsys, *command)
    identity = document["data_identity"]
    assert identity["counts"] == {"train words": 7, "valid words": 7, "test words": 7, "vocabulary": 4}
    assert identity["official"] is False
    assert identity["reason"].startswith("a part of the official data: 7 train words instead of 2088628")
    assert document["folder"] == str(folder)
    made = (folder / "wikitext2.cache" / "train.npy").stat().st_ino
    assert run(command) == 0
    shown = capsys.readouterr().out
    assert f"wikitext2_awd_lstm: ready in {folder}" in shown
    assert identity["digest"] in shown
    assert "not the official data (a part of the official data" in shown
    assert (folder / "wikitext2.cache" / "train.npy").stat().st_ino == made


@pytest.mark.slow
def test_unpacked_files_are_imported_as_well_as_their_archive(tmp_path: Path, capsys: Captured) -> None:
    zipfile.ZipFile(write_wikitext(tmp_path / "wikitext-2-v1.zip")).extractall(tmp_path)
    words = [word for path in (tmp_path / "wikitext-2").iterdir() for word in ("--import", str(path))]
    folder = tmp_path / "data"
    document = answer(capsys, "data", "prepare", "wikitext2_awd_lstm", "--data-dir", str(folder), *words)
    assert document["data_identity"]["counts"]["train words"] == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["of_tomorrow"], 'There is no task "of_tomorrow"'),
        (["wikitext2_awd_lstm", "--import", "x"], "--import needs --data-dir"),
        (["wikitext2_awd_lstm", "--data-dir", "FOLDER", "--import", "x"], 'does not read a file called "x"'),
        (["wikitext2_awd_lstm", "--import", "s3://bucket/x"], 'does not read a file called "x"'),
        (["wikitext2_awd_lstm", "--import", "ftp://host/wikitext-2-v1.zip"], "not the address of a file"),
        (["imagenet_resnet", "--data-dir", "FOLDER"], "--import ILSVRC2012_devkit_t12.tar.gz"),
    ],
)
def test_bad_input_is_explained(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    given = [str(tmp_path / "empty") if argument == "FOLDER" else argument for argument in arguments]
    assert run(["data", "prepare", *given]) in (2, 4)
    captured = capfd.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err


def test_the_parameters_of_a_run_are_those_of_its_preparation(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Errors of the data name --set, e.g. for folders with fewer classes than ImageNet's."""
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            (tmp_path / part / name / "1.jpg").touch()
    command = ["data", "prepare", "imagenet_resnet", "--data-dir", str(tmp_path)]
    assert run(command) == 2
    assert "--set classes=2" in capfd.readouterr().err
    assert run([*command, "--set", "classes=2"]) == 0
    assert "2  classes" in capfd.readouterr().out
    assert run([*command, "--set", "class=2"]) == 2
    assert 'has no parameter "class". Did you mean "classes"?' in capfd.readouterr().err


def test_a_claim_is_filled_by_a_run_of_one_worker() -> None:
    task, cluster = load_task("cifar10_resnet20"), Cluster("far", "attached", details={"registry": "example.org/me"})
    url = "s3://bucket/cifar-10-binary.tar.gz"
    [spec] = resolve(request_filling(task, task.resolve(), "pvc", cluster, urls=[url]), cluster)
    words = f"python -m task_images.prepare cifar10_resnet20 task_images.cifar10_resnet20 {url}"
    assert (spec.name, list(spec.argv), spec.workers) == ("prepare-cifar10-resnet20-1", words.split(), 1)
    assert str(spec.image).startswith("example.org/me/cifar10_resnet20:")
    assert (spec.data_dir, spec.pods.data_claim) == ("/data", "pvc")
    assert dict(spec.parameters) == task.resolve()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--claim", "pvc"], 'The cluster "local" has no persistent volume claims'),
        (["--claim", "pvc", "--import", "x"], "--import copies files on this machine"),
        (["--cluster", "local"], "--cluster requires --claim"),
        (["--size", "1Gi"], "--size requires --claim"),
        (["--claim", "pvc", "--access", "rwx"], "--access requires --size"),
        (["--claim", "pvc", "--size", "1Gi", "--access", "all"], "choose rwx"),
        (["--claim", "pvc", "--size", "1Gi"], 'The cluster "local" has no persistent volume claims'),
    ],
)
def test_claims_without_a_cluster_are_refused(capsys: Captured, arguments: list[str], words: str) -> None:
    assert run(["data", "prepare", "cifar10_resnet20", *arguments]) == 2
    assert words in capsys.readouterr().err


PREPARATION = """
import time
from task_images.fetch import ProgressLines

def prepare_data(folder, parameters):
    progress = ProgressLines("packing", 4_000_000, print)
    for _ in range(3):
        time.sleep(1.1)
        progress.add(1_000_000)
    print("packed", flush=True)
    return type("Identity", (), {"to_dict": lambda self: None})()
"""
SLOW = {
    "name": "slow", "number": "z9", "title": "Slow", "image": "example/slow", "command": ["python", "-m", "slow"],
    "backends": ["gloo"], "devices": ["cpu"], "data": "none", "parameters": {},
}  # fmt: skip


def test_a_terminal_shows_a_bar_that_is_redrawn(tmp_path: Path) -> None:
    folder = tmp_path / "tasks" / "slow"
    folder.mkdir(parents=True)
    for name, text in (("data.py", PREPARATION), ("__init__.py", "")):
        (folder / name).write_text(text)
    (folder.parent / "catalog.json").write_text(json.dumps({"tasks": [SLOW]}))
    person = Terminal(
        *("data", "prepare", "slow", "--data-dir", str(tmp_path / "data")),
        home=tmp_path / "home",
        environment={"MLBENCH_TASK_PATH": str(folder.parent)},
    )
    person.expect("[#####...............] 25% of 4 MB")
    person.expect("[##########..........] 50% of 4 MB")
    code, rest = person.finish()
    assert code == 0
    assert "packed\n" in rest
