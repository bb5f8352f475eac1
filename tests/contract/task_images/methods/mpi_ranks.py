"""One rank of a job that takes the mpi backend through its paces and prints one line of JSON. Run by test_mpi.py."""

import json
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from task_images.mpi import group as mpi

os.environ.setdefault("RANK", os.environ.get("PMI_RANK", "0"))
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
EXACT = (torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
meetings = 0
HALF = (torch.float16, torch.bfloat16)


def own(kind: torch.dtype = torch.float32, rank: int = RANK, length: int = 5) -> torch.Tensor:
    """Small whole numbers that differ between ranks: every type holds them and their sums exactly."""
    return (torch.arange(length) + 1 + 2 * rank).to(kind)


def everyone(kind: torch.dtype = torch.float32, length: int = 5) -> list[torch.Tensor]:
    return [own(kind, rank, length) for rank in range(SIZE)]


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    if got.dtype != expected.dtype or not torch.equal(got, expected):
        raise AssertionError(f"rank {RANK}: got {got}, expected {expected}")


def reductions() -> None:
    for kind in (*EXACT, *HALF):
        stack = torch.stack(everyone(kind)).double()
        for op, expected in (
            (dist.ReduceOp.SUM, stack.sum(0)),
            (dist.ReduceOp.MAX, stack.amax(0)),
            (dist.ReduceOp.MIN, stack.amin(0)),
            (dist.ReduceOp.AVG, stack.mean(0)),
        ):
            tensor = own(kind)
            dist.all_reduce(tensor, op)
            same(tensor, expected.to(kind))
    strided = torch.zeros(5, 2)
    strided[:, 0] = own()
    dist.all_reduce(strided[:, 0])
    same(strided, torch.stack([torch.stack(everyone()).sum(0), torch.zeros(5)], 1))
    leaf = own().requires_grad_()
    dist.all_reduce(leaf)
    same(leaf.detach(), torch.stack(everyone()).sum(0))
    tensor = own()
    dist.reduce(tensor, 1)
    if RANK == 1:
        same(tensor, torch.stack(everyone()).sum(0))
    empty = torch.empty(0)
    dist.all_reduce(empty)


def scattered_reductions() -> None:
    for kind in (torch.float32, torch.bfloat16):
        total = torch.stack(everyone(kind, 3 * SIZE)).double().sum(0).to(kind)
        output = torch.empty(3, dtype=kind)
        dist.reduce_scatter_tensor(output, own(kind, length=3 * SIZE))
        same(output, total[3 * RANK : 3 * RANK + 3])
        dist.reduce_scatter_tensor(output, own(kind, length=3 * SIZE), dist.ReduceOp.AVG)
        same(output, (total.double() / SIZE).to(kind)[3 * RANK : 3 * RANK + 3])


def moves() -> None:
    for kind in (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64):
        ranks = everyone(kind)
        tensor = own(kind)
        dist.broadcast(tensor, SIZE - 1)
        same(tensor, ranks[-1])
        parts = [torch.empty_like(row) for row in ranks]
        dist.all_gather(parts, own(kind))
        for got, expected in zip(parts, ranks, strict=True):
            same(got, expected)
        flat = torch.empty(5 * SIZE, dtype=kind)
        dist.all_gather_into_tensor(flat, own(kind))
        same(flat, torch.cat(ranks))
    scalar = [torch.empty(()) for _ in range(SIZE)]
    dist.all_gather(scalar, torch.tensor(float(RANK)))
    same(torch.stack(scalar), torch.arange(SIZE).float())


def exchanges() -> None:
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    got = [torch.empty(5), torch.empty(5, dtype=torch.float16)]
    # Received against the order of sending, which only works if no send blocks.
    works = [dist.isend(own(), right, tag=1), dist.isend(own(torch.float16), right, tag=2)]
    dist.recv(got[1], left, tag=2)
    dist.recv(got[0], left, tag=1)
    for work in works:
        assert work is not None
        work.wait()
    same(got[0], own(rank=left))
    same(got[1], own(torch.float16, left))
    passed = torch.empty(5)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, own(), right), dist.P2POp(dist.irecv, passed, left)]):
        work.wait()
    same(passed, own(rank=left))


def in_place_and_strided() -> None:
    ranks = everyone()
    flat = torch.full((5 * SIZE,), -1.0)
    slot = flat[5 * RANK : 5 * RANK + 5]
    slot.copy_(own())
    dist.all_gather_into_tensor(flat, slot)
    same(flat, torch.cat(ranks))
    buffer = own(length=5 * SIZE)
    dist.reduce_scatter_tensor(buffer[5 * RANK : 5 * RANK + 5], buffer)
    same(buffer[5 * RANK : 5 * RANK + 5], torch.stack(everyone(length=5 * SIZE)).sum(0)[5 * RANK : 5 * RANK + 5])
    # Copies are made of what is strided, and have to live until MPI has read them.
    strided = torch.stack([own(length=50_000), torch.zeros(50_000)], 1)[:, 0]
    gathered = [torch.empty(50_000) for _ in range(SIZE)]
    dist.all_gather(gathered, strided)
    same(torch.stack(gathered), torch.stack(everyone(length=50_000)))


def no_rank_waits_for_one_outside_mpi() -> None:
    """Who has reduced leaves MPI until all have reduced. Where the library had kept something back, this hangs."""
    for length in (1, 100_000):
        for _ in range(5):
            tensor = own(length=length)
            dist.all_reduce(tensor)
            meet_outside()
            dist.broadcast(tensor, SIZE - 1)
            meet_outside()


def meet_outside() -> None:
    """A barrier that knows nothing of MPI."""
    global meetings
    meetings += 1
    store = dist.distributed_c10d._get_default_store()
    if store.add(f"meeting {meetings}", 1) == SIZE:
        store.set(f"meeting {meetings} open", "1")
    store.wait([f"meeting {meetings} open"], timedelta(seconds=20))


def objects_and_order() -> None:
    names: list[Any] = [None] * SIZE
    dist.all_gather_object(names, {"rank": RANK, "pad": "x" * RANK})
    assert [name["rank"] for name in names] == list(range(SIZE))
    box = ["from zero" if RANK == 0 else None]
    dist.broadcast_object_list(box, 0)
    assert box == ["from zero"]
    # Asynchronous ones keep their order among each other and before a synchronous one.
    tensors = [torch.full((50_000,), float(index)) for index in range(6)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    last = torch.ones(1)
    dist.all_reduce(last)
    same(last, torch.full((1,), float(SIZE)))
    for index, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
        work.wait()
        assert work.is_completed()
        same(tensor, torch.full((50_000,), float(index * SIZE)))
    group = dist.new_group([1, 0])
    if RANK < 2:
        assert isinstance(group, dist.ProcessGroup)
        tensor = own()
        dist.all_reduce(tensor, group=group)
        same(tensor, own(rank=0) + own(rank=1))
        dist.destroy_process_group(group)


def below_ddp() -> None:
    """Several buckets, sent from the backward pass; the gradients are those of the whole batch."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    wrapped = nn.parallel.DistributedDataParallel(
        nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]), bucket_cap_mb=0.02
    )
    wrapped.module.load_state_dict(plain.state_dict())
    data = torch.randn(8 * SIZE, 64)
    for _ in range(3):
        plain.zero_grad()
        plain(data).square().mean().backward()
        wrapped.zero_grad()
        wrapped(data[8 * RANK : 8 * RANK + 8]).square().mean().backward()
        for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def refusals() -> None:
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        dist.all_reduce(torch.ones(2, dtype=torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="PRODUCT"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.PRODUCT)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group(mpi.register(), timeout=timedelta(seconds=60))
    if "LEAVE" in os.environ:
        dist.barrier()
        os._exit(9)
    for check in (
        reductions,
        scattered_reductions,
        moves,
        exchanges,
        in_place_and_strided,
        no_rank_waits_for_one_outside_mpi,
        objects_and_order,
        below_ddp,
        refusals,
    ):
        check()
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps({"rank": RANK, "facts": mpi.facts()}))


if __name__ == "__main__":
    main()
