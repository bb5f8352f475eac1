"""A repository of results: started by a command, checked by its own workflow's steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mlbench_cli.app import run
from mlbench_cli.errors import UsageError
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.archive.pack import pack
from mlbench_cli.results.archive.sign import sign
from mlbench_cli.results.receipts import archive_digest
from mlbench_cli.results.site.repository import Rules, read_rules
from tests.unit.results.runs import sealed_run

CLAIM = "results/mnist/spec/2025-10-09_demo"


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return path


@pytest.fixture
def repository(tmp_path: Path, key: Path) -> Path:
    folder = tmp_path / "repository"
    assert run(["site", "init", str(folder)]) == 0
    (folder / "allowed_signers").write_text(f"me@example.org {key.with_suffix('.pub').read_text()}")
    return folder


def add_claim(repository: Path, key: Path | None, repeats: int = 3, place: str = CLAIM, **changes: object) -> Path:
    claim = repository / place
    claim.mkdir(parents=True)
    for number in range(1, repeats + 1):
        name = f"demo-2-r{number}"
        settings = {"task": "mnist", "seconds": 40.0 + number, "seed": 41 + number, **changes}
        made = sealed_run(repository.parent / f"runs-{os.urandom(4).hex()}", name=name, **settings)  # type: ignore[arg-type]
        pack(made, claim / f"{name}.zip")
        if key is not None:
            sign(claim / f"{name}.zip", key)
    (claim / "entry.json").write_text(json.dumps({"submitter": "me", "hardware": "a laptop"}))
    return claim


def objections(repository: Path, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str]]:
    capsys.readouterr()
    code = run(["site", "check", str(repository), "-o", "json"])
    document = json.loads(capsys.readouterr().out)
    assert "objections" in document, document
    found = document["objections"]
    assert code == (7 if found else 0)
    return [(each["file"], each["message"]) for each in found]


def test_a_signed_claim_with_all_repeats_passes(
    repository: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert objections(repository, capsys) == []
    add_claim(repository, key)
    assert objections(repository, capsys) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"repeats": 2}, "2 successful runs; mnist needs 3"),
        ({"synthetic": True}, "its data are synthetic"),
        ({"key": None}, "it is not signed by anyone in allowed_signers"),
        ({"outcome": "goal_missed"}, "0 successful runs"),
        ({"preset": "tiny"}, "it is mnist (tiny), not mnist (spec)"),
    ],
)
def test_what_the_rules_do_not_allow_is_an_objection(
    repository: Path, key: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], words: str
) -> None:
    add_claim(repository, **{"key": key, **changes})  # type: ignore[arg-type]
    assert any(words in message for _, message in objections(repository, capsys))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- repeats", "not a mapping of rules to values"),
        ("repeat: 3", "unknown rule 'repeat'. Did you mean \"repeats\"?"),
        ("repeats: true", "repeats cannot be True"),
        ("repeats: -1", "repeats cannot be -1"),
        ("repeats: many", "repeats cannot be 'many'"),
        ("signed: 1", "signed cannot be 1"),
        ("divisions: open", "divisions cannot be 'open'"),
        ("divisions: [open, 1]", "divisions cannot be ['open', 1]"),
    ],
)
def test_rules_that_make_no_sense_are_refused_with_their_file(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules/default.yaml").write_text(text)
    with pytest.raises(UsageError) as error:
        read_rules(tmp_path, "mnist")
    assert words in str(error.value)
    assert "default.yaml" in str(error.value)


def test_rules_of_a_task_replace_those_of_all_tasks(tmp_path: Path) -> None:
    assert read_rules(tmp_path, "mnist") == Rules()
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules/default.yaml").write_text("repeats: 0\ndivisions: [open]\n")
    (tmp_path / "rules/mnist.yaml").write_text("repeats: 5\n")
    (tmp_path / "rules/other.yaml").write_text("")
    assert (read_rules(tmp_path, "mnist").repeats, read_rules(tmp_path, "mnist").divisions) == (5, ("open",))
    assert (read_rules(tmp_path, "other").repeats, read_rules(tmp_path, "other").divisions) == (0, ("open",))


def test_two_settings_are_no_claim_and_one_run_is_in_one_claim(
    repository: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim = add_claim(repository, key)
    other = repository / "results/mnist/spec/2025-10-10_again"
    other.mkdir()
    for path in claim.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    made = sealed_run(repository.parent / "more", name="more-4", workers=4, task="mnist")
    pack(made, claim / "more.zip")
    sign(claim / "more.zip", key)
    found = dict(objections(repository, capsys))
    assert "this one has 2" in found[CLAIM]
    assert f"it is also a run of {CLAIM}" in found["results/mnist/spec/2025-10-10_again/demo-2-r1.zip"]


def test_a_claim_has_all_of_its_repeats_and_is_withdrawn_whole(
    repository: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim = add_claim(repository, key, repeats=4)
    with Archive.open(claim / "demo-2-r1.zip") as archive:
        line = {"digest": archive_digest(archive), "date": "2026-01-01", "by": "me", "reason": "wrong clock"}
    (repository / "withdrawn.jsonl").write_text(json.dumps(line) + "\n")
    words = f"it withdraws 1 of the 4 runs of {CLAIM}: a claim must be withdrawn as a whole"
    assert objections(repository, capsys) == [("withdrawn.jsonl", words)]
    (repository / "withdrawn.jsonl").write_text(json.dumps({**line, "digest": "0" * 64}) + "\n")
    assert "no archive here has the digest 0000" in objections(repository, capsys)[0][1]
    (repository / "withdrawn.jsonl").write_text("")
    (claim / "demo-2-r2.zip").unlink()
    assert objections(repository, capsys)[0][1].startswith("demo-2-r2 is missing: a claim includes all repeats")


def test_a_training_that_converges_faster_than_all_others_is_outside_their_band(
    repository: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for day, epochs in ((1, 20), (2, 21), (3, 20)):
        add_claim(repository, key, place=f"results/mnist/spec/2025-10-{day:02}_honest", epochs=epochs)
    assert objections(repository, capsys) == []
    fast = "results/mnist/spec/2025-11-01_fast"
    add_claim(repository, key, place=fast, epochs=12)
    found = objections(repository, capsys)
    assert [file for file, _ in found] == [fast]
    assert "outside the convergence band of the other claims: 12.0 epochs to the goal" in found[0][1]


def test_a_number_in_the_description_is_refused(
    repository: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim = add_claim(repository, key)
    (claim / "entry.json").write_text(json.dumps({"submitter": "me", "seconds": "1"}))
    assert 'unknown field "seconds"' in objections(repository, capsys)[0][1]


def test_steps_of_the_workflow_annotate_a_forged_archive_and_build_the_site(repository: Path, key: Path) -> None:
    workflow = yaml.safe_load((repository / ".github/workflows/results.yml").read_text())
    steps = {step["name"]: step["run"] for step in workflow["jobs"]["check"]["steps"] if "run" in step}
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            assert len(step.get("uses", "@" + 40 * "0").partition("@")[2].split()[0]) == 40
            assert "${{" not in step.get("run", "")
    claim = add_claim(repository, key)
    build = steps["Build the site"]
    good = run_step(repository, f"{steps['Check all claims']}\n{build}")
    assert good.returncode == 0, good.stderr
    assert (repository / "site/index.html").is_file()
    path = sorted(claim.glob("*.zip"))[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    bad = run_step(repository, steps["Check all claims"])
    assert bad.returncode == 7
    assert f"::error file={CLAIM}/{path.name},title=Refused::" in bad.stdout


def run_step(folder: Path, script: str) -> "subprocess.CompletedProcess[str]":
    """As GitHub's runner runs a step with shell: bash."""
    tools = Path(sys.executable).parent
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "GITHUB_ACTIONS": "true"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_large_archives_have_a_name_that_git_lfs_keeps(
    repository: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "*.lfs.zip filter=lfs" in (repository / ".gitattributes").read_text()
    assert "lfs: true" in (repository / ".github/workflows/results.yml").read_text()
    (repository / "rules/mnist.yaml").write_text("max_megabytes: 0.001\n")
    claim = add_claim(repository, key)
    found = objections(repository, capsys)
    assert len(found) == 3
    assert all("up to 200 if its name ends with .lfs.zip, for git LFS" in message for _, message in found)
    for path in claim.glob("*.zip"):
        path.rename(path.with_suffix(".lfs.zip"))
    assert objections(repository, capsys) == []
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    next(claim.glob("*.lfs.zip")).write_text(pointer)
    assert any("git lfs pull" in message for _, message in objections(repository, capsys))
