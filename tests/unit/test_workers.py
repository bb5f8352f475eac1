"""Workers forked from the process that has collected the tests run all of them, whatever becomes of a worker."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers import plan

ROOT = Path(__file__).parents[2]


def run(folder: Path, code: str, *options: str) -> tuple[int, str]:
    """Exit code and output of a session over one file with this code."""
    (folder / "test_it.py").write_text("import os, signal, time, warnings\nimport pytest\n" + code)
    command = [sys.executable, "-m", "pytest", "-p", "tests.workers", "-p", "no:cacheprovider", "-rA", *options]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), "-c", "/dev/null", str(folder)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_groups_start_first_and_stay_together() -> None:
    assert plan([None, "a", "b", None, "a"]) == [[1, 4], [2], [0], [3]]


def test_slow_tests_start_before_the_other_single_ones() -> None:
    assert plan([None, None, "a", None], {3, 1}) == [[2], [1], [3], [0]]


def test_every_test_runs_once_and_its_result_is_reported(tmp_path: Path) -> None:
    code, output = run(
        tmp_path,
        "@pytest.mark.parametrize('number', range(9))\n"
        "def test_one(number, tmp_path):\n"
        "    (tmp_path / 'x').mkdir()\n"
        "    print(f'number {number} in', os.getpid())\n"
        "    warnings.warn(f'careful with {number}') if number == 4 else None\n"
        "    assert number != 5\n"
        "    pytest.skip('no six') if number == 6 else None\n",
        *("--workers", "3"),
    )
    assert code == 1
    assert "1 failed, 7 passed, 1 skipped, 1 warning in" in output
    assert re.search(r"^FAILED .*test_it.py::test_one\[5\]", output, re.MULTILINE)
    assert "no six" in output
    assert "careful with 4" in output
    # Each test's own output stands with it, and three processes have run them.
    found = re.findall(r"^number (\d) in (\d+)$", output, re.MULTILINE)
    assert sorted(number for number, _ in found) == list("01234578")
    assert len({process for _, process in found}) == 3


GROUPS = """
@pytest.fixture(scope="module")
def shared():
    print("made by", os.getpid())
    yield os.getpid()
    print("ended by", os.getpid())

@pytest.mark.group("one")
@pytest.mark.parametrize("number", range(4))
def test_shared(shared, number):
    assert shared == os.getpid()

@pytest.mark.parametrize("number", range(4))
def test_alone(number):
    time.sleep(0.01)
"""


def test_a_group_has_one_worker_which_ends_its_fixtures(tmp_path: Path) -> None:
    code, output = run(tmp_path, GROUPS, "--workers", "3")
    assert code == 0
    assert "8 passed" in output
    makers, enders = (re.findall(rf"^{word} by (\d+)$", output, re.MULTILINE) for word in ("made", "ended"))
    assert len(makers) == 1
    assert makers == enders


def test_a_test_whose_worker_dies_has_failed_and_the_others_run(tmp_path: Path) -> None:
    code, output = run(
        tmp_path,
        "@pytest.mark.group('one')\n"
        "@pytest.mark.parametrize('number', range(6))\n"
        "def test_one(number):\n"
        "    os.kill(os.getpid(), signal.SIGKILL) if number == 2 else None\n",
        *("--workers", "2"),
    )
    assert code == 1
    assert "1 failed, 5 passed" in output
    assert "the worker died in this test: exit code -9" in output


def test_the_first_failure_ends_a_session_that_asked_for_it(tmp_path: Path) -> None:
    code, output = run(
        tmp_path,
        f"os.chdir({str(tmp_path)!r})\n"
        "def test_wrong():\n"
        "    while not os.path.exists('begun'):\n"
        "        time.sleep(0.01)\n"
        "    assert 0\n"
        "@pytest.fixture\n"
        "def resource():\n"
        "    open('begun', 'w').close()\n"
        "    yield\n"
        "    open('ended', 'w').close()\n"
        "def test_long(resource):\n"
        "    time.sleep(100)\n",
        *("--workers", "2", "-x"),
    )
    assert code == 1
    assert "stopping after 1 failures" in output
    # The other worker was interrupted, and has still ended its fixture.
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize("options", [(), ("--workers", "1")], ids=["alone", "a worker"])
def test_a_file_that_cannot_be_collected_fails_the_session(tmp_path: Path, options: tuple[str, ...]) -> None:
    code, output = run(tmp_path, "def test_one() -> None:\n    pass\n1 / 0\n", *options)
    assert code == 2
    assert "ZeroDivisionError" in output
