"""The commit that `mlbench --version` tells: of a release, of a checkout, and of neither."""

import subprocess
from pathlib import Path

from mlbench_cli.util.commit import FILE, find_commit

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main")


def git(folder: Path, *words: str) -> str:
    return subprocess.run([*GIT, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_that_of_git_in_a_checkout_a_worktree_and_with_packed_references(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    package = checkout / "package"
    package.mkdir(parents=True)
    assert find_commit(package) == ""
    git(checkout, "init", "-q")
    assert find_commit(package) == ""
    git(checkout, "commit", "-q", "--allow-empty", "-m", "first")
    commit = git(checkout, "rev-parse", "HEAD")
    assert find_commit(package) == commit
    git(checkout, "worktree", "add", "-q", "-b", "other", str(tmp_path / "tree"))
    assert find_commit(tmp_path / "tree/package") == commit
    git(checkout, "pack-refs", "--all")
    assert find_commit(package) == commit
    assert find_commit(tmp_path / "tree/package") == commit
    git(checkout, "checkout", "-q", "--detach")
    assert find_commit(package) == commit


def test_a_release_says_its_commit_itself(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("0123456789abcdef\n")
    assert find_commit(tmp_path) == "0123456789abcdef"
