"""What methods say that they send, against the kernel's counters of each rank's connections."""

import json
from pathlib import Path

import pytest

from task_images.comm.methods import NATIVE
from task_images.comm.presets import PRESETS, resolve
from tests.contract.task_images.comm.wire_ranks import UPDATES, WIDTHS
from tests.contract.task_images.ranks import RankServer
from tests.sampling import sampled

PROGRAM = "tests.contract.task_images.comm.wire_ranks"
SIZE = 4 * 301 * sum(WIDTHS)  # bytes of all gradients
# Of torch's engines, which do not count: sizes of the model that all ranks together send in an update, times P - 1.
# Over gloo, whose reduce-scatter is an all-reduce.
FORMULAS = {"ddp": 2, "ddp-static": 2, "zero1": 3, "fsdp2": 4}
SERVED = [name for name in PRESETS if resolve(name).server_count]


def measure(ranks: RankServer, folder: Path, size: int, name: str = "") -> list[dict[str, tuple[float, float | None]]]:
    """By rank and method: bytes by the kernel's and by its own count. `name`: one with servers."""
    method = resolve(name) if name else None
    changes = {} if method is None else {"MLBENCH_METHOD": json.dumps(method.to_dict())}
    servers = 0 if method is None else method.server_count
    ended = ranks.wait(ranks.start(PROGRAM, size, folder, {}, changes, servers=servers), 800)
    assert [one.code for one in ended] == [0] * len(ended), ended[0].stderr
    rows = [
        [json.loads(line.removeprefix("WIRE ")) for line in one.stdout.splitlines() if line.startswith("WIRE ")]
        for one in ended[:size]
    ]
    return [{method: (kernel, own) for method, kernel, own in row} for row in rows]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", sampled((2, 3), keep=(3,)))
def test_ranks_send_what_they_say(ranks: RankServer, tmp_path: Path, size: int) -> None:
    found = measure(ranks, tmp_path, size)
    assert set(found[0]) == set(PRESETS) - set(SERVED) - {"hsdp"}  # which needs four ranks
    for name in found[0]:
        counts = [rank[name] for rank in found]
        if resolve(name).engine in NATIVE:
            expected = FORMULAS[name] * (size - 1) * SIZE * UPDATES
            assert sum(kernel for kernel, _ in counts) == pytest.approx(expected, rel=0.03), name
        else:
            for kernel, own in counts:
                assert own is not None, name
                assert kernel == pytest.approx(own, rel=0.03, abs=2000), name


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sampled(SERVED, keep=("bytescheduler-ps", "async-ps")))
def test_trainers_send_servers_what_they_say(ranks: RankServer, tmp_path: Path, name: str) -> None:
    for rank in measure(ranks, tmp_path, 2, name):
        kernel, own = rank[name]
        assert kernel == pytest.approx(own, rel=0.03)
        assert kernel == pytest.approx(SIZE * UPDATES, rel=0.03)
