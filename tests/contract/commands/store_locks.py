"""Another process that has a store locked, as a backup program or a stopped client has."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Even readers are locked out by an exclusive lock; a writer that does not end locks out writers alone.
HOLDER = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
if sys.argv[2] == "readers":
    database.execute("PRAGMA locking_mode=EXCLUSIVE")
    database.execute("BEGIN EXCLUSIVE")
else:
    database.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def lock_out(home: Path, whom: str = "readers") -> Iterator[None]:
    """Lock the store of a data folder for `readers` and writers, or for `writers` alone."""
    command = [sys.executable, "-c", HOLDER, str(home / "mlbench.sqlite"), whom]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert process.stdout.readline() == "locked\n"
        yield
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()
