"""The check of words: what it finds, what it lets pass, and that its limits only fall."""

import ast
import json
from pathlib import Path

import pytest

from tools import check_words
from tools.check_words import Finding, find_excesses, find_in_text, lower_limits


def kinds(text: str, path: str = "folder/file.py") -> list[str]:
    return [finding.kind for finding in find_in_text(path, text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def told() -> None: ...", ["word", "participle"]),
        ("def _rendered() -> None: ...", ["participle"]),
        ("async def held() -> None: ...", ["participle"]),
        ("def find_helm() -> None: ...", []),
        ("def feed() -> None: ...", []),
        ("class A:\n    @property\n    def failed(self) -> bool: ...", []),
        ("class A:\n    @functools.cached_property\n    def failed(self) -> bool: ...", []),
        ('"""None where it has none."""', ["where"]),
        ("where = 1", []),  # a name at the start of a line is no word of a sentence
        ("x: dict[str, Any] = {}", ["untyped"]),
        ("x: dict[str, Any] = {}  # words: ok", []),
        ("# Drawn anew", ["word"]),
    ],
)
def test_rules(text: str, expected: list[str]) -> None:
    assert kinds(text) == expected


def test_public_names_and_their_docstrings_are_counted() -> None:
    source = """
class A:
    'Documented.'
    def bare(self): ...
    def _own(self): ...
    def told_of(self):
        'Documented.'
if True:
    def inside(): ...
def outer():
    'Documented.'
    def inner(): ...
"""
    found = {name: is_documented for name, _, is_documented in check_words.list_public_names(ast.parse(source))}
    assert found == {"A": True, "A.bare": False, "A.told_of": True, "inside": False, "outer": True}


def test_documentation_is_checked_for_words_only() -> None:
    assert kinds("dict[str, Any] where it is said to be told", "docs/a.md") == ["where", "word"]


def test_more_findings_than_the_limit_are_an_excess_and_fewer_are_not() -> None:
    findings = [Finding("where", "docs/a.md", line, "") for line in (1, 2)]
    assert find_excesses({"docs": {"where": 1}}, findings) == [("docs", "where", 2, 1)]
    assert find_excesses({"docs": {"where": 2}}, findings) == []
    assert find_excesses({}, findings) == [("docs", "where", 2, 0)]


def test_limits_only_fall() -> None:
    limits = {"a": {"where": 3, "word": 2}, "gone": {"where": 1}}
    counts = {"a": {"where": 5, "word": 1}, "new": {"where": 4}}
    assert lower_limits(limits, counts) == {"a": {"where": 3, "word": 1}}


def test_a_new_finding_in_the_repository_fails_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text("def told() -> None: ...\n")
    limits = tmp_path / "limits.json"
    limits.write_text("{}")
    monkeypatch.setattr(check_words, "ROOT", tmp_path)
    monkeypatch.setattr(check_words, "LIMITS", limits)
    monkeypatch.setattr(check_words, "list_files", lambda: ["a.py"])
    assert check_words.main([]) == 1
    assert "a.py:1: [participle] def told" in capsys.readouterr().err
    assert check_words.main(["--write"]) == 0
    assert json.loads(limits.read_text()) == {}, "a limit that was not there is 0"
    assert check_words.main(["--reset"]) == 0
    assert check_words.main([]) == 0
