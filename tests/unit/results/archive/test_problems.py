"""What verification says about an archive: each problem with its file and values, in order, and what is only noted."""

import io
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli import __version__
from mlbench_cli.errors import DamagedArchive, NotFoundError, UnprovenArchive
from mlbench_cli.results.archive import layout
from mlbench_cli.results.archive import verify as verification
from mlbench_cli.results.archive.reader import UNPROVEN
from mlbench_cli.results.archive.schema import brief, validate
from mlbench_cli.results.archive.verify import (
    Problem,
    Verification,
    find_problems,
    open_verified,
    verify,
    verify_zip,
)
from mlbench_cli.util.json_text import format_parsed
from tests.unit.results.archive.test_verify import _set, contents, edit, golden, reseal
from tests.unit.results.runs import new_run, sealed_run


def check(data: bytes) -> Verification:
    return verify_zip(io.BytesIO(data), "demo.zip")


def said(data: bytes) -> list[str]:
    return [str(problem) for problem in check(data).problems]


def change(*edits: tuple[str, Callable[[dict[str, Any]], Any]], **files: bytes) -> bytes:
    """The golden archive with several documents changed, and everything else right."""
    for name, apply in edits:
        document = json.loads(contents()[name])
        apply(document)
        files[name] = format_parsed(document)
    return reseal(**files)


# --- problems ---------------------------------------------------------------------------------------------------------


def test_a_problem_is_a_sentence_and_a_document() -> None:
    problem = Problem("changed", "run.json", "it is not what was sealed")
    assert str(problem) == "run.json: it is not what was sealed"
    assert problem.to_dict() == {"code": "changed", "file": "run.json", "message": "it is not what was sealed"}
    assert (
        str(Problem("not_an_archive", "", "it is neither a folder nor a file")) == "it is neither a folder nor a file"
    )


@pytest.mark.parametrize(
    ("found", "ok"),
    [
        (Verification(()), True),
        (Verification((), (), ("a note",)), True),
        (Verification((), ("a doubt",)), False),
        (Verification((Problem("changed", "x", "y"),)), False),
    ],
)
def test_an_archive_is_right_without_problems_and_doubts(found: Verification, ok: bool) -> None:
    assert found.ok is ok


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("exit_code", 7, "exit_code is 7, but the evidence gives 0"),
        ("goal.threshold", 70.0, "goal.threshold is 70.0, but the evidence gives 80.0"),
        ("worker_states", [], None),
        ("more", 1, "more does not follow from the evidence"),
        ("goal.more", None, "goal.more does not follow from the evidence"),
        ("details", {}, "details.best is missing"),
        ("details.best", {"a": 1}, "details.best is {'a': 1}, but the evidence gives 80.5"),
        ("goal", None, None),
    ],
)
def test_a_field_that_differs_is_named_with_both_values(path: str, value: Any, message: str | None) -> None:
    (found,) = said(edit("result.json", _set(path, value)))
    if message is None:
        assert found.startswith(f"result.json: {path} is {value}, but the evidence gives ")
    else:
        assert found == f"result.json: {message}"


def test_fields_in_lists_are_named_by_their_index() -> None:
    def move(document: dict[str, Any]) -> None:
        document["worker_states"][1]["node"] = "elsewhere"
        document["worker_states"][0]["restarts"] = 2

    assert {problem.code for problem in check(edit("result.json", move)).problems} == {"inconsistent"}
    assert said(edit("result.json", move)) == [
        "result.json: worker_states[0].restarts is 2, but the evidence gives 0",
        "result.json: worker_states[1].node is 'elsewhere', but the evidence gives 'this-host'",
    ]


def test_several_fields_are_named_in_alphabetical_order() -> None:
    found = said(change(("result.json", lambda document: document.update(workers=64, backend="nccl", updates=1))))
    assert [text.split(" ")[1] for text in found] == ["backend", "updates", "workers"]


@pytest.mark.parametrize(("sealed", "claimed"), [(True, 1), (1, True), (False, 0), (0.0, False)])
def test_a_boolean_is_no_number(tmp_path: Path, sealed: Any, claimed: Any) -> None:
    """In Python True == 1, but other readers of the document tell them apart."""
    folder = sealed_run(tmp_path / "a", details={"x": sealed})
    document = json.loads((folder / "result.json").read_bytes())
    assert verify(folder).ok
    document["details"]["x"] = claimed
    (folder / "result.json").write_bytes(format_parsed(document))
    (folder / "SHA256SUMS").unlink()
    layout.write_sums(folder)
    assert [str(problem) for problem in verify(folder).problems] == [
        f"result.json: details.x is {claimed}, but the evidence gives {sealed}"
    ]


def test_long_values_are_shown_in_part() -> None:
    (found,) = said(edit("result.json", _set("data", "x" * 200)))
    assert found == f"result.json: data is '{'x' * 76}..., but the evidence gives 'digits'"


@pytest.mark.parametrize(("length", "shown"), [(78, f"'{'x' * 78}'"), (79, f"'{'x' * 76}..."), (0, "''")])
def test_a_value_is_cut_beyond_eighty_characters(length: int, shown: str) -> None:
    assert brief("x" * length) == shown
    assert len(shown) <= 80


def test_an_official_line_that_does_not_follow_is_found() -> None:
    (found,) = said(reseal(**{"official_result.txt": b"80% reached in 0.001 seconds\n"}))
    assert found == "official_result.txt: it does not follow from the evidence"


def test_a_line_of_metrics_is_named_by_its_number() -> None:
    lines = contents()["metrics.jsonl"].splitlines(keepends=True)
    for number, wrong in enumerate(([b"{}\n", *lines[1:]], [lines[0], *lines[2:]], lines[:-1]), 1):
        number = len(lines) if len(wrong) == len(lines) - 1 and number == 3 else number
        (found,) = said(reseal(**{"metrics.jsonl": b"".join(wrong)}))
        assert found == f"metrics.jsonl: line {number} does not follow from the logs"
    (found,) = said(reseal(**{"metrics.jsonl": b"".join([*lines, b"{}\n"])}))
    assert found == f"metrics.jsonl: line {len(lines) + 1} does not follow from the logs"


def test_a_line_of_samples_is_named_by_its_number() -> None:
    rows = b'{"rank":0,"kind":"x"}\n'
    assert said(reseal(**{"resources.jsonl": rows * 2})) == []
    (found,) = said(reseal(**{"resources.jsonl": rows + rows.replace(b":0", b": 0") + rows.replace(b":0", b":  0")}))
    assert found == "resources.jsonl: line 2 is not formatted as a row"
    (found,) = said(reseal(**{"resources.jsonl": rows * 2 + b"[]\n"}))
    assert found == "resources.jsonl: line 3: it is not a JSON object"
    block = b'{"kind":"samples","rank":0,"time":{"decimals":3,"steps":[-5]}}\n'
    (found,) = said(reseal(**{"resources.jsonl": rows + block}))
    assert found == "resources.jsonl: line 2: a block of samples without times"


def test_samples_are_checked_even_if_nobody_reads_them() -> None:
    """A run that has not ended is not judged, and neither is a document that violates its schema."""
    wrong = {"resources.jsonl": b"[]\n"}
    assert said(change(("result.json", _set("workers", -1)), **wrong)) == [
        'result.json: "workers" is -1, which it cannot be',
        "resources.jsonl: line 1: it is not a JSON object",
    ]


def provenance(version: str) -> dict[str, Any]:
    return {"mlbench": version, "python": "3.12", "command_line": []}


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("spec_hash", "0" * 16, ["spec_hash is not the hash of spec"]),
        ("provenance", provenance(__version__), []),
        ("provenance", provenance("0.1"), ["mlbench is not '0.1', as its provenance says"]),
        ("provenance", {**provenance(__version__), "python": 3}, ['provenance: "python" is not a text']),
        ("task", {"spec": 1, "preset": {}}, ["it cannot be judged: a preset is not an object"]),
    ],
)
def test_a_record_that_contradicts_itself_is_found(field: str, value: Any, found: list[str]) -> None:
    assert said(edit("run.json", _set(field, value))) == [f"run.json: {text}" for text in found]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("README.html", "an archive has no such file"),
        ("logs/rank-2.log", "the run has no rank 2"),
        ("output/rank-0/a:b", "Windows does not allow this file name"),
        ("output/rank-0/\u202ex", "the name contains a control or bidirectional character"),
    ],
)
def test_a_file_that_does_not_belong_is_named_with_the_reason(name: str, message: str) -> None:
    shown = "output/rank-0/\\u202ex" if "\u202e" in name else name
    assert f"{shown}: {message}" in said(reseal(**{name: b""}))


def test_a_log_of_the_last_rank_belongs_to_the_run() -> None:
    assert "logs/rank-1.log" in contents()
    assert not [text for text in said(reseal(**{"logs/rank-1.log": b"x\n"})) if "has no rank" in text]


def test_names_that_collide_name_each_other() -> None:
    data = reseal(**{"output/rank-0/a": b"", "output/rank-0/A": b""})
    assert said(data) == ["output/rank-0/a: on some systems it is the same as output/rank-0/A"]


def test_a_document_in_another_form_is_found() -> None:
    text = contents()["findings.json"]
    assert said(reseal(**{"findings.json": text.replace(b"\n", b"")})) == [
        "findings.json: it is not formatted the way documents are written"
    ]


def test_documents_of_a_network_need_one() -> None:
    summary: dict[str, Any] = {
        "asked": None,
        "method": "none",
        "networks": 1,
        "held": None,
        "problems": [],
        **dict.fromkeys(("rtt_seconds", "alone_bits_per_second", "together_bits_per_second", "first_bits_per_second")),
    }
    network: dict[str, Any] = {
        "schema_version": 1,
        "asked": None,
        "method": "none",
        "probes": [],
        "traffic": None,
        "summary": summary,
    }
    assert said(reseal(**{"network.json": format_parsed(network)})) == [
        "network.json: it does not follow from the evidence"
    ]


# --- what cannot be derived -------------------------------------------------------------------------------------------

RULES: Mapping[str, Any] = {
    "name": "unknown-task",
    "image": "x",
    "command": [],
    "goal": None,
    "free": [],
    "spec": {},
    "preset": {},
}


@pytest.mark.parametrize(
    ("version", "origin", "problem", "doubt"),
    [
        (
            __version__,
            None,
            f'"task" is not what mlbench {__version__} says of unknown-task',
            None,
        ),
        (
            "0.1",
            None,
            None,
            "run.json gives the rules of unknown-task in mlbench 0.1; those of this mlbench are different.",
        ),
        (
            __version__,
            "their-package",
            None,
            "The rules of unknown-task, a task of their-package, cannot be compared: this mlbench does not have it.",
        ),
    ],
)
def test_rules_that_this_version_does_not_have_are_a_problem_only_of_its_own_archives(
    version: str, origin: str | None, problem: str | None, doubt: str | None
) -> None:
    rules = {**RULES, **({} if origin is None else {"origin": origin})}
    found = check(change(("run.json", lambda document: document.update(task=rules, mlbench=version))))
    about_rules = [each.message for each in found.problems if '"task"' in each.message]
    assert about_rules == ([] if problem is None else [problem])
    assert found.not_derived == (() if doubt is None else (doubt,))


@pytest.mark.parametrize(
    ("judge", "sentence"),
    [
        (4, "version 4 of the rules, but this mlbench knows only 2 to 3: only checksums and schemas were checked."),
        (1, "version 1 of the rules, but this mlbench knows only 2 to 3: only checksums and schemas were checked."),
        (None, "version 1 of the rules, but this mlbench knows only 2 to 3: only checksums and schemas were checked."),
    ],
)
def test_documents_of_an_unknown_judge_are_not_derived_but_checked(judge: int | None, sentence: str) -> None:
    def claim(document: dict[str, Any]) -> None:
        document["exit_code"] = 7  # nobody can tell
        del document["judge"]
        if judge is not None:
            document["judge"] = judge

    found = check(change(("result.json", claim)))
    upgrade = " Upgrade mlbench." if judge == 4 else ""
    assert found.not_derived == (f"The documents were judged by {sentence}{upgrade}",)
    assert found.problems == ()
    assert not found.ok
    assert check(change(("result.json", claim), ("run.json", _set("spec_hash", "x")))).problems != ()


@pytest.mark.parametrize(
    ("values", "plain", "compensated"),
    [
        ([1.0, 1e100, 1.0, -1e100], 0.0, 2.0),  # Neumaier's example
        ([0.1] * 10, 0.9999999999999999, 1.0),
        ([1e16, 1.0, 1.0], 1e16, 1.0000000000000002e16),
        ([1.0, 1e16, -1e16], 0.0, 1.0),
        ([-1.0, -1e16, 1e16], 0.0, -1.0),
        ([], 0.0, 0.0),
    ],
)
def test_older_lines_have_the_sums_of_either_python(values: list[float], plain: float, compensated: float) -> None:
    """`sum` compensates for rounding since Python 3.12 (Neumaier, ZAMM 54 (1974))."""
    assert verification._add_plainly(values) == plain
    assert verification._add_compensated(values) == compensated


def test_archives_of_the_second_judge_are_noted() -> None:
    path = Path(__file__).parent / "golden" / "judge-2-python-3.13.zip"
    found = verify(path)
    assert found.ok
    (note,) = found.notes
    assert note.startswith("It was judged by version 2 of the rules, which did not check for contradictions")
    assert verify(path.with_name("judge-3.zip")).notes == ()


# --- folders ----------------------------------------------------------------------------------------------------------


def test_links_and_devices_are_told_apart(tmp_path: Path) -> None:
    folder = sealed_run(tmp_path / "run")
    (folder / "manifests").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe\x1b")
    assert [(problem.code, str(problem)) for problem in find_problems(folder)] == [
        ("link", "manifests: it is a symbolic link"),
        ("special", "pipe\\x1b: it is no regular file"),
    ]


def test_an_unsealed_folder_says_why(tmp_path: Path) -> None:
    run = new_run(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "photo.jpg").touch()
    unfinished, foreign = verify(run.folder).problems[0], verify(tmp_path / "b").problems[0]
    assert (unfinished.code, str(unfinished)) == (
        "unsealed",
        "SHA256SUMS: there is no SHA256SUMS: the run has not finished, or its results have not been fetched",
    )
    assert (foreign.code, str(foreign)) == (
        "not_an_archive",
        "SHA256SUMS: there is no SHA256SUMS: it is not an mlbench archive",
    )
    (tmp_path / "b" / "run.json").touch()
    assert verify(tmp_path / "b").problems[0].code == "unsealed"


def test_files_are_checked_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = sealed_run(tmp_path / "run")
    (folder / "output").mkdir()
    (folder / "output" / "a\x1b").touch()
    (folder / "logs" / "rank-0.log").unlink()
    (folder / "result.json").write_text("{}")
    assert [str(problem) for problem in find_problems(folder)] == [
        "logs/rank-0.log: it is missing",
        "output/a\\x1b: it is not listed in SHA256SUMS",
        "result.json: it is not what was sealed: its SHA-256 differs",
    ]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sealed_run(tmp_path / "run")

    def fail(file: object) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(layout, "digest", fail)
    found = find_problems(folder)
    assert {problem.code for problem in found} == {"unreadable"}
    assert str(found[0]) == "environment.json: it cannot be read: Input/output error"


def test_a_signature_that_is_none_is_a_problem_and_ends_the_check(tmp_path: Path) -> None:
    folder = sealed_run(tmp_path / "run")
    (folder / "SHA256SUMS.sig").write_text("x")
    assert [problem.to_dict() for problem in find_problems(folder)] == [
        {"code": "signature", "file": "SHA256SUMS.sig", "message": "it is not an OpenSSH signature"}
    ]


def test_what_is_neither_a_folder_nor_a_file_is_said(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert [str(problem) for problem in find_problems(tmp_path / "pipe")] == ["it is neither a folder nor a file"]
    with pytest.raises(NotFoundError, match="There is no archive") as caught:
        verify(tmp_path / "nothing")
    assert caught.value.hint == "mlbench status, then: mlbench download NAME"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (FileNotFoundError(2, "No such file", "other"), "missing", "other disappeared during the check"),
        (
            PermissionError(13, "Permission denied", "run.json"),
            "unreadable",
            "run.json cannot be read: Permission denied",
        ),
        (OSError("odd"), "unreadable", "PATH cannot be read: odd"),
    ],
)
def test_an_error_during_the_check_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, code: str, message: str
) -> None:
    def fail(path: Path) -> None:
        raise error

    monkeypatch.setattr(verification, "_folder_problems", fail)
    (found,) = find_problems(tmp_path)
    assert (found.code, found.file, found.message) == (code, "", message.replace("PATH", str(tmp_path)))


@pytest.mark.parametrize(("count", "listed"), [(2, 2), (3, 4), (4, 4)])
def test_the_search_stops_after_many_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, listed: int
) -> None:
    folder = sealed_run(tmp_path / "run")
    (folder / "output").mkdir()
    for number in range(count):
        (folder / "output" / str(number)).touch()
    monkeypatch.setattr(verification, "MAX_PROBLEMS", 3)
    found = find_problems(folder)
    assert len(found) == listed
    if count >= 3:
        assert (found[-1].code, str(found[-1])) == ("extra", "more than 3 problems; stopped here")


# --- opening ----------------------------------------------------------------------------------------------------------


def test_only_verified_archives_are_opened(tmp_path: Path) -> None:
    folder = sealed_run(tmp_path / "run", name="demo-2")
    with open_verified(folder) as archive:
        assert (archive.has_checked_samples, archive.not_derived, archive.run["name"]) == (True, (), "demo-2")
    (folder / "result.json").write_text("{}")
    with pytest.raises(DamagedArchive) as caught:
        open_verified(folder)
    assert (caught.value.file, caught.value.problem) == ("result.json", "changed")
    assert caught.value.plain == "it is not what was sealed: its SHA-256 differs"


def test_an_archive_that_is_not_derived_is_opened_only_on_request_and_marked(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(edit("result.json", _set("judge", 4)))
    with pytest.raises(UnprovenArchive, match="judged by version 4") as caught:
        open_verified(path)
    assert len(caught.value.details["not_derived"]) == 1
    with open_verified(path, unproven=True) as archive:
        assert archive.run["name"] == f"run-2 {UNPROVEN}"
        assert archive.not_derived == tuple(caught.value.details["not_derived"])
    path.write_bytes(golden()[:-1])
    with pytest.raises(DamagedArchive):
        open_verified(path, unproven=True)


def test_text_of_an_opened_archive_cannot_move_the_cursor(tmp_path: Path) -> None:
    folder = sealed_run(tmp_path / "run", details={"x": "a\x1b[2J"})
    with open_verified(folder) as archive:
        assert archive.result["details"] == {"x": "a\\x1b[2J"}


# --- schemas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "schema", "found"),
    [
        (0, {"type": "integer", "minimum": 0}, []),
        (-0.5, {"type": "number", "minimum": 0}, ["the document is -0.5, which it cannot be"]),
        (1.0, {"type": "integer"}, ["the document is 1.0, which it cannot be"]),
        (True, {"type": "number"}, ["the document is True, which it cannot be"]),
        (1, {"type": "boolean"}, ["the document is 1, which it cannot be"]),
        (None, {"type": ["integer", "null"], "minimum": 0}, []),
        (None, {"type": "integer"}, ["the document is None, which it cannot be"]),
        ("a", {"type": "string", "enum": ["b"]}, ["the document is 'a', which it cannot be"]),
        ("2026-01-01T00:00:00Z", {"type": "string", "format": "date-time"}, []),
        (
            "2026-01-01T00:00:00+00:00",
            {"type": "string", "format": "date-time"},
            ["the document is '2026-01-01T00:00:00+00:00', not a time as RFC 3339"],
        ),
        ([], {"type": "object"}, ["the document is [], which it cannot be"]),
        ({}, {"type": "array"}, ["the document is {}, which it cannot be"]),
        ({"a": {"b": 1}}, {"type": "object", "additionalProperties": {"type": "string"}}, None),
        (
            {"a": {"b": [{}, {"c": 1}]}},
            {
                "type": "object",
                "properties": {
                    "a": {
                        "type": "object",
                        "properties": {"b": {"type": "array", "items": {"type": "object", "required": ["c"]}}},
                        "required": ["b", "d"],
                    }
                },
            },
            ['"a.d" is missing', '"a.b[0].c" is missing'],
        ),
        (
            {"a": 1, "b": "x", "c": 2},
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "additionalProperties": {"type": "string"},
            },
            ['"c" is 2, which it cannot be'],
        ),
    ],
)
def test_a_violation_names_the_field_and_its_value(value: Any, schema: dict[str, Any], found: list[str] | None) -> None:
    expected = ["\"a\" is {'b': 1}, which it cannot be"] if found is None else found
    assert list(validate(value, schema)) == expected
