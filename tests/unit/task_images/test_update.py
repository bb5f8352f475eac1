"""One update: exact means of sums, clipping after them, loss scale and overflow, checkpoints."""

import contextlib
import dataclasses
import math
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from task_images.checkpoint import Folder, State, read_main, read_own
from task_images.contract import Contract, DivergedError, EnvironmentUnfitError, TaskUsageError
from task_images.methods.base import Bsp, LossScale
from task_images.report import Reporter
from task_images.schedules import Constant, PerUpdate
from task_images.train import PassLoss, Plan, Precision, Trainer, Update
from task_images.world import World, open_world
from tests.unit.task_images.threads import ThreadWorld, run_ranks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    threads = torch.get_num_threads()
    yield open_world(Contract({"OMP_NUM_THREADS": "1"}))
    torch.set_num_threads(threads)


class Sums:
    """A work on rows whose loss is the sum of the model's outputs: its gradient is the sum of the rows. Every list of
    passes is an update."""

    def __init__(self, model: nn.Module, *updates: list[Tensor]) -> None:
        self.model, self._updates = model, updates

    def count(self, epoch: int) -> int:
        return len(self._updates)

    def updates(self, epoch: int, begin: int = 0) -> Iterator[Update[Tensor]]:
        for passes in self._updates[begin:]:
            yield Update(passes, len(passes), 1.0, 3.0, 3)

    def prepare(self, part: Tensor) -> Tensor:
        return part

    def forward(self, model: nn.Module, data: Tensor) -> Tensor:
        outputs: Tensor = model(data)
        return outputs

    def loss(self, outputs: Tensor, data: Tensor) -> PassLoss:
        return PassLoss(outputs.sum(), outputs.detach().mean(), len(data))


def train(
    world: World,
    precision: Precision,
    *updates: list[Tensor],
    clip: float | None = None,
    rate: float = 0.5,
    momentum: float = 0.0,
    plan: Plan | None = None,
    note: Callable[[Tensor], None] | None = None,
    work: type[Sums] = Sums,
) -> tuple[Tensor, Tensor, Trainer[Tensor]]:
    """The weights before and after one epoch (or `plan`), and the trainer; `note` sees them after each update."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    before = model.weight.detach().clone()
    trainer = Trainer(
        world,
        Reporter(world, "rows", synthetic=True),
        work(model, *updates),
        PerUpdate(Constant(rate)),
        plan or Plan(1),
        after_update=(lambda: note(model.weight.detach())) if note else None,
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0, momentum=momentum),
        method=Bsp(),
        precision=precision,
        clip=math.inf if clip is None else clip,
    )
    trainer.run()
    return before, model.weight.detach(), trainer


X = torch.arange(12.0).reshape(3, 4)


class Scaled(Precision):
    """fp16's loss scale without its autocast, which needs a GPU."""

    def __init__(self, scale: LossScale | None = None) -> None:
        super().__init__("fp16", torch.device("cuda"), scale or LossScale(1024.0, window=1))

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()


def test_the_loss_scale_cancels_out_and_an_overflow_leaves_the_model_alone(world: World) -> None:
    _, plain, _ = train(world, Precision("fp32", CPU), [X], clip=3.0)
    scaled = Scaled()
    _, after, trainer = train(world, scaled, [X], clip=3.0)
    torch.testing.assert_close(after, plain)
    assert scaled.factor == 2048.0  # grown, after a window of one
    scaled = Scaled()
    _, after, trainer = train(world, scaled, [X], [X * torch.inf], clip=3.0)
    torch.testing.assert_close(after, plain)
    assert (scaled.factor, trainer.position.skipped, trainer.position.total) == (1024.0, 1, 2)


def test_a_sequence_that_is_half_as_long_learns_half_as_fast(world: World) -> None:
    class Short(Sums):
        def updates(self, epoch: int, begin: int = 0) -> Iterator[Update[Tensor]]:
            for update in super().updates(epoch, begin):
                yield dataclasses.replace(update, rate_factor=0.5)

    before, whole, _ = train(world, Precision("fp32", CPU), [X])
    _, half, _ = train(world, Precision("fp32", CPU), [X], work=Short)
    torch.testing.assert_close(half - before, (whole - before) / 2)


def test_each_pass_has_its_own_random_numbers_whatever_rank_computes_it(world: World) -> None:
    drawn: list[float] = []

    def make(first: int) -> type[Sums]:
        class Random(Sums):
            def updates(self, epoch: int, begin: int = 0) -> Iterator[Update[Tensor]]:
                for update in super().updates(epoch, begin):
                    yield dataclasses.replace(update, first=first)

            def forward(self, model: nn.Module, data: Tensor) -> Tensor:
                drawn.append(float(torch.rand(())))
                return super().forward(model, data)

        return Random

    train(world, Precision("fp32", CPU), [X, X, X], [X, X, X], work=make(0))
    train(world, Precision("fp32", CPU), [X], [X], work=make(2))  # the rank with the last pass of each update
    assert len(set(drawn[:6])) == 6
    assert drawn[6:] == [drawn[2], drawn[5]]


def test_a_resumed_training_overflows_when_the_whole_one_does(tmp_path: Path) -> None:
    """Gradients overflow whenever the scale has grown, after two good updates. The checkpoint is written between two
    such: with another scale, or with their count lost, the next overflow would come at another update."""

    def run(name: str, plan: Plan) -> list[tuple[float, int, list[list[float]]]]:
        world = open_world(Contract({"OMP_NUM_THREADS": "1", "MLBENCH_OUTPUT_DIR": str(tmp_path / name)}))
        scale = LossScale(2.0**125, window=2, largest=2.0**126)
        seen = []

        def note(weights: Tensor) -> None:
            seen.append((scale.value, scale.good, weights.tolist()))

        rows = [[X * (1 + number / 64)] for number in range(6)]
        train(world, Scaled(scale), *rows, clip=1.0, momentum=0.9, plan=plan, note=note)
        return seen

    whole, first = run("whole", Plan(2)), run("first", Plan(1, checkpoint_every=6))
    exponents = [math.log2(value) for value, _, _ in whole]
    assert exponents == [124, 123, 123, 124, 123, 123, 124, 123, 123, 124, 123, 123]
    assert first[-1][:2] == (2.0**123, 1)
    rest = run("rest", Plan(2, resume=str(tmp_path / "first" / "checkpoints" / "6")))
    assert first + rest == whole


def test_without_a_loss_scale_an_overflow_is_the_end(world: World) -> None:
    with pytest.raises(DivergedError, match="norm of the gradients is not finite"):
        train(world, Precision("fp32", CPU), [X * torch.nan])


def test_a_checkpoint_that_cannot_be_used_is_refused_and_runs_no_code(tmp_path: Path) -> None:
    def run(name: str, plan: Plan) -> None:
        world = open_world(Contract({"OMP_NUM_THREADS": "1", "MLBENCH_OUTPUT_DIR": str(tmp_path / name)}))
        train(world, Precision("fp32", CPU), [X], plan=plan)

    run("first", Plan(3, checkpoint_every=1))
    [place] = (tmp_path / "first" / "checkpoints").iterdir()  # the last one
    resumed = Plan(4, resume=str(place))
    run("rest", resumed)
    (place / "rank-0.pt").rename(tmp_path / "kept.pt")
    with pytest.raises(EnvironmentUnfitError, match=r"finds no checkpoint .*rank-0.pt"):
        run("rest", resumed)
    for content in (b"", b"PK\3\4 broken", b"\x80\x02cposix\nsystem\n.", (place / "main.pt").read_bytes()[:500]):
        (place / "main.pt").write_bytes(content)
        with pytest.raises(EnvironmentUnfitError, match="cannot be read as a checkpoint"):
            run("rest", resumed)
    torch.save([1, 2], place / "main.pt")
    with pytest.raises(TaskUsageError, match="not a checkpoint in the form"):
        run("rest", resumed)


def test_a_checkpoint_is_deleted_once_the_next_one_is_whole(tmp_path: Path) -> None:
    """A rank that is late with its part, or is killed before it, leaves the earlier one."""

    def body(world: ThreadWorld) -> list[int]:
        kept = Folder(world, tmp_path)
        for update in (1, 2):
            if update == 2 and world.rank == 1:
                time.sleep(0.3)
                assert sorted(file.name for file in (tmp_path / "1").iterdir()) == ["main.pt", "rank-0.pt", "rank-1.pt"]
            kept.write(update, State({"identity": {}}, {"part": torch.tensor(update + world.rank)}))
        return [int(own["part"]) for own in read_own(world, tmp_path / "2", read_main(world, tmp_path / "2", {}))]

    assert run_ranks(2, body) == [[2], [3]]
    assert [path.name for path in tmp_path.iterdir()] == ["2"]
    run_ranks(2, lambda world: Folder(world, tmp_path).write(3, State({"identity": {}}, {})))  # started again
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_a_checkpoint_of_which_a_rank_has_another_runs_part_is_refused(tmp_path: Path) -> None:
    def write(world: ThreadWorld, seed: int) -> None:
        Folder(world, tmp_path, keeps_all=True).write(1, State({"identity": {"seed": seed}}, {}))

    run_ranks(2, lambda world: write(world, 1))
    left = (tmp_path / "1/rank-1.pt").read_bytes()
    run_ranks(2, lambda world: write(world, 2))
    (tmp_path / "1/rank-1.pt").write_bytes(left)
    with pytest.raises(EnvironmentUnfitError, match=r"rank-1\.pt is of another run than"):
        run_ranks(2, lambda world: read_own(world, tmp_path / "1", read_main(world, tmp_path / "1", {"seed": 2})))


@pytest.mark.parametrize("behind", [False, True])
def test_a_full_disk_is_named_and_left_as_it_was(world: World, tmp_path: Path, behind: bool) -> None:
    state = State({"identity": {}}, {"part": torch.zeros(100_000)})
    kept = Folder(world, tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        if behind:
            kept.write_behind(1, state)
        with pytest.raises(EnvironmentUnfitError, match=r"the checkpoint .*/1 cannot be written"):
            kept.wait() if behind else kept.write(1, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "1").iterdir()) == []


def test_a_checkpoint_may_be_named_from_the_folder_where_it_is(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "all" / "1"
    Folder(world, place.parent).write(1, State({"identity": {}}, {"part": torch.tensor(7)}))
    for folder, name in ((tmp_path, "all/1"), (place.parent, "1"), (place, ".")):
        monkeypatch.chdir(folder)
        [own] = read_own(world, Path(name), read_main(world, Path(name), {}))
        assert int(own["part"]) == 7
