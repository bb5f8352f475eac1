"""What methods say that they send, against the kernel's counters of each rank's connections."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from task_images.methods import FILES
from task_images.methods.catalog import find_class
from tests import NIGHTLY
from tests.contract.task_images.methods.wire_ranks import UPDATES, WIDTHS
from tests.contract.task_images.ranks import Ended, RankServer

PROGRAM = "tests.contract.task_images.methods.wire_ranks"
SIZE = 4 * 301 * sum(WIDTHS)  # bytes of all gradients
# Of torch's engines, which do not count: sizes of the model that all ranks together send in an update, times P - 1.
# Over gloo, whose reduce-scatter is an all-reduce. Sharded models gather all but the last part twice.
GATHERED = 4 - WIDTHS[-1] / sum(WIDTHS)
FORMULAS = {"ddp": 2, "zero1": 3, "fsdp2": GATHERED}
SERVED = [name for name in FILES if name.endswith("-ps")]
Counts = dict[str, tuple[float, float | None]]  # by method: bytes by the kernel's and by the rank's own count


def measure(ranks: RankServer, folder: Path, size: int, name: str = "", **parameters: list[str]) -> list[Counts]:
    """The counts of each rank. `name`: of that method only, perhaps with servers."""
    changes = {"MLBENCH_METHOD": json.dumps({"name": name})} if name else {}
    servers = int(name in SERVED)
    ended = ranks.wait(ranks.start(PROGRAM, size, folder, parameters, changes, servers=servers), 800)
    return read_counts(ended, size)


def read_counts(ended: Sequence[Ended], size: int) -> list[Counts]:
    assert [one.code for one in ended] == [0] * len(ended), ended[0].stderr
    rows = [
        [json.loads(line.removeprefix("WIRE ")) for line in one.stdout.splitlines() if line.startswith("WIRE ")]
        for one in ended[:size]
    ]
    return [{method: (kernel, own) for method, kernel, own in row} for row in rows]


def compare(found: Sequence[Counts]) -> None:
    """The kernel's counts with those of mlbench's methods, and with the formulas of torch's engines."""
    size = len(found)
    for name in found[0]:
        counts = [rank[name] for rank in found]
        if name == "hsdp":  # two groups: in each two gathers and an all-reduce, between them an all-reduce of shards
            models = GATHERED * (size - 2) + 2
        elif find_class(name).wraps:
            models = FORMULAS[name] * (size - 1)
        else:
            for kernel, own in counts:
                assert own is not None, name
                assert kernel == pytest.approx(own, rel=0.03, abs=2000), name
            continue
        assert sum(kernel for kernel, _ in counts) == pytest.approx(models * SIZE * UPDATES, rel=0.03), name


WAYS = [(2, ""), (3, ""), (4, "hsdp")]  # ranks, and the one method that needs four


def check_counts(found: Sequence[Counts], name: str) -> None:
    assert set(found[0]) == ({name} if name else set(FILES) - set(SERVED) - {"hsdp"})
    compare(found)


def compare_served(found: Sequence[Counts], name: str) -> None:
    """The kernel's counts with a trainer's own, and with the size of what it sends."""
    for rank in found:
        kernel, own = rank[name]
        assert kernel == pytest.approx(own, rel=0.03)
        assert kernel == pytest.approx(SIZE * UPDATES, rel=0.03)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("size", "name"), WAYS if NIGHTLY else WAYS[2:])
def test_ranks_send_what_they_say(ranks: RankServer, tmp_path: Path, size: int, name: str) -> None:
    check_counts(measure(ranks, tmp_path, size, name), name)


# One of each transport, of each way to drift, and of torch's engines.
FEW = ["bsp", "dear", "eftopk", "gtopk", "powersgd", "dpsgd", "localsgd", "ddp", "zero1", "fsdp2"]


def test_three_ranks_send_what_they_say_by_a_few_methods(ranks: RankServer, tmp_path: Path) -> None:
    found = measure(ranks, tmp_path, 3, methods=FEW)
    assert list(found[0]) == FEW
    compare(found)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SERVED if NIGHTLY else ("bytescheduler-ps",))
def test_trainers_send_servers_what_they_say(ranks: RankServer, tmp_path: Path, name: str) -> None:
    compare_served(measure(ranks, tmp_path, 2, name), name)
