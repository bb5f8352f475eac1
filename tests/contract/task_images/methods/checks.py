"""A program for test_methods.py: checks of methods on the ranks of one start, each printing OK when it holds."""

import copy
import itertools
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from task_images.checkpoint import collect_model, is_sharded, save_model
from task_images.contract import Contract, WrongResultError
from task_images.methods import FILES
from task_images.methods.base import LossScale, Method, MethodError
from task_images.methods.buckets import Bucketed, Finish, Message
from task_images.methods.catalog import find_class, load_file
from task_images.methods.check import check_method
from task_images.methods.compressed import Compressed
from task_images.run import run
from task_images.world import World, check_identical, open_world
from tests.contract.task_images.methods.training import DictNet, MeanByHand, MixedNet, Net, PlainNet, compare, train
from tests.documentation import ROOT, read_blocks

DENSE = ("bsp", "wfbp", "fusion", "mgwfbp", "optfusion", "bytescheduler", "dear")
LOSSY = ("fp16", "bf16", "signsgd-mv", "ef-signsgd", "topk", "eftopk", "dgc", "gtopk", "qsgd", "powersgd")
DRIFTING = ("localsgd", "dpsgd", "choco", "slowmo")
NUMBERS = itertools.count()


def make(name: str, **options: str) -> Method:
    return find_class(name)(**options)


def list_possible(size: int) -> Iterator[Method]:
    """Methods without servers that so many ranks can use."""
    for name in FILES:
        method = make(name)
        try:
            method.check(size)
        except MethodError:
            continue
        if "servers" not in method.values:
            yield method


def every_method_passes_the_self_check(world: World) -> None:
    for method in list_possible(world.size):
        check_method(world, method)


def the_methods_of_the_how_to_pass_the_self_check(world: World) -> None:
    for block in read_blocks(ROOT / "docs" / "how-to" / "methods.md"):
        if block.language == "python":
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "method.py")
                file.write_text(block.text, "utf-8")
                check_method(world, load_file(str(file))())


def dense_methods_train_as_the_mean_by_hand(world: World) -> None:
    for passes, uneven in ((1, False), (2, True))[world.size // 8 :]:  # eight ranks take their time
        expected, _ = train(world, MeanByHand(), 6, passes, uneven=uneven)
        for name in DENSE:
            model, method = train(world, make(name), 6, passes, uneven=uneven)
            check_identical(world, model)
            compare(world, model, expected, name)
            method.close()


def torchs_engines_train_as_the_mean_by_hand(world: World) -> None:
    """Also if passes are accumulated, ranks count differently, and gradients are clipped by their norm."""
    cases = ((1, False, None, PlainNet), (2, True, None, DictNet), (1, True, 0.05, PlainNet))
    for passes, uneven, clip, net in cases[2 * (world.size // 8) :]:
        expected, _ = train(world, MeanByHand(), 4, passes, make_net=net, uneven=uneven, clip=clip)
        wanted = dict(expected.named_parameters())
        for method in (make(one.name) for one in list_possible(world.size) if one.wraps):
            model, _ = train(world, method, 4, passes, make_net=net, uneven=uneven, clip=clip)
            for key, found in model.named_parameters():
                torch.testing.assert_close(
                    _whole(found),
                    wanted[key].detach(),
                    rtol=1e-4,
                    atol=1e-5,
                    msg=f"{method.name} {passes} {clip} {key}",
                )


def _whole(parameter: Tensor) -> Tensor:
    found = parameter.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found


def parameters_of_several_types_share_no_message(world: World) -> None:
    expected, _ = train(world, MeanByHand(), 4, make_net=MixedNet)
    for name in ("bsp", "wfbp", "fusion", "dear", "bytescheduler"):
        model, method = train(world, make(name), 4, make_net=MixedNet)
        compare(world, model, expected, name)
        method.close()
    for name in (*LOSSY, *DRIFTING):
        model, method = train(world, make(name), 3, make_net=MixedNet)
        assert all(parameter.isfinite().all() for parameter in model.parameters()), name
        if name not in DRIFTING:
            check_identical(world, model)
        method.close()


def bytes_are_those_of_the_formula(world: World) -> None:
    """A message's payload, by name, in bytes: `count` numbers of 32 bits in tensors of `sizes`."""
    sizes = [parameter.numel() for parameter in Net().parameters()]
    count, ring, everywhere = sum(sizes), 2 * (world.size - 1) / world.size, world.size - 1
    largest = sum(max(1, int(0.01 * size)) for size in sizes)
    payloads: dict[str, tuple[float, float]] = {
        "bsp": (4 * count, ring),
        "mgwfbp": (4 * count, ring),
        "fp16": (2 * count, ring),
        "bf16": (2 * count, ring),
        "signsgd-mv": (-(-count // 8), everywhere),
        "ef-signsgd": (-(-count // 8) + 4 * len(sizes), everywhere),
        "topk": (8 * largest, everywhere),
        "eftopk": (8 * largest, everywhere),
        "qsgd": (count + 4 * -(-count // 512), everywhere),
    }
    for name, (size, factor) in payloads.items():
        _, method = train(world, make(name), 3)
        figures = method.stats()
        assert figures["bytes"] == 3 * size, (name, figures)
        assert abs(figures["wire_bytes"] - factor * 3 * size) < 1e-6 * size, (name, figures)
        method.close()
    _, method = train(world, make("powersgd", rank="1"), 3)
    shapes = [parameter.shape for parameter in Net().parameters() if parameter.dim() == 2]
    # Matrices that rank 1 does not make smaller by half travel as they are.
    thin = [(rows, columns) for rows, columns in shapes if 2 * (rows + columns) < rows * columns]
    plain = count - sum(rows * columns for rows, columns in thin)
    assert method.stats()["bytes"] == 3 * 4 * (sum(rows + columns for rows, columns in thin) + plain), shapes
    method.close()


def a_resumed_training_goes_on_as_if_it_had_not_stopped(world: World) -> None:
    """For so many updates that outer steps come before and after the end, too."""
    options: dict[str, dict[str, str]] = {"slowmo": {"steps": "2"}, "diloco": {"steps": "2"}}
    for name in ("eftopk", "dgc", "powersgd", "qsgd", "bytescheduler", *DRIFTING):
        _, first = train(world, make(name, **options.get(name, {})), 4)
        state = save(world, first)
        with first.consensus():
            own = copy.deepcopy(first.own_state())
        rest, method = train(world, make(name, **options.get(name, {})), 3, start=4, state=state, own=own or None)
        again, other = train(world, make(name, **options.get(name, {})), 7, consensus_after=3)
        with other.consensus(), method.consensus():
            for one, two in zip(rest.parameters(), again.parameters(), strict=True):
                assert torch.equal(one, two), (name, float((one - two).detach().abs().max()))
        for each in (first, method, other):
            each.close()


def what_a_method_keeps_of_the_weights_follows_the_model_of_a_checkpoint(world: World) -> None:
    """Where the ranks' own states are not there, as after a change of their number."""
    _, first = train(world, make("localsgd"), 4)
    state = save(world, first)
    averaged = copy.deepcopy(first.model.state_dict())

    def make_loaded() -> nn.Module:
        net = Net()
        net.load_state_dict(averaged)
        return net

    for name, options in (("slowmo", {"steps": "2"}), ("diloco", {"steps": "2"}), ("choco", {})):
        rest, method = train(world, make(name, **options), 3, start=4, state=state)
        again, other = train(world, make(name, **options), 3, start=4, state=state, make_net=make_loaded)
        for one, two in zip(rest.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, two), (name, float((one - two).detach().abs().max()))
        for each in (method, other):
            each.close()
    first.close()


def another_number_of_ranks_shares_what_was_not_sent(world: World) -> None:
    """Residuals and velocities of all ranks before add up to those of all ranks now."""
    for name in ("eftopk", "dgc"):
        _, method = train(world, make(name), 1)
        before = [
            {
                kind: {key: tensor * 0 + number for key, tensor in found.items()}
                for kind, found in method.own_state().items()
            }
            for number in range(1, 6)
        ]
        method.load_other_states(before)
        for found in method.own_state().values():
            for key, tensor in found.items():
                total = world.all_reduce(tensor.clone())
                torch.testing.assert_close(total, torch.full_like(total, 15.0), msg=f"{name} {key}")
        method.close()


def torchs_engines_go_on_from_a_checkpoint(world: World) -> None:
    for name in [one.name for one in list_possible(world.size) if one.name in ("zero1", "fsdp2", "hsdp")]:
        _, first = train(world, make(name), 3, make_net=PlainNet)
        state = save(world, first)
        rest, _ = train(world, make(name), 2, make_net=PlainNet, start=3, state=state)
        again, _ = train(world, make(name), 5, make_net=PlainNet)
        for (key, one), two in zip(rest.named_parameters(), again.parameters(), strict=True):
            torch.testing.assert_close(_whole(one), _whole(two), rtol=1e-5, atol=1e-6, msg=f"{name} {key}")


def a_sharded_optimizer_and_a_whole_one_go_on_from_each_other(world: World) -> None:
    again, _ = train(world, make("ddp"), 5, make_net=PlainNet)
    for before, after in (("ddp", "zero1"), ("zero1", "ddp")):
        _, first = train(world, make(before), 3, make_net=PlainNet)
        state = save(world, first)
        rest, _ = train(world, make(after), 2, make_net=PlainNet, start=3, state=state)
        for (key, one), two in zip(rest.named_parameters(), again.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6, msg=f"{before} {after} {key}")


def the_optimizer_keeps_the_settings_of_the_run_that_goes_on(world: World) -> None:
    """dgc has the momentum itself: it must not come back from the checkpoint of another method, nor get lost in one."""
    for before, after, momentum in (("bsp", "dgc", 0.0), ("dgc", "bsp", 0.9)):
        _, first = train(world, make(before), 2)
        _, method = train(world, make(after), 1, start=2, state=save(world, first))
        assert {group["momentum"] for group in method.optimizer.param_groups} == {momentum}, (before, after)
        for each in (first, method):
            each.close()


def save(world: World, method: Method) -> Path:
    """A checkpoint of model and optimizer."""
    place = Path(world.contract.output_dir).parent / f"checkpoint-{next(NUMBERS)}"
    with method.consensus():
        save_model(place, collect_model(method), is_sharded(method))
    world.barrier()
    return place


def replicas_that_drift_have_a_distance_and_others_are_equal(world: World) -> None:
    for name in ("noop", "fusion", "dpsgd", "localsgd"):
        _, method = train(world, make(name), 3)
        with method.consensus():
            distance = method.check_replicas()
        assert (distance is None) == (name == "fusion"), (name, distance)
        assert name != "noop" or (distance or 0) > 0, distance
        method.close()


# --- faults: each is made in the transport, as a broken network or a bug would make it --------------------------------


def a_falsified_message_is_found(world: World) -> None:
    """One number of one message of one rank."""
    for name in ("fusion", "wfbp", "dear", "fp16", "eftopk", "powersgd", "ef-signsgd"):

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

    _expect_found(world, "fusion", mistake)


def _expect_found(world: World, name: str, fault: Callable[[Message], None]) -> None:
    def break_it(method: Method) -> None:
        assert isinstance(method, Bucketed)
        send = method.send

        def send_broken(message: Message) -> Finish:
            fault(message)
            return send(message)

        method.send = send_broken  # type: ignore[method-assign]

    with pytest.raises(WrongResultError, match="self-check"):
        check_method(world, make(name), break_it)


def a_rank_that_gets_another_result_is_found(world: World) -> None:
    """Signs without feedback have no sum to hold them to, but all ranks must have the same."""

    def break_it(method: Method) -> None:
        assert isinstance(method, Compressed)
        exchange = method.exchange

        def exchange_broken(
            names: Sequence[str], tensors: Sequence[Tensor], seed: int
        ) -> tuple[list[Tensor], list[Tensor]]:
            sums, own = exchange(names, tensors, seed)
            return [-part for part in sums] if world.rank == 1 else sums, own

        method.exchange = exchange_broken  # type: ignore[method-assign]

    for name in ("signsgd-mv", "qsgd", "topk"):
        with pytest.raises(WrongResultError, match="rank 1 differs"):
            check_method(world, make(name), break_it)


def an_overflow_that_is_not_seen_is_found(world: World) -> None:
    def break_it(method: Method) -> None:
        apply = method.apply

        def apply_blindly(rate: float, clip: float | None) -> bool:
            method._scale = None
            return apply(rate, clip)

        method.apply = apply_blindly  # type: ignore[method-assign]

    for name in ("fusion", "eftopk", "localsgd"):
        with pytest.raises(WrongResultError, match="overflow must be skipped"):
            check_method(world, make(name), break_it)


def a_message_is_under_way_until_it_arrives(world: World) -> None:
    """Not until somebody waits for it."""
    _, method = train(world, make("fusion"), 1)
    before = method.stats()["communication_seconds"]
    world.gather([0.0])  # both start it at the same time, as far as a busy machine lets them
    pending = method.link.start_all_reduce(torch.zeros(8))
    time.sleep(3)
    pending.wait()
    assert method.stats()["communication_seconds"] - before < 2.5
    method.close()


def a_slow_rank_is_waited_for(world: World) -> None:
    expected, _ = train(world, MeanByHand(), 3)
    method = make("fusion")
    begin = method.begin

    def begin_late(weight: float, total: float, passes: int = 1, scale: LossScale | None = None) -> None:
        time.sleep(0.5 if world.rank == 1 else 0)  # longer than a busy machine holds up rank 0
        begin(weight, total, passes, scale)

    method.begin = begin_late  # type: ignore[method-assign]
    model, method = train(world, method, 3)
    compare(world, model, expected, "slow")
    waited = [row[0] for row in world.gather([method.stats()["exposed_seconds"]])]
    assert waited[0] > waited[1], waited
    method.close()


CHECKS: list[Callable[[World], None]] = [
    every_method_passes_the_self_check,
    the_methods_of_the_how_to_pass_the_self_check,
    dense_methods_train_as_the_mean_by_hand,
    torchs_engines_train_as_the_mean_by_hand,
    parameters_of_several_types_share_no_message,
    bytes_are_those_of_the_formula,
    a_resumed_training_goes_on_as_if_it_had_not_stopped,
    what_a_method_keeps_of_the_weights_follows_the_model_of_a_checkpoint,
    another_number_of_ranks_shares_what_was_not_sent,
    torchs_engines_go_on_from_a_checkpoint,
    a_sharded_optimizer_and_a_whole_one_go_on_from_each_other,
    the_optimizer_keeps_the_settings_of_the_run_that_goes_on,
    replicas_that_drift_have_a_distance_and_others_are_equal,
    a_falsified_message_is_found,
    a_lost_message_is_found,
    a_message_of_the_wrong_rank_is_found,
    a_rank_that_gets_another_result_is_found,
    an_overflow_that_is_not_seen_is_found,
    a_message_is_under_way_until_it_arrives,
    a_slow_rank_is_waited_for,
]


def main(contract: Contract) -> None:
    world = open_world(contract, rendezvous_seconds=60)
    names = contract.parameters.get("checks")
    for each in (check for check in CHECKS if names is None or check.__name__ in names):
        try:
            each(world)
        except Exception:
            traceback.print_exc()
            sys.exit(1)
        print("OK", each.__name__, flush=True)
    world.close()


if __name__ == "__main__":
    run(main)
