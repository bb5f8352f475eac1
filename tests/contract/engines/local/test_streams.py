"""Standard output and standard error of ranks: one log, and both apart, byte for byte, from real processes."""

import os
from pathlib import Path

from mlbench_cli.server.log_pages import Stream, has_streams, read_page
from tests.contract.local_runs import Lab, python, shell

# 3,000 numbered lines on each stream, some of them split over several writes.
BOTH = python(
    "import os\n"
    "for n in range(3000):\n"
    "    os.write(1, b'out %d\\n' % n)\n"
    "    os.write(2, b'error ' + b'x' * (n % 300))\n"
    "    os.write(2, b' %d\\n' % n)\n"
)


def lines_of(path: Path, stream: Stream, limit: int = 8192) -> list[str]:
    """All lines of a stream, page by page from its beginning."""
    found: list[str] = []
    offset = 0
    while True:
        page = read_page(path, offset, stream=stream, limit=limit)
        found += page.lines
        offset = page.end
        if offset >= page.size:
            return found


def test_both_streams_are_complete_and_in_order_apart_and_together(lab: Lab) -> None:
    run = lab.start(BOTH, workers=2)
    lab.end(run)
    for rank in (0, 1):
        path = run.folder / "logs" / f"rank-{rank}.log"
        assert lines_of(path, Stream.OUTPUT) == [f"out {n}" for n in range(3000)]
        errors = [f"error {'x' * (n % 300)} {n}" for n in range(3000)]
        assert lines_of(path, Stream.ERRORS) == errors
        assert path.stat().st_size == sum(read_page(path, 0, stream=stream).size for stream in list(Stream)[1:])
        assert list(read_page(path, -1, stream=Stream.ERRORS).lines[-3:]) == errors[-3:]


def test_what_a_rank_says_last_is_in_its_log_when_its_end_is_known(lab: Lab) -> None:
    """Also from a process that it left behind, and after megabytes that nobody had read."""
    run = lab.start(shell("echo begun; head -c 3000000 /dev/zero | tr '\\0' 'x' >&2; echo; echo last >&2; exit 3"))
    lab.end(run)
    path = run.folder / "logs" / "rank-0.log"
    assert path.read_bytes().endswith(b"last\n")
    assert path.stat().st_size == len("begun\n\n") + 3_000_000 + len("last\n")


def test_a_rank_that_closes_its_streams_ends_as_always(lab: Lab) -> None:
    run = lab.start(shell("exec 2>&-; sleep 0.3; echo done"))
    assert lab.end(run).ended == "exited"
    assert lab.log(run) == b"done\n"


def test_a_log_without_index_is_not_divided(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "rank-0.log"
    path.parent.mkdir()
    path.write_bytes(b"a\nb\n")
    assert not has_streams(path)
    assert read_page(path, 0, stream=Stream.ERRORS).lines == ()
    (tmp_path / ".state").mkdir()
    (tmp_path / ".state" / "stderr-0").write_bytes(b"2 2\nnonsense\n9")  # damaged, and still being written
    assert read_page(path, 0, stream=Stream.ERRORS).lines == ("b",)
    assert read_page(path, 0, stream=Stream.OUTPUT).lines == ("a",)
    assert os.path.getsize(path) == 4
