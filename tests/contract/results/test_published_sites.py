"""What a site publishes is what was checked: of a submitter's folder only regular files, derived words and own runs."""

import json
import os
from pathlib import Path

import pytest

from mlbench_cli.app import run
from mlbench_cli.results.archive.files import pack
from tests.unit.results.runs import sealed_run

Captured = pytest.CaptureFixture[str]
SECRET = "the private key"


@pytest.fixture(autouse=True)
def secret(home: Path) -> None:
    home.with_name("secret").write_text(SECRET)


def add_runs(folder: Path, seconds: tuple[float, ...], name: str = "run-2") -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, each in enumerate(seconds, 1):
        work = folder.parent / f".{folder.name}-{name}-{number}"
        made = sealed_run(work, name=f"{name}-r{number}", task="mnist", seconds=each)
        pack(made, folder / f"{name}-r{number}.zip")
        paths.append(str(folder / f"{name}-r{number}.zip"))
    return paths


def publish(*words: str) -> str:
    """Build the site of `in`; everything in it as one text."""
    assert run(["site", "in", "--to", "site", *words]) == 0
    return "\n".join(path.read_bytes().decode("latin-1") for path in Path("site").rglob("*") if path.is_file())


def reproduce(folder: Path) -> Path:
    one, other = add_runs(folder / "a", (40.0, 40.2, 40.1)), add_runs(folder / "b", (40.1, 40.3, 40.0), "again-2")
    receipt = folder / "receipt.json"
    words = [word for path in other for word in ("--with", path)]
    assert run(["reproduce", *one, *words, "--receipt", str(receipt)]) == 0
    return receipt


def test_a_link_beside_a_receipt_is_not_published(tmp_path: Path, capsys: Captured) -> None:
    receipt = reproduce(tmp_path / "in")
    Path(f"{receipt}.sig").symlink_to(tmp_path / "secret")
    assert run(["site", "in", "--to", "site"]) == 7
    assert "is a link or no regular file" in capsys.readouterr().err
    assert SECRET not in publish("--leave-out")
    Path(f"{receipt}.sig").unlink()
    Path(f"{receipt}.sig").write_text(SECRET)  # a file that is no signature
    assert SECRET not in publish("--leave-out")


def test_files_that_block_or_lead_elsewhere_are_left_alone(tmp_path: Path, capsys: Captured) -> None:
    add_runs(tmp_path / "in", (40.0, 41.0))
    os.mkfifo(tmp_path / "in" / "x.json")
    (tmp_path / "in" / "y.json").symlink_to("/dev/zero")
    (tmp_path / "in" / "z.zip").symlink_to(tmp_path / "secret")
    assert SECRET not in publish("--leave-out")
    (tmp_path / "in" / "entry.json").symlink_to("/dev/zero")
    assert run(["site", "in", "--to", "site"]) == 7
    assert "is a link or no regular file" in capsys.readouterr().err
    assert SECRET not in publish("--leave-out")


def test_a_receipt_of_another_version_shows_the_words_of_this_one(tmp_path: Path) -> None:
    receipt = reproduce(tmp_path / "in")
    document = json.loads(receipt.read_text())
    document |= {"mlbench": "9.9.9", "reason": "Reproduced by an independent laboratory on 64 H100."}
    receipt.write_text(json.dumps(document))
    text = "\n".join(path.read_text() for path in Path("site").rglob("*.html")) if publish() else ""
    assert "Reproductions" in text
    assert "independent laboratory" not in text
    assert "reproduced within" in text
    results = json.loads(Path("site/index.json").read_text())["results"]
    assert [len(each["receipts"]) for each in results] == [1, 1]  # beside the original and the reproduction


def test_submitters_are_not_put_together(tmp_path: Path) -> None:
    add_runs(tmp_path / "in" / "alice", (1.0, 1.1, 1.2))
    add_runs(tmp_path / "in" / "bob", (10.0, 10.1, 10.2))
    (tmp_path / "in" / "bob" / "entry.json").write_text(json.dumps({"submitter": "bob", "hardware": "64x H100"}))
    publish()
    results = json.loads(Path("site/index.json").read_text())["results"]
    assert sorted((round(each["value"], 1), each["runs"]) for each in results) == [(1.1, 3), (10.1, 3)]
    assert len({each["id"] for each in results}) == 2
    assert not any("H100" in str(each["machine"]) for each in results)
    assert {each["submitter_says"] for each in results} == {None, "64x H100"}
