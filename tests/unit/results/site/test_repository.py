"""A repository of results: what a new one has, and which claims its rules let in, each with its nearest limit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli import __version__
from mlbench_cli.errors import UsageError
from mlbench_cli.results.archive.pack import pack
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.receipts import archive_digest
from mlbench_cli.results.site.entries import LFS_POINTER
from mlbench_cli.results.site.repository import (
    Objection,
    Rules,
    check_repository,
    format_annotation,
    init_repository,
    read_rules,
)
from tests.unit.results.runs import sealed_run

PLACE = "results/mnist/spec/2025-10-09_demo"
LENIENT = {"repeats": 1, "signed": False}


@pytest.fixture(scope="module")
def zips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Archives by name: three repeats of one setting, and a run that failed."""
    folder = tmp_path_factory.mktemp("zips")
    found = {}
    for number in (1, 2, 3):
        name = f"demo-2-r{number}"
        made = sealed_run(folder / name, name=name, task="mnist", seconds=40.0 + number, seed=number)
        found[name] = folder / f"{name}.zip"
        pack(made, found[name])
    made = sealed_run(folder / "failed", "failed", name="demo-2-r4", task="mnist")
    found["failed"] = folder / "failed.zip"
    pack(made, found["failed"])
    return found


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "repository" / "results").mkdir(parents=True)
    return set_rules(tmp_path / "repository", **LENIENT)


def set_rules(repository: Path, **rules: Any) -> Path:
    (repository / "rules").mkdir(exist_ok=True)
    (repository / "rules" / "default.yaml").write_text(json.dumps(rules))
    return repository


def add_claim(repository: Path, *archives: Path, place: str = PLACE, entry: str | None = "{}") -> Path:
    claim = repository / place
    claim.mkdir(parents=True)
    for path in archives:
        shutil.copyfile(path, claim / path.name)
    if entry is not None:
        (claim / "entry.json").write_text(entry)
    return claim


def check(repository: Path) -> tuple[int, list[tuple[str, str]]]:
    count, found = check_repository(repository, repository.parent / "work")
    return count, [(each.file, each.message) for each in found]


def digest_of(path: Path) -> str:
    with Archive.open(path) as archive:
        return archive_digest(archive)


def withdraw(repository: Path, *digests: str) -> None:
    lines = [{"digest": digest, "date": "2026-01-01", "by": "me", "reason": "wrong clock"} for digest in digests]
    (repository / "withdrawn.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


# --- a new repository -----------------------------------------------------------------------------------------------


def test_a_new_repository_has_a_workflow_rules_and_no_results(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    written = [path.relative_to(folder).as_posix() for path in init_repository(folder)]
    assert sorted(written) == [
        *(".gitattributes", ".github/workflows/results.yml", ".gitignore", "README.md"),
        *("allowed_signers", "rules/default.yaml", "withdrawn.jsonl"),
    ]
    assert [path.name for path in (folder / "results").iterdir()] == [".gitkeep"]
    workflow = (folder / ".github/workflows/results.yml").read_text()
    assert f"mlbench-cli=={__version__}" in workflow
    assert "@VERSION@" not in workflow
    assert "@PYODIDE@" not in workflow
    assert read_rules(folder, "mnist") == Rules()  # its comments describe what holds without it
    assert check(folder) == (0, [])


def test_a_folder_with_nothing_but_git_becomes_a_repository(tmp_path: Path) -> None:
    (tmp_path / "cloned" / ".git").mkdir(parents=True)
    assert init_repository(tmp_path / "cloned")
    (tmp_path / "empty").mkdir()
    assert init_repository(tmp_path / "empty")


def test_nothing_is_written_into_a_folder_in_use(tmp_path: Path) -> None:
    folder, file = tmp_path / "used", tmp_path / "file"
    folder.mkdir()
    (folder / "notes").touch()
    (folder / ".git").mkdir()
    file.touch()
    for path in (folder, file):
        with pytest.raises(UsageError, match="exists and is not empty") as caught:
            init_repository(path)
        assert caught.value.hint == "Give the name of a new folder."
    assert sorted(path.name for path in folder.iterdir()) == [".git", "notes"]


# --- the layout -----------------------------------------------------------------------------------------------------


def test_a_folder_without_results_is_no_repository(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a results repository") as caught:
        check_repository(tmp_path, tmp_path / "work")
    assert caught.value.hint == f"mlbench site init {tmp_path}"


def test_a_lenient_repository_accepts_one_unsigned_run(repository: Path, zips: dict[str, Path]) -> None:
    add_claim(repository, zips["demo-2-r1"])
    assert check(repository) == (1, [])
    assert not (repository.parent / "work" / "archives").exists()  # copies are removed


def test_files_without_an_archive_belong_to_no_claim(repository: Path) -> None:
    (repository / "results" / "mnist").mkdir()
    for name in ("mnist/.gitkeep", "note.txt", "mnist/entry.json"):
        (repository / "results" / name).write_text("{}")
    reason = "it belongs to no claim: there is no archive next to it"
    assert check(repository) == (0, [("results/mnist/entry.json", reason), ("results/note.txt", reason)])


@pytest.mark.parametrize(
    "place",
    [
        *("results/mnist/2025-10-09_demo", "results/mnist/spec/more/2025-10-09_demo", "results/mnist/spec/demo"),
        *("results/mnist/spec/2025-10-9_demo", "results/mnist/spec/2025-10-09-demo", "results/mnist/spec/2025-10-09_"),
        *("results/mnist/spec/2025-10-09_Demo", f"results/mnist/spec/2025-10-09_{'a' * 62}"),
        "results/mnist/spec/2025-10-09_.demo",
    ],
)
def test_a_claim_lies_in_a_folder_of_its_task_preset_and_date(
    repository: Path, zips: dict[str, Path], place: str
) -> None:
    add_claim(repository, zips["demo-2-r1"], place=place)
    assert check(repository) == (1, [(place, "a claim's folder is results/TASK/PRESET/YYYY-MM-DD_NAME")])


def test_a_name_of_a_claim_may_have_61_characters(repository: Path, zips: dict[str, Path]) -> None:
    add_claim(repository, zips["demo-2-r1"], place=f"results/mnist/spec/2025-10-09_{'a' * 61}")
    add_claim(repository, zips["demo-2-r2"], place="results/mnist/spec/2025-10-09_1-a.b_c")
    count, found = check(repository)
    assert count == 2
    assert [message for _, message in found] == ["demo-2-r1 is missing: a claim includes all repeats, even failed ones"]


@pytest.mark.parametrize(
    ("task", "preset", "words"),
    [
        ("mnist", "tiny", "it is mnist (spec), not mnist (tiny)"),
        ("digits", "spec", "it is mnist (spec), not digits (spec)"),
    ],
)
def test_a_claim_is_of_the_task_and_preset_of_its_folder(
    repository: Path, zips: dict[str, Path], task: str, preset: str, words: str
) -> None:
    place = f"results/{task}/{preset}/2025-10-09_demo"
    add_claim(repository, zips["demo-2-r1"], place=place)
    assert check(repository) == (1, [(f"{place}/demo-2-r1.zip", words)])


# --- archives -------------------------------------------------------------------------------------------------------


def test_an_archive_that_does_not_verify_is_no_run_of_its_claim(repository: Path, zips: dict[str, Path]) -> None:
    claim = add_claim(repository, zips["demo-2-r1"])
    (claim / "demo-2-r2.zip").write_bytes(b"no zip")
    (claim / "demo-2-r3.zip").write_bytes(LFS_POINTER + b"v1")
    set_rules(repository, **{**LENIENT, "repeats": 2})
    (_, broken), (_, pointer), few = check(repository)[1]
    assert broken
    assert "it is a pointer of git LFS, not the archive: git lfs pull" in pointer
    assert few == (PLACE, "1 successful runs; mnist needs 2")


def test_a_claim_says_who_submits_it(repository: Path, zips: dict[str, Path]) -> None:
    add_claim(repository, zips["demo-2-r1"], entry=None)
    words = "entry.json is missing; it says who submits the claim, and on what hardware"
    assert check(repository) == (1, [(PLACE, words)])


def test_a_description_with_figures_is_an_objection_to_each_archive(repository: Path, zips: dict[str, Path]) -> None:
    add_claim(repository, zips["demo-2-r1"], entry='{"seconds": "1"}')
    (file, message), few = check(repository)[1]
    assert file == f"{PLACE}/demo-2-r1.zip"
    assert 'unknown field "seconds"' in message
    assert few == (PLACE, "0 successful runs; mnist needs 1")


def test_a_run_belongs_to_one_claim(repository: Path, zips: dict[str, Path]) -> None:
    add_claim(repository, zips["demo-2-r1"])
    again = "results/mnist/spec/2025-10-10_again"
    add_claim(repository, zips["demo-2-r1"], place=again)
    assert check(repository) == (2, [(f"{again}/demo-2-r1.zip", f"it is also a run of {PLACE}")])


@pytest.mark.parametrize(("repeats", "is_enough"), [(0, True), (2, True), (3, False)])
def test_a_claim_needs_its_tasks_number_of_successful_runs(
    repository: Path, zips: dict[str, Path], repeats: int, is_enough: bool
) -> None:
    """A run that failed belongs to the claim and does not count."""
    set_rules(repository, **{**LENIENT, "repeats": repeats})
    add_claim(repository, zips["demo-2-r1"], zips["demo-2-r2"], zips["failed"])
    few = [] if is_enough else [(PLACE, f"2 successful runs; mnist needs {repeats}")]
    hole = (PLACE, "demo-2-r3 is missing: a claim includes all repeats, even failed ones")
    assert check(repository) == (1, [hole, *few])


def test_the_first_five_missing_repeats_are_named(repository: Path, tmp_path: Path) -> None:
    made = sealed_run(tmp_path / "run", name="demo-2-r8", task="mnist")
    pack(made, tmp_path / "last.zip")
    add_claim(repository, tmp_path / "last.zip")
    found = [message.partition(" is missing")[0] for _, message in check(repository)[1]]
    assert found == [f"demo-2-r{number}" for number in range(1, 6)]


# --- rules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "name"), [("max_megabytes", "a.zip"), ("max_lfs_megabytes", "a.lfs.zip")])
def test_an_archive_may_be_just_as_large_as_allowed(
    repository: Path, zips: dict[str, Path], rule: str, name: str
) -> None:
    claim = add_claim(repository, zips["demo-2-r1"])
    (claim / "demo-2-r1.zip").rename(claim / name)
    size = zips["demo-2-r1"].stat().st_size
    set_rules(repository, **LENIENT, **{rule: size / 1e6})
    assert check(repository) == (1, [])
    set_rules(repository, **LENIENT, **{rule: (size - 1) / 1e6})
    [(file, message)] = check(repository)[1]
    assert file == f"{PLACE}/{name}"
    assert message.startswith(f"it has 0.0 MB; at most {(size - 1) / 1e6:g} are allowed")
    more = "; up to 200 if its name ends with .lfs.zip, for git LFS"
    assert message.endswith(more) == (name == "a.zip")


@pytest.mark.parametrize(
    ("rules", "objections"),
    [
        ({"signed": True}, ["it is not signed by anyone in allowed_signers: not signed"]),
        ({"divisions": ["open"]}, []),
        ({"divisions": ["closed", "open"]}, []),
        ({"divisions": ["closed", "none"]}, ["it is in the division open; allowed: closed, none"]),
        ({"divisions": []}, []),
        ({"synthetic": True, "functional": True}, []),
    ],
)
def test_a_rule_refuses_what_it_names(
    repository: Path, zips: dict[str, Path], rules: dict[str, Any], objections: list[str]
) -> None:
    set_rules(repository, **{**LENIENT, **rules})
    add_claim(repository, zips["demo-2-r1"])
    assert check(repository) == (1, [(f"{PLACE}/demo-2-r1.zip", message) for message in objections])


@pytest.mark.parametrize(
    ("change", "rule", "words"),
    [
        ({"synthetic": True}, "synthetic", "its data are synthetic"),
        ({"functional_only": "one node"}, "functional", "it is functional, not a performance measurement"),
    ],
)
def test_generated_data_and_functional_runs_need_a_rule_that_allows_them(
    repository: Path, tmp_path: Path, change: dict[str, Any], rule: str, words: str
) -> None:
    pack(sealed_run(tmp_path / "run", name="demo-2", task="mnist", **change), tmp_path / "demo.zip")
    add_claim(repository, tmp_path / "demo.zip")
    assert check(repository) == (1, [(f"{PLACE}/demo.zip", words)])
    set_rules(repository, **LENIENT, **{rule: True})
    assert check(repository) == (1, [])


@pytest.mark.parametrize("text", ["", "null", "# nothing\n"])
def test_an_empty_file_of_rules_changes_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules/default.yaml").write_text("repeats: 4")
    (tmp_path / "rules/mnist.yaml").write_text(text)
    assert read_rules(tmp_path, "mnist") == Rules(repeats=4)


def test_rules_of_a_task_win_over_those_of_all_tasks(tmp_path: Path) -> None:
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules/default.yaml").write_text("{repeats: 4, synthetic: true, max_megabytes: 0, divisions: []}")
    (tmp_path / "rules/mnist.yaml").write_text("{repeats: 0, max_lfs_megabytes: 2.5, divisions: [closed, open]}")
    assert read_rules(tmp_path, "digits") == Rules(repeats=4, synthetic=True, max_megabytes=0)
    assert read_rules(tmp_path, "mnist") == Rules(
        repeats=0, synthetic=True, max_megabytes=0, max_lfs_megabytes=2.5, divisions=("closed", "open")
    )


@pytest.mark.parametrize("text", ["synthetic: 0", "functional: 'no'", "max_megabytes: -0.1", "max_megabytes: false"])
def test_a_rule_with_a_value_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules/default.yaml").write_text(text)
    with pytest.raises(UsageError, match=f"{text.partition(':')[0]} cannot be"):
        read_rules(tmp_path, "mnist")


# --- withdrawals ----------------------------------------------------------------------------------------------------


def test_a_claim_is_withdrawn_as_a_whole_or_not_at_all(repository: Path, zips: dict[str, Path]) -> None:
    add_claim(repository, zips["demo-2-r1"], zips["demo-2-r2"])
    digests = [digest_of(zips[f"demo-2-r{number}"]) for number in (1, 2)]
    withdraw(repository, *digests)
    assert check(repository) == (1, [])
    withdraw(repository, digests[1])
    words = f"it withdraws 1 of the 2 runs of {PLACE}: a claim must be withdrawn as a whole"
    assert check(repository) == (1, [("withdrawn.jsonl", words)])


def test_a_withdrawal_names_an_archive_that_is_there(repository: Path, zips: dict[str, Path]) -> None:
    add_claim(repository, zips["demo-2-r1"])
    withdraw(repository, digest_of(zips["demo-2-r1"]), "b" * 64, "a" * 64)
    assert check(repository)[1] == [
        ("withdrawn.jsonl", f"no archive here has the digest {letter * 16}...") for letter in "ab"
    ]


# --- GitHub ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "message", "line"),
    [
        ("results/a.zip", "it is bad", "::error file=results/a.zip,title=Refused::it is bad"),
        ("a:b,c", "x: y, z", "::error file=a%3Ab%2Cc,title=Refused::x: y, z"),
        ("a%\nb", "50 %\r\n::warning::x", "::error file=a%25%0Ab,title=Refused::50 %25%0D%0A::warning::x"),
    ],
)
def test_an_annotation_is_escaped_as_by_the_toolkit_of_actions(file: str, message: str, line: str) -> None:
    """actions/toolkit, command.ts: escapeData and escapeProperty."""
    assert format_annotation(Objection(file, message)) == line
