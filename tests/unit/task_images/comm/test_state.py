"""What methods keep is written by each rank for itself: no rank gets more with more ranks."""

import io
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from task_images.comm.base import MethodState, join_method_states
from task_images.comm.choose import make_strategy
from task_images.comm.presets import resolve
from task_images.harness.checkpoint import load_checkpoint, save_checkpoint, share_file
from task_images.harness.errors import EnvironmentUnfitError
from tests.unit.task_images.comm.equality import Probe, draw_gradients
from tests.unit.task_images.comm.threads import ThreadWorld, run_ranks


def keep(world: ThreadWorld, name: str) -> tuple[int, int]:
    """Collectives of the training threads for a state, and the bytes of its file, on rank 0."""
    method = resolve(name, {"sync": "postlocal:1,2"} if name == "postlocalsgd" else None)
    strategy = make_strategy(method)

    def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), 0.1, 0.9)

    module = strategy.attach(world, Probe(), make_optimizer)
    for update in (1, 2):
        strategy.begin(1.0, float(world.size))
        with strategy.last_pass():
            module(
                [torch.from_numpy(part) for part in draw_gradients(update, world.size, False)[world.rank]]
            ).backward()
        strategy.step(0.1)
    world.barrier()
    before = world.shared.collectives if world.is_first else 0
    state = strategy.method_state()
    made = world.shared.collectives - before if world.is_first else 0
    file = io.BytesIO()
    torch.save({**state}, file)
    world.barrier()
    strategy.close()
    return made, len(file.getvalue())


@pytest.mark.parametrize("name", ["eftopk", "powersgd", "dgc", "localsgd", "postlocalsgd", "dpsgd", "choco", "slowmo"])
def test_a_rank_keeps_its_own_state_whatever_the_number_of_ranks(name: str) -> None:
    two, eight = (run_ranks(size, partial(keep, name=name))[0] for size in (2, 8))
    assert two[0] == eight[0] == 0
    assert eight[1] == pytest.approx(two[1], rel=0.02)


def save(world: ThreadWorld, folder: Path, update: int) -> None:
    kept = [f"residual {rank}" if rank == world.rank else None for rank in range(world.size)]
    state = {"position": {"total": update}, "method": {"update": update, "ranks": kept}}
    save_checkpoint(world, folder / f"rank-{world.rank}" / "checkpoint.pt", "a_task", state)


def test_a_checkpoint_has_a_file_of_each_rank_whose_state_goes_to_that_rank(tmp_path: Path) -> None:
    """As many ranks read their own; of another number each reads all, to share them out anew."""
    for update in (10, 20):
        run_ranks(3, partial(save, folder=tmp_path, update=update))
    own = {f"rank-{rank}/checkpoint-20-rank-{rank}.pt" for rank in range(3)}
    files = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.pt")}
    assert files == {"rank-0/checkpoint.pt", *own}
    assert "residual" not in str(torch.load(tmp_path / "rank-0" / "checkpoint.pt"))

    def load(world: ThreadWorld) -> object:
        found = load_checkpoint(world, tmp_path / "rank-0" / "checkpoint.pt", "a_task", {})["method"]
        return found["update"], found["ranks"]

    assert run_ranks(3, load) == [
        (20, ["residual 0", None, None]),
        (20, [None, "residual 1", None]),
        (20, [None, None, "residual 2"]),
    ]
    assert run_ranks(2, load) == [(20, ["residual 0", "residual 1", "residual 2"])] * 2
    lost = tmp_path / "rank-1" / "checkpoint-20-rank-1.pt"
    lost.unlink()
    with pytest.raises(EnvironmentUnfitError, match=f"finds no checkpoint {lost}"):
        run_ranks(2, load)


def test_a_file_of_any_rank_reaches_the_machines_that_lack_it(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"{rank}").mkdir()
    (tmp_path / "1" / "part.pt").write_bytes(b"of the machine that was lost")

    def share(world: ThreadWorld) -> tuple[bool, bool]:
        place = tmp_path / f"{world.rank}"
        return share_file(world, place / "part.pt"), share_file(world, place / "none.pt")

    assert run_ranks(3, share) == [(True, False)] * 3
    assert {path.read_bytes() for path in tmp_path.glob("*/*")} == {b"of the machine that was lost"}
    assert len(list(tmp_path.glob("*/*"))) == 3


@pytest.mark.parametrize(("kept", "read"), [(["a", "b", "c"], [0, 1, 2]), ([], [0])])
def test_with_fewer_ranks_all_parts_are_read_only_if_the_method_has_some(kept: list[str], read: list[int]) -> None:
    asked: list[int] = []

    def state_of(rank: int) -> MethodState:
        asked.append(rank)
        return {"update": 7, "ranks": [part if rank == number else None for number, part in enumerate(kept)]}

    assert join_method_states(state_of, 3, 0, 2) == {"update": 7, "ranks": kept}
    assert asked == read
