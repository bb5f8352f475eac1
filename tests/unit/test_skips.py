"""Skips that are not on the list of those that are allowed here fail a session."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import AllowedSkip, list_new_skips

ROOT = Path(__file__).parents[2]
ALLOWED = (
    AllowedSkip("tests/a/", "no GPU", lambda: True),
    AllowedSkip("tests/b/", "needs root", lambda: False),
)


@pytest.mark.parametrize(
    ("test", "reason", "is_new"),
    [
        ("tests/a/test_x.py::test_1", "this machine has no GPU", False),
        ("tests/a/test_x.py::test_1", "needs root", True),
        ("tests/b/test_x.py::test_1", "needs root", True),
        ("tests/c/test_x.py::test_1", "no GPU", True),
    ],
)
def test_a_skip_is_allowed_by_its_place_its_reason_and_its_environment(test: str, reason: str, is_new: bool) -> None:
    assert list_new_skips([(test, reason)], ALLOWED) == ([f"{test}: {reason}"] if is_new else [])


@pytest.mark.parametrize(
    ("mode", "code", "workers"), [("strict", 1, ["-p", "tests.workers", "--workers", "1"]), ("", 0, [])]
)
def test_a_session_with_a_new_skip_fails_and_names_it(tmp_path: Path, mode: str, code: int, workers: list[str]) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\ndef test_here() -> None:\n    pytest.importorskip('no_such_package')\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.skips", "-rs", *workers, str(tmp_path)]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "-c", "/dev/null"],
        cwd=ROOT, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "MLBENCH_SKIPS": mode},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert ("not allowed here" in done.stdout) is bool(code)
    assert "could not import 'no_such_package'" in done.stdout
