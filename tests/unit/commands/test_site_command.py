"""`site`: what its commands print of a site that is built, of a new repository, and of one that is checked."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.commands.site import build, check, init
from mlbench_cli.console import Format
from mlbench_cli.results.site import build as builder
from mlbench_cli.results.site import repository
from mlbench_cli.results.site.build import SiteOptions, SiteSummary
from mlbench_cli.results.site.entries import Refusal
from mlbench_cli.results.site.repository import Objection

Captured = pytest.CaptureFixture[str]
SUMMARY = SiteSummary(
    claims=2,
    archives=1,
    bytes=3 << 20,
    largest_page=1536,
    receipts=1,
    refused=[Refusal("a.zip", "unproven", "It does not follow.")],
    disclosed={"hosts": {"m2", "m1"}, "users": {"eva\nroot"}},
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a site is built from; its numbers are those of SUMMARY."""
    seen: list[Any] = []

    def build_site(folders: Any, target: Path, options: SiteOptions, *, notice: Any) -> SiteSummary:
        seen.append((folders, target, options))
        return SUMMARY

    monkeypatch.setattr(builder, "build_site", build_site)
    return seen


def test_a_site_that_is_built_says_what_it_has_and_discloses(asked: list[Any], capsys: Captured) -> None:
    build([Path("a"), Path("b")])
    assert asked == [([Path("a"), Path("b")], Path("site"), SiteOptions())]
    printed = capsys.readouterr()
    assert printed.out == "site/index.html\n"
    assert printed.err.splitlines() == [
        "Warning: left out: a.zip: It does not follow.",
        "2 results from 1 archive (3.0 MiB), 1 receipt; largest page 1.5 KiB",
        "The archives publish the following (mlbench download NAME --anonymous omits it):",
        "  hosts: m1, m2",
        "  users: eva root",
        "Next: python -m http.server --directory site",
    ]


def test_a_site_as_a_document(
    asked: list[Any], capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    build(
        *([Path("a")], Path("out"), "A title", "https://x.example", Path("signers"), Path("p.tgz"), 0.5, True),
        Format.json,
    )
    options = SiteOptions("A title", "https://x.example", Path("signers"), Path("p.tgz"), 0.5, True)
    assert asked == [([Path("a")], Path("out"), options)]
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "schema_version": 1,
        "site": str(tmp_path / "out"),
        "results": 2,
        "archives": 1,
        "receipts": 1,
        "bytes_of_archives": 3 << 20,
        "largest_page_bytes": 1536,
        "refused": [{"source": "a.zip", "code": "unproven", "message": "It does not follow."}],
        "disclosed": {"hosts": 2, "users": 1},
    }
    assert printed.err == "Warning: left out: a.zip: It does not follow.\n"


def test_a_site_that_discloses_nothing_does_not_say_so(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(builder, "build_site", lambda *_, **__: SiteSummary(claims=1, archives=2))
    build([Path("a")])
    assert capsys.readouterr().err.splitlines() == [
        "1 result from 2 archives (0 B), 0 receipts; largest page 0 B",
        "Next: python -m http.server --directory site",
    ]


def test_a_new_repository_lists_its_files_and_the_next_step(tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "results"
    init(folder)
    printed = capsys.readouterr()
    files = {str(path) for path in folder.rglob("*") if path.is_file() and path.name != ".gitkeep"}
    assert set(printed.out.splitlines()) == files
    assert printed.err == f"Next: git init {folder}, then follow {folder / 'README.md'}\n"
    assert str(folder / "README.md") in files


@pytest.mark.parametrize(
    ("objections", "on_github", "code", "out", "err"),
    [
        ([], False, 0, "2 claims, no objections\n", ""),
        ([], True, 0, "2 claims, no objections\n", ""),
        ([Objection("a/b", "It is old.")], False, 7, "", "Warning: a/b: It is old.\n"),
        (
            [Objection("a/b", "It is old.")],
            True,
            7,
            "::error file=a/b,title=Refused::It is old.\n",
            "Warning: a/b: It is old.\n",
        ),
    ],
)
def test_objections_are_warnings_and_annotations(
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    objections: list[Objection],
    on_github: bool,
    code: int,
    out: str,
    err: str,
) -> None:
    works: list[Path] = []

    def check_repository(folder: Path, work: Path) -> tuple[int, list[Objection]]:
        assert (folder, work.is_dir()) == (Path(), True)
        works.append(work)
        return 2, objections

    monkeypatch.setattr(repository, "check_repository", check_repository)
    monkeypatch.setenv("GITHUB_ACTIONS", "true" if on_github else "")
    assert check() == code
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (out, err)
    assert not works[0].exists()
    assert check(output=Format.json) == code
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1,
        "claims": 2,
        "objections": [each._asdict() for each in objections],
    }
