"""The commit of this mlbench: recorded in the package when a release is built, otherwise the checkout's.

Without pathlib, which takes longer to import than the interpreter to start.
"""

from __future__ import annotations

import os

FILE = "commit.txt"
DIGITS = 12


def describe_version(version: str) -> str:
    """ "4.0.0 (4d251577f0a1)", or the version alone if the commit is unknown."""
    commit = find_commit(os.path.dirname(os.path.dirname(__file__)))[:DIGITS]
    return f"{version} ({commit})" if commit else version


def find_commit(package: str | os.PathLike[str]) -> str:
    """The commit of the package in a folder; empty if unknown. Reads git's files, because git starts slowly."""
    root = os.path.dirname(package)
    try:
        if recorded := _read(package, FILE):
            return recorded
        git = os.path.join(root, ".git")
        if pointer := _read(git):  # a worktree
            git = os.path.join(root, pointer.removeprefix("gitdir:").strip())
        head = _read(git, "HEAD")
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        common = os.path.join(git, _read(git, "commondir"))
        if found := _read(common, name):
            return found
        return next(
            (line.split()[0] for line in _read(common, "packed-refs").split("\n") if line.endswith(f" {name}")), ""
        )
    except (OSError, ValueError):
        return ""


def _read(*parts: str | os.PathLike[str]) -> str:
    """The text of a file without white space around it; empty if there is no such file."""
    path = os.path.join(*parts)
    if not os.path.isfile(path):
        return ""
    with open(path, encoding="utf-8") as file:
        return file.read().strip()
