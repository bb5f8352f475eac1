"""A program for test_methods.py: every preset on the ranks of one start, each printing OK when its checks hold."""

import copy
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from task_images.comm.base import Strategy
from task_images.comm.choose import make_strategy
from task_images.comm.drifting import find_neighbors
from task_images.comm.exchange import Message, UnderWay
from task_images.comm.methods import NATIVE, Method, MethodError, check, payload_bytes
from task_images.comm.presets import PRESETS, resolve
from task_images.comm.reducer import Reducer
from task_images.comm.selfcheck import MethodWrongError, check_method
from task_images.contract import Contract
from task_images.harness.distributed import World, open_world
from task_images.harness.entry import run
from task_images.harness.errors import TaskUsageError
from task_images.harness.precision import LossScale
from task_images.harness.replicas import check_identical
from tests.contract.task_images.comm.training import MeanByHand, MixedNet, Net, PlainNet, compare, train

DENSE = ("single", "bsp", "wfbp", "fusion", "mgwfbp", "optfusion", "bytescheduler", "dear")
Begin = Callable[[float, float, int, LossScale | None], None]
LOSSY = ("fp16", "bf16", "signsgd-mv", "ef-signsgd", "topk", "eftopk", "dgc", "gtopk", "randomk", "qsgd", "powersgd")
DRIFTING = ("localsgd", "postlocalsgd", "dpsgd", "choco")
_strides: list[int] = []  # one: every so manieth of similar presets is tried


def some(*names: str) -> tuple[str, ...]:
    """By day a part of the presets that a check is about: each has passed its self-check on these ranks before."""
    return names[:: _strides[0]]


def list_possible(size: int) -> Iterator[Method]:
    """Presets without servers that so many ranks can take."""
    for name in PRESETS:
        method = resolve(name)
        try:
            check(method, size)
        except MethodError:
            continue
        if not method.server_count:
            yield method


def every_preset_passes_the_self_check(world: World) -> None:
    for method in list_possible(world.size):
        check_method(world, method)


def dense_methods_train_as_the_mean_by_hand(world: World) -> None:
    for passes, uneven in ((1, False), (2, True))[world.size // 8 :]:  # eight ranks take their time
        expected, _ = train(world, MeanByHand(), 6, passes, uneven=uneven)
        for name in DENSE:
            model, strategy = train(world, make_strategy(resolve(name)), 6, passes, uneven=uneven)
            check_identical(world, model)
            compare(world, model, expected, name)
            strategy.close()


def torchs_engines_train_as_the_mean_by_hand(world: World) -> None:
    """Also if passes are accumulated, ranks count differently, and gradients are clipped by their norm."""
    for passes, uneven, clip in ((1, False, None), (2, True, None), (1, True, 0.05))[2 * (world.size // 8) :]:
        expected, _ = train(world, MeanByHand(), 4, passes, make_net=PlainNet, uneven=uneven, clip=clip)
        wanted = dict(expected.named_parameters())
        for method in list_possible(world.size):
            if method.engine not in NATIVE:
                continue
            if method.engine == "ddp-static" and passes > 1:
                _expect_refusal(world, make_strategy(method), passes)
                continue
            model, _ = train(world, make_strategy(method), 4, passes, make_net=PlainNet, uneven=uneven, clip=clip)
            for key, found in model.named_parameters():
                torch.testing.assert_close(
                    _whole(found),
                    wanted[key].detach(),
                    rtol=1e-4,
                    atol=1e-5,
                    msg=f"{method.name} {passes} {clip} {key}",
                )


def a_leader_names_an_order_that_all_ranks_follow(world: World) -> None:
    """Also without the barrier, with a codec of several rounds, and if the leader is slower than the others."""
    expected, _ = train(world, MeanByHand(), 6)
    for name in ("wfbp", "bytescheduler", "dear", "fp16"):
        strategy = make_strategy(resolve(name, {"agreement": "leader"}))
        begin = strategy.begin

        def begin_late(
            weight: float, total: float, passes: int = 1, scale: LossScale | None = None, begin: Begin = begin
        ) -> None:
            time.sleep(0.01 if world.rank == 0 else 0)
            begin(weight, total, passes, scale)

        strategy.begin = begin_late  # type: ignore[method-assign]
        model, _ = train(world, strategy, 6)
        check_identical(world, model)
        if name != "fp16":
            compare(world, model, expected, name)
        strategy.close()


def _expect_refusal(world: World, strategy: Strategy, passes: int) -> None:
    with pytest.raises(TaskUsageError, match="only one") as error:
        train(world, strategy, 1, passes, make_net=PlainNet)
    assert "--method ddp" in str(error.value.hint)


def _whole(parameter: Tensor) -> Tensor:
    found = parameter.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found


def parameters_of_several_types_share_no_message(world: World) -> None:
    expected, _ = train(world, MeanByHand(), 4, make_net=MixedNet)
    for name in ("bsp", "wfbp", "fusion", "dear", "bytescheduler"):
        model, strategy = train(world, make_strategy(resolve(name)), 4, make_net=MixedNet)
        compare(world, model, expected, name)
        strategy.close()
    for name in some(*LOSSY, *DRIFTING):
        model, strategy = train(world, make_strategy(resolve(name)), 3, make_net=MixedNet)
        assert all(parameter.isfinite().all() for parameter in model.parameters()), name
        if name not in DRIFTING:
            check_identical(world, model)
        strategy.close()


def full_density_and_full_rank_are_exact(world: World) -> None:
    expected, _ = train(world, MeanByHand(), 4)
    for name, changes in (
        ("eftopk", {"codec": "topk:1"}),
        ("topk", {"codec": "topk:1"}),
        ("gtopk", {"codec": "topk:1"}),
        ("randomk", {"codec": "randomk:1"}),
        ("powersgd", {"codec": "powersgd:64"}),
    ):
        model, strategy = train(world, make_strategy(resolve(name, changes)), 4)
        for (key, one), other in zip(model.named_parameters(), expected.named_parameters(), strict=True):
            torch.testing.assert_close(one, other[1], rtol=1e-3, atol=2e-5, msg=f"{name} {key}")
        strategy.close()


def bytes_are_those_of_the_formula(world: World) -> None:
    sizes = [parameter.numel() for parameter in Net().parameters()]
    ring, everywhere = 2 * (world.size - 1) / world.size, world.size - 1
    for name in ("bsp", "mgwfbp", "fp16", "bf16", "signsgd-mv", "ef-signsgd", "topk", "eftopk", "randomk", "qsgd"):
        method = resolve(name, {} if name == "mgwfbp" else {"plan": "all"})
        _, strategy = train(world, make_strategy(method), 3)
        figures = strategy.stats()
        assert figures["bytes"] == 3 * payload_bytes(method, sizes), (name, figures)
        wire = figures["bytes"] * (ring if method.transport == "allreduce" else everywhere)
        assert abs(figures["wire_bytes"] - wire) < 1e-6 * wire, (name, figures)
        strategy.close()
    _, strategy = train(world, make_strategy(resolve("powersgd", {"codec": "powersgd:1", "plan": "all"})), 3)
    shapes = [parameter.shape for parameter in Net().parameters() if parameter.dim() == 2]
    # Matrices that rank 1 does not make smaller by half travel as they are.
    thin = [(rows, columns) for rows, columns in shapes if 2 * (rows + columns) < rows * columns]
    plain = sum(sizes) - sum(rows * columns for rows, columns in thin)
    assert strategy.stats()["bytes"] == 3 * 4 * (sum(rows + columns for rows, columns in thin) + plain), shapes
    strategy.close()


def a_resumed_training_goes_on_as_if_it_had_not_stopped(world: World) -> None:
    for name in some("eftopk", "dgc", "powersgd", "qsgd", "bytescheduler", *DRIFTING):
        changes = {"sync": "postlocal:2,3"} if name == "postlocalsgd" else None
        method = resolve(name, changes)
        _, first = train(world, make_strategy(method, 5), 4)
        with first.consensus():
            own = first.state_dict()
            [state] = _share([{**own, "method": {}}])  # rank 0's file
            state["method"] = copy.deepcopy(own["method"])  # the rank's own file
        rest, strategy = train(world, make_strategy(method, 5), 3, start=4, state=state)
        again, other = train(world, make_strategy(method, 5), 7, consensus_after=3)
        with other.consensus(), strategy.consensus():
            for one, two in zip(rest.parameters(), again.parameters(), strict=True):
                assert torch.equal(one, two), (name, float((one - two).detach().abs().max()))
        for each in (first, strategy, other):
            each.close()


def torchs_engines_go_on_from_a_checkpoint(world: World) -> None:
    for method in list_possible(world.size):
        if method.engine not in ("zero1", "fsdp2", "hsdp"):
            continue  # the others' state is the optimizer's
        _, first = train(world, make_strategy(method), 3, make_net=PlainNet)
        with first.consensus():
            [state] = _share([first.state_dict()])
        rest, _ = train(world, make_strategy(method), 2, make_net=PlainNet, start=3, state=state)
        again, _ = train(world, make_strategy(method), 5, make_net=PlainNet)
        for (key, one), two in zip(rest.named_parameters(), again.parameters(), strict=True):
            torch.testing.assert_close(_whole(one), _whole(two), rtol=1e-5, atol=1e-6, msg=f"{method.name} {key}")


def a_sharded_optimizer_and_a_whole_one_go_on_from_each_other(world: World) -> None:
    again, _ = train(world, make_strategy(resolve("ddp")), 5, make_net=PlainNet)
    for before, after in (("ddp", "zero1"), ("zero1", "ddp")):
        _, first = train(world, make_strategy(resolve(before)), 3, make_net=PlainNet)
        with first.consensus():
            [state] = _share([first.state_dict()])
        rest, _ = train(world, make_strategy(resolve(after)), 2, make_net=PlainNet, start=3, state=state)
        for (key, one), two in zip(rest.named_parameters(), again.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6, msg=f"{before} {after} {key}")


def _share(items: list[Any]) -> list[Any]:
    """Rank 0's objects on all ranks, as if they had been read from its file."""
    torch.distributed.broadcast_object_list(items, 0)
    return items


def neighbors_come_together_as_fast_as_their_mixing_matrix_says(world: World) -> None:
    """Without gradients the distance from the mean falls by the second eigenvalue of the matrix in every step."""
    size = world.size
    mixing = torch.zeros(size, size, dtype=torch.float64)
    for rank in range(size):
        near = [rank, *find_neighbors(rank, size)]
        mixing[rank, near] = 1 / len(near)
    second = float(torch.linalg.eigvalsh(mixing).abs().sort().values[-2])
    for name, factor in (("dpsgd", second), ("choco", None)):
        strategy = make_strategy(resolve(name, {"codec": "topk:1"} if name == "choco" else None))
        model = nn.Linear(40, 30)
        strategy.attach(world, model, lambda net: torch.optim.SGD(net.parameters(), 1.0))
        with torch.no_grad():
            generator = torch.Generator().manual_seed(world.rank)
            model.weight.copy_(torch.randn(model.weight.shape, generator=generator))
        own = _distance(world, model)
        for _ in range(8):
            strategy.begin(1.0, float(size))
            strategy.step(0.0)
            before, own = own, _distance(world, model)
            if factor is not None:
                assert own <= factor * before * (1 + 1e-4) + 1e-5, (name, factor, before, own)
        assert own < 0.9 * before or own < 1e-4, (name, before, own)


def _distance(world: World, model: nn.Linear) -> float:
    mean = world.all_reduce(model.weight.detach().double() / world.size)
    return float(world.sum([float((model.weight.detach() - mean).square().sum())])[0] ** 0.5)


def replicas_that_drift_have_a_distance_and_others_are_equal(world: World) -> None:
    for name in ("noop", "fusion", "dpsgd", "localsgd"):
        _, strategy = train(world, make_strategy(resolve(name)), 3)
        with strategy.consensus():
            distance = strategy.check_replicas()
        assert (distance is None) == (name == "fusion"), (name, distance)
        assert name != "noop" or (distance or 0) > 0, distance
        strategy.close()


def local_steps_are_averaged_as_by_hand(world: World) -> None:
    """Every rank trains alone by plain SGD; the mean of weights after each two steps."""
    torch.manual_seed(3)
    expected = PlainNet()
    optimizer = torch.optim.SGD(expected.parameters(), 0.01)
    for update in range(4):
        torch.manual_seed(1000 * update + world.rank)
        optimizer.zero_grad()
        expected(torch.randn(4, 12)).backward()
        optimizer.step()
        for parameter in expected.parameters():
            if update % 2:
                world.all_reduce(parameter.detach().div_(world.size))
    strategy = make_strategy(resolve("localsgd", {"sync": "local:2"}))
    torch.manual_seed(3)
    model = PlainNet()
    module = strategy.attach(world, model, lambda net: torch.optim.SGD(net.parameters(), 0.1))
    for update in range(4):
        torch.manual_seed(1000 * update + world.rank)
        strategy.begin(1.0, float(world.size))
        with strategy.last_pass():
            module(torch.randn(4, 12)).backward()
        strategy.step(0.01)
    compare(world, model, expected, "localsgd")


# --- faults: each is made in the transport, as a broken network or a bug would make it --------------------------------


def a_falsified_message_is_found(world: World) -> None:
    """One number of one message of one rank."""
    for name in some("fusion", "wfbp", "dear", "fp16", "eftopk", "powersgd", "randomk", "ef-signsgd"):

        def falsify(message: Message) -> None:
            if world.rank == world.size - 1:
                message.flat[-1] += 0.5

        _expect_found(world, name, falsify)


def a_lost_message_is_found(world: World) -> None:
    """What one rank has does not arrive."""
    for name in ("fusion", "gtopk"):

        def lose(message: Message) -> None:
            if world.rank == 1 and message.number == 0:
                message.flat.zero_()

        _expect_found(world, name, lose)


def a_message_of_the_wrong_rank_is_found(world: World) -> None:
    """One rank sends what another has, which so counts twice."""

    def mistake(message: Message) -> None:
        own = message.flat.clone()
        if world.rank == 1:
            message.flat.copy_(own.roll(1))

    _expect_found(world, "bsp", mistake)


def _expect_found(world: World, name: str, fault: Callable[[Message], None]) -> None:
    def break_it(strategy: Strategy) -> None:
        assert isinstance(strategy, Reducer)
        start = strategy._transport.start

        def start_broken(message: Message, seed: int) -> UnderWay | None:
            fault(message)
            return start(message, seed)

        strategy._transport.start = start_broken  # type: ignore[method-assign]

    with pytest.raises(MethodWrongError, match="self-check"):
        check_method(world, resolve(name), break_it)


def a_rank_that_gets_another_result_is_found(world: World) -> None:
    """Signs without feedback have no sum to hold them to, but all ranks must have the same."""

    def break_it(strategy: Strategy) -> None:
        assert isinstance(strategy, Reducer)
        start = strategy._transport.start

        def start_broken(message: Message, seed: int) -> UnderWay | None:
            sent = start(message, seed)
            if world.rank == 1:
                message.flat.neg_()
            return sent

        strategy._transport.start = start_broken  # type: ignore[method-assign]

    for name in some("signsgd-mv", "qsgd", "topk", "dgc"):
        with pytest.raises(MethodWrongError, match="rank 1 differs"):
            check_method(world, resolve(name), break_it)


def a_slow_rank_is_waited_for(world: World) -> None:
    expected, _ = train(world, MeanByHand(), 3)
    strategy = make_strategy(resolve("fusion"))
    begin = strategy.begin

    def begin_late(weight: float, total: float, passes: int = 1, scale: LossScale | None = None) -> None:
        time.sleep(0.1 if world.rank == 1 else 0)
        begin(weight, total, passes, scale)

    strategy.begin = begin_late  # type: ignore[method-assign]
    model, strategy = train(world, strategy, 3)
    compare(world, model, expected, "slow")
    waited = [row[0] for row in world.gather([strategy.stats()["exposed_seconds"]])]
    assert waited[0] > waited[1], waited
    strategy.close()


CHECKS: list[Callable[[World], None]] = [
    every_preset_passes_the_self_check,
    dense_methods_train_as_the_mean_by_hand,
    a_leader_names_an_order_that_all_ranks_follow,
    torchs_engines_train_as_the_mean_by_hand,
    parameters_of_several_types_share_no_message,
    full_density_and_full_rank_are_exact,
    bytes_are_those_of_the_formula,
    a_resumed_training_goes_on_as_if_it_had_not_stopped,
    torchs_engines_go_on_from_a_checkpoint,
    a_sharded_optimizer_and_a_whole_one_go_on_from_each_other,
    neighbors_come_together_as_fast_as_their_mixing_matrix_says,
    replicas_that_drift_have_a_distance_and_others_are_equal,
    local_steps_are_averaged_as_by_hand,
    a_falsified_message_is_found,
    a_lost_message_is_found,
    a_message_of_the_wrong_rank_is_found,
    a_rank_that_gets_another_result_is_found,
    a_slow_rank_is_waited_for,
]


def main(contract: Contract) -> None:
    world = open_world(contract, rendezvous_seconds=60)
    _strides[:] = [contract.parameters.get("stride", 1)]
    for each in CHECKS:
        begin = time.perf_counter()
        try:
            each(world)
        except Exception:
            traceback.print_exc()
            sys.exit(1)
        print("OK", each.__name__, flush=True)
        if contract.parameters.get("timed"):
            print(f"{time.perf_counter() - begin:.1f} s", flush=True)
    world.close()


if __name__ == "__main__":
    run(main)
