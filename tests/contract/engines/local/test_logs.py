"""A log holds what the rank has written, byte for byte, and is read back the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlbench_cli.engines.follow import read_log
from tests import NIGHTLY
from tests.contract.local_runs import Lab, python

WRITE = python(
    "import os, sys\n"
    "data = open(sys.argv[1] + os.environ['RANK'], 'rb').read()\n"
    "cuts = sorted({0, len(data), *(int(cut) % (len(data) + 1) for cut in sys.argv[2].split(','))})\n"
    "for begin, end in zip(cuts, cuts[1:]):\n"
    "    rest = data[begin:end]\n"
    "    while rest: rest = rest[os.write(int(sys.argv[3]), rest):]\n"
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("logs"))
    yield lab
    lab.close()


def check(lab: Lab, contents: tuple[bytes, bytes], stream: int, cuts: str = "0") -> None:
    """Two ranks write their contents in pieces, to standard output (1) or error (2). For both see test_streams.py."""
    base = lab.store.folder / f"content-{len(lab.runs)}-"
    for rank, content in enumerate(contents):
        Path(f"{base}{rank}").write_bytes(content)
    run = lab.start((*WRITE, str(base), cuts, str(stream)), workers=2)
    for rank, content in enumerate(contents):
        lines = list(read_log(lab.engine, run, rank, follow=True))
        assert b"".join(line.text for line in lines) == content
        assert (run.folder / f"logs/rank-{rank}.log").read_bytes() == content
        assert all(line.text.count(b"\n") == 1 and line.text[-1:] == b"\n" for line in lines[:-1])
        position = 0
        for line in lines:
            position += len(line.text)
            assert (line.rank, line.cursor.offset) == (rank, position)


@settings(max_examples=15 if NIGHTLY else 5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.tuples(
        *[st.lists(st.sampled_from([b"\n", b"\r", b"\0", b"a", b"\xff", b"@mlbench {", b"z" * 70_000])).map(b"".join)]
        * 2
    ),
    st.lists(st.integers(0, 1 << 18), min_size=1, max_size=6),
    st.sampled_from([1, 2]),
)
def test_any_bytes_are_exact(lab: Lab, contents: tuple[bytes, bytes], cuts: list[int], stream: int) -> None:
    check(lab, contents, stream, ",".join(map(str, cuts)))
