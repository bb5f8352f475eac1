"""Check the words of code and documentation: `python -m tools.check_words`, part of `make lint`.

Each folder has a limit for each kind of finding in word_limits.json, which is the number of findings when it was last
written. More findings than the limit fail. After mending some, `--write` lowers the limits; it never raises one.
`--reset` sets them to the counts as they are, for files that moved between folders; the review sees what it raised.
Of the public names of the shipped packages, MIN_DOCUMENTED have to have a docstring.
CONTRIBUTING.md has the rules. A name or a line that is right in spite of a rule carries the comment `# words: ok`.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = Path(__file__).with_name("word_limits.json")
EXEMPTION = "words: ok"
SHIPPED = ("mlbench_cli/", "providers/", "templates/", "task_images/")
MIN_DOCUMENTED = 0.95
CODE, TEXT = (".py",), (".py", ".md", ".yaml", ".j2", ".sh")
# Contain the words that they forbid.
SKIPPED = ("tools/check_words.py", "tests/unit/test_words.py", "CONTRIBUTING.md", "CHANGELOG.md")

FORBIDDEN_WORDS = re.compile(r"\b(?:told|anew|meanwhile|troubled|to be borne|so often|what there is)\b", re.IGNORECASE)
WHERE = re.compile(r"(?<=[\s(])where(?=[\s,])")
UNTYPED = re.compile(r"\bdict\[str, Any\]")
# Words that end like participles but are nouns, adjectives or predicates of the field.
PARTICIPLE = re.compile(r"^_*(?:[a-z]+ed|held|told|made|found|left|seen|shown|given|taken|kept|begun|spoken|sought)$")
NO_PARTICIPLES = frozenset({"_embed", "_feed", "_need", "_seed", "_speed", "_shed", "embed", "feed", "need", "seed"})


@dataclass(frozen=True)
class Finding:
    """One place that breaks a rule. `kind` is where, untyped, word or participle; `line` counts from 1."""

    kind: str
    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: [{self.kind}] {self.text}"


def find_in_text(path: str, text: str) -> Iterator[Finding]:
    """Findings in the text of one file, in the order of lines."""
    rules = [("where", WHERE), ("word", FORBIDDEN_WORDS)] + ([("untyped", UNTYPED)] if path.endswith(CODE) else [])
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if EXEMPTION in line:
            continue
        for kind, rule in rules:
            for match in rule.finditer(line):
                yield Finding(kind, path, number, f'"{match[0]}" in: {line.strip()[:90]}')
    if path.endswith(CODE):
        yield from _find_participles(path, text, lines)


def _find_participles(path: str, text: str, lines: list[str]) -> Iterator[Finding]:
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or EXEMPTION in lines[node.lineno - 1]:
            continue
        is_value = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
        if PARTICIPLE.match(node.name) and node.name not in NO_PARTICIPLES and not is_value:
            yield Finding("participle", path, node.lineno, f"def {node.name}: name what it does or returns")


def list_public_names(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int, bool]]:
    """Name, line and whether it has a docstring, of each public class, function and method."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If | ast.Try):
            yield from list_public_names(node, prefix)
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        yield prefix + node.name, node.lineno, ast.get_docstring(node) is not None
        if isinstance(node, ast.ClassDef):
            yield from list_public_names(node, f"{prefix}{node.name}.")


def list_files(root: Path = ROOT) -> list[str]:
    """Tracked and new files that have words to check, relative to `root`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted(name for name in {*names} if name.endswith(TEXT) and name not in SKIPPED and (root / name).is_file())


def folder_of(path: str) -> str:
    """The part of the repository that a limit is for: at most two folders deep, "." for files at the top."""
    return "/".join(path.split("/")[:-1][:2]) or "."


def count_findings(findings: list[Finding]) -> dict[str, dict[str, int]]:
    """Folder to kind to number of findings, sorted, without zeros."""
    counts: dict[str, dict[str, int]] = {}
    for finding in findings:
        kinds = counts.setdefault(folder_of(finding.path), {})
        kinds[finding.kind] = kinds.get(finding.kind, 0) + 1
    return {folder: dict(sorted(counts[folder].items())) for folder in sorted(counts)}


def lower_limits(limits: dict[str, dict[str, int]], counts: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """The lesser of each limit and count. What has no limit yet has the limit 0, so it never enters."""
    lowered = {
        folder: {
            kind: least for kind, limit in kinds.items() if (least := min(limit, counts.get(folder, {}).get(kind, 0)))
        }
        for folder, kinds in limits.items()
    }
    return {folder: kinds for folder, kinds in lowered.items() if kinds}


def find_excesses(limits: dict[str, dict[str, int]], findings: list[Finding]) -> list[tuple[str, str, int, int]]:
    """(folder, kind, count, limit) for everything above its limit."""
    return [
        (folder, kind, count, limit)
        for folder, kinds in count_findings(findings).items()
        for kind, count in kinds.items()
        if count > (limit := limits.get(folder, {}).get(kind, 0))
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="lower the limits to today's counts")
    parser.add_argument("--reset", action="store_true", help="set the limits to today's counts")
    parser.add_argument("--list", metavar="FOLDER", help="print all findings below a folder, also those within limits")
    options = parser.parse_args(argv)
    files = list_files()
    findings = [finding for name in files for finding in find_in_text(name, (ROOT / name).read_text("utf-8"))]
    limits: dict[str, dict[str, int]] = json.loads(LIMITS.read_text())
    if options.list is not None:
        print(*(finding for finding in findings if finding.path.startswith(options.list)), sep="\n")
        return 0
    if options.write or options.reset:
        counts = count_findings(findings)
        LIMITS.write_text(json.dumps(counts if options.reset else lower_limits(limits, counts), indent=2) + "\n")
        return 0
    excesses = find_excesses(limits, findings)
    for folder, kind, count, limit in excesses:
        print(f"{folder}: {count} findings of kind {kind!r}, at most {limit} allowed:", file=sys.stderr)
        here = (finding for finding in findings if folder_of(finding.path) == folder and finding.kind == kind)
        print(*(f"  {finding}" for finding in here), sep="\n", file=sys.stderr)
    if excesses:
        print(
            "The rules are in CONTRIBUTING.md. A line that is right all the same ends with # words: ok", file=sys.stderr
        )
        return 1
    names = [
        (f"{path}:{line}: {name}", is_documented)
        for path in files
        if path.startswith(SHIPPED) and path.endswith(CODE)
        for name, line, is_documented in list_public_names(ast.parse((ROOT / path).read_text("utf-8")))
    ]
    share = sum(is_documented for _, is_documented in names) / len(names) if names else 1.0
    if share < MIN_DOCUMENTED:
        print(*(f"  {name}" for name, is_documented in names if not is_documented), sep="\n", file=sys.stderr)
        print(f"{share:.1%} of the public names have a docstring, not {MIN_DOCUMENTED:.0%}.", file=sys.stderr)
        return 1
    lines = sum(len((ROOT / name).read_bytes().splitlines()) for name in files)
    rates = {kind: 1000 * sum(finding.kind == kind for finding in findings) / lines for kind in ("where", "untyped")}
    participles = sum(finding.kind == "participle" for finding in findings)
    print(
        f'words: "where" {rates["where"]:.1f} and dict[str, Any] {rates["untyped"]:.1f} per 1 000 lines, '
        f"{participles} functions named by a participle, {share:.1%} of the public names with a docstring"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
