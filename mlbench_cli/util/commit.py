"""The commit of this mlbench: recorded in the package when a release is built, otherwise the checkout's."""

from pathlib import Path

FILE = "commit.txt"
DIGITS = 12


def describe_version(version: str) -> str:
    """ "4.0.0 (4d251577f0a1)", or the version alone if the commit is unknown."""
    commit = find_commit(Path(__file__).parents[1])[:DIGITS]
    return f"{version} ({commit})" if commit else version


def find_commit(package: Path) -> str:
    """The commit of the package in a folder; empty if unknown. Reads git's files, because git starts slowly."""
    try:
        if (package / FILE).is_file():
            return (package / FILE).read_text("ascii").strip()
        git = package.parent / ".git"
        if git.is_file():  # a worktree
            git = package.parent / git.read_text("utf-8").removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text("utf-8").strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        common = git / (git / "commondir").read_text("utf-8").strip() if (git / "commondir").is_file() else git
        if (common / name).is_file():
            return (common / name).read_text("ascii").strip()
        packed = (common / "packed-refs").read_text("utf-8").splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {name}")), "")
    except (OSError, ValueError):
        return ""
