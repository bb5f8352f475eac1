"""The process group of the backend mpi over a library in memory: what it passes to MPI, and what torch gets back.

The library's ranks are threads, its operations numpy's, and its buffers the memory of the tensors, as for MPI. Like
MPI, it refuses types without an operation, and buffers that overlap. Real MPI is in the contract tests.
"""

import ctypes
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from functools import reduce
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from task_images.comm import mpi_group
from task_images.comm.mpi_group import MpiGroup
from tests.unit.task_images.comm.threads import SECONDS, Meeting

TYPES = {
    "FLOAT": "f4",
    "DOUBLE": "f8",
    "INT8_T": "i1",
    "UINT8_T": "u1",
    "INT16_T": "i2",
    "INT32_T": "i4",
    "INT64_T": "i8",
    "C_FLOAT_COMPLEX": "c8",
    "C_DOUBLE_COMPLEX": "c16",
}
OPERATIONS = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
BYTE, IN_PLACE = np.dtype("u1"), "in place"


class Status:
    source = -1

    def Get_source(self) -> int:
        return self.source


class Library:
    """What mpi4py.MPI has. `addresses` are those of which a buffer was made."""

    BYTE, IN_PLACE, Status = BYTE, IN_PLACE, Status

    def __init__(self) -> None:
        self.addresses: list[tuple[int, int]] = []
        self.buffer = SimpleNamespace(fromaddress=self._from_address)
        for name, kind in TYPES.items():
            setattr(self, name, np.dtype(kind))
        for name, operation in OPERATIONS.items():
            setattr(self, name, operation)

    def _from_address(self, address: int, size: int) -> Any:
        self.addresses.append((address, size))
        if not size:
            return np.empty(0, np.uint8)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


class Communicator:
    """One rank's communicator."""

    def __init__(self, rank: int, size: int, meeting: Meeting, posted: dict[tuple[int, int, int], deque[Any]]) -> None:
        self.rank, self.size, self.meeting, self.posted = rank, size, meeting, posted
        self.freed = 0

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Free(self) -> None:
        self.freed += 1

    def Barrier(self) -> None:
        self.meeting.gather(self.rank, None)

    def Allreduce(self, send: Any, receive: Any, operation: Any) -> None:
        assert send is IN_PLACE
        own = view(receive)
        own[:] = reduce(operation, self._gather(own))

    def Reduce(self, send: Any, receive: Any, operation: Any, root: int) -> None:
        own = view(receive if send is IN_PLACE else send)
        found = self._gather(own)
        assert (send is IN_PLACE) == (self.rank == root)
        assert (receive is None) == (self.rank != root)
        if self.rank == root:
            own[:] = reduce(operation, found)

    def Reduce_scatter(self, send: Any, receive: Any, counts: list[int], operation: Any) -> None:
        own, output = view(send), view(receive)
        assert sum(counts) == len(own)
        start = sum(counts[: self.rank])
        output[:] = reduce(operation, self._gather(own))[start : start + counts[self.rank]]

    def Reduce_scatter_block(self, send: Any, receive: Any, operation: Any) -> None:
        own, output = view(send), view(receive)
        assert not np.shares_memory(own, output)
        output[:] = reduce(operation, self._gather(own)).reshape(self.size, -1)[self.rank]

    def Bcast(self, buffer: Any, root: int) -> None:
        own = view(buffer)
        own[:] = self._gather(own)[root]

    def Allgather(self, send: Any, receive: Any) -> None:
        own, output = view(send), view(receive)
        assert not np.shares_memory(own, output)
        output[:] = np.concatenate(self._gather(own))

    def Allgatherv(self, send: Any, receive: Any) -> None:
        found = self._gather(view(send))
        output, counts, _ = receive
        assert counts == [len(one) for one in found]
        output[:] = np.concatenate(found)

    def Gatherv(self, send: Any, receive: Any, root: int) -> None:
        found = self._gather(view(send))
        assert (receive is None) == (self.rank != root)
        if receive is not None:
            output, counts, _ = receive
            assert counts == [len(one) for one in found]
            output[:] = np.concatenate(found)

    def Scatterv(self, send: Any, receive: Any, root: int) -> None:
        assert (send is None) == (self.rank != root)
        parts = None if send is None else split(*send[:2])
        view(receive)[:] = self.meeting.gather(self.rank, parts)[root][self.rank]

    def Alltoallv(self, send: Any, receive: Any) -> None:
        assert not np.shares_memory(send[0], receive[0])
        found = [parts[self.rank] for parts in self.meeting.gather(self.rank, split(*send[:2]))]
        output, counts, _ = receive
        assert counts == [len(one) for one in found]
        output[:] = np.concatenate(found)

    def Isend(self, buffer: Any, peer: int, tag: int) -> Any:
        self.posted[self.rank, peer, tag].append(view(buffer).copy())
        return SimpleNamespace(Wait=lambda status: None, Test=lambda status: True)

    def Irecv(self, buffer: Any, peer: int, tag: int) -> Any:
        def wait(status: Status) -> None:
            while not self.posted[peer, self.rank, tag]:
                threading.Event().wait(0.001)
            self._receive(buffer, peer, tag, status)

        return SimpleNamespace(Wait=wait)

    def Improbe(self, peer: int, tag: int) -> Any:
        if not self.posted[peer, self.rank, tag]:
            return None
        return SimpleNamespace(Recv=lambda buffer, status: self._receive(buffer, peer, tag, status))

    def _receive(self, buffer: Any, peer: int, tag: int, status: Status) -> None:
        view(buffer)[:] = self.posted[peer, self.rank, tag].popleft()
        status.source = peer

    def _gather(self, own: Any) -> list[Any]:
        return self.meeting.gather(self.rank, own.copy())


def view(buffer: Any) -> Any:
    """The memory of a buffer [bytes, type] as MPI reads it."""
    memory, kind = buffer
    return memory.view(kind)


def split(memory: Any, counts: list[int]) -> list[Any]:
    assert sum(counts) == len(memory)
    return [part.copy() for part in np.split(memory, np.cumsum(counts)[:-1])]


def run(size: int, body: Callable[[MpiGroup, int], Any]) -> list[Any]:
    """`body` on each of `size` ranks, with its group and number; returns what each returned."""
    meeting, found = Meeting(size), [None] * size
    posted: dict[tuple[int, int, int], deque[Any]] = defaultdict(deque)
    failures: list[BaseException] = []

    def call(rank: int) -> None:
        group = MpiGroup(Library(), Communicator(rank, size, meeting, posted), set())
        try:
            found[rank] = body(group, rank)
        except BaseException as error:
            failures.append(error)
            meeting.abort()
        finally:
            group._thread.close()

    threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    if failures:
        raise next((error for error in failures if not isinstance(error, threading.BrokenBarrierError)), failures[0])
    return found


def ask(kind: Any, op: Any = dist.ReduceOp.SUM, root: int = 0, is_async: bool = False) -> Any:
    """torch's options of a call."""
    made = kind()
    made.asyncOp = is_async
    if hasattr(made, "reduceOp"):
        made.reduceOp = op
    if hasattr(made, "rootRank"):
        made.rootRank = root
    return made


def all_reduced(rows: list[list[float]], kind: torch.dtype, op: Any = dist.ReduceOp.SUM) -> tuple[list[Any], set[str]]:
    """What the last rank gets if rank N brings row N, and the detours."""

    def body(group: MpiGroup, rank: int) -> tuple[list[Any], set[str]]:
        tensor = torch.tensor(rows[rank], dtype=kind)
        assert group.allreduce([tensor], ask(dist.AllreduceOptions, op)).is_completed()
        assert tensor.dtype is kind
        return tensor.tolist(), group._detours

    found: tuple[list[Any], set[str]] = run(len(rows), body)[-1]
    return found


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, [6, 0]),
        (dist.ReduceOp.AVG, [2, 0]),
        (dist.ReduceOp.PRODUCT, [6, 12]),
        (dist.ReduceOp.MIN, [1, -4]),
        (dist.ReduceOp.MAX, [3, 3]),
    ],
)
@pytest.mark.parametrize(
    "kind", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int64]
)
def test_all_ranks_get_the_reduction(op: Any, expected: list[int], kind: torch.dtype) -> None:
    if op == dist.ReduceOp.PRODUCT:
        rows = [[1.0, 3.0], [2.0, -4.0], [3.0, -1.0]]
    elif op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        rows = [[2.0, 3.0], [1.0, -4.0], [3.0, -1.0]]
    else:
        rows = [[1.0, 3.0], [2.0, -4.0], [3.0, 1.0]]
    found, detours = all_reduced(rows, kind, op)
    assert found == expected
    word = str(kind).removeprefix("torch.")
    assert detours == ({f"{word} reduced as float32"} if "float16" in word else set())


@pytest.mark.parametrize(("op", "expected"), [(dist.ReduceOp.BAND, 4), (dist.ReduceOp.BOR, 7), (dist.ReduceOp.BXOR, 3)])
@pytest.mark.parametrize("kind", [torch.uint8, torch.int32])
def test_bits_are_combined(op: Any, expected: int, kind: torch.dtype) -> None:
    assert all_reduced([[6.0], [5.0]], kind, op) == ([expected], set())


@pytest.mark.parametrize("kind", [torch.complex64, torch.complex128])
def test_complex_numbers_are_summed_and_averaged(kind: torch.dtype) -> None:
    rows: list[list[Any]] = [[1 + 2j], [3 - 4j]]
    assert all_reduced(rows, kind) == ([4 - 2j], set())
    assert all_reduced(rows, kind, dist.ReduceOp.AVG) == ([2 - 1j], set())


def test_half_precision_is_rounded_once_and_not_after_every_term() -> None:
    """2048 + 1 is 2048 in fp16: a sum in fp16 would lose both ones."""
    assert all_reduced([[2048.0], [1.0], [1.0]], torch.float16)[0] == [2050.0]
    assert all_reduced([[256.0], [1.0], [1.0]], torch.bfloat16)[0] == [258.0]


def test_truth_values_are_true_where_any_rank_has_them() -> None:
    found, detours = all_reduced([[1, 0, 1], [1, 0, 0]], torch.bool)
    assert found == [True, False, True]
    assert detours == {"bool reduced as int32"}


def test_a_mean_of_integers_is_cut_off_towards_zero() -> None:
    """As torch's own backends do."""
    assert all_reduced([[7, -7, 8], [0, 0, 0]], torch.int32, dist.ReduceOp.AVG)[0] == [3, -3, 4]


def test_types_and_reductions_that_mpi_lacks_are_named() -> None:
    with pytest.raises(ValueError, match=r"the backend mpi cannot reduce tensors of type torch\.float8_e4m3fn"):
        all_reduced([[1.0]], torch.float8_e4m3fn)
    opts = SimpleNamespace(asyncOp=False, reduceOp=SimpleNamespace(op=dist.ReduceOp.PREMUL_SUM))
    group, _, _ = alone()
    with pytest.raises(ValueError, match="the backend mpi has no reduction"):
        group.allreduce([torch.ones(1)], opts)


def test_a_column_is_reduced_in_its_place() -> None:
    def body(group: MpiGroup, rank: int) -> list[list[float]]:
        table = torch.tensor([[1.0, 10.0], [2.0, 20.0]]) * (rank + 1)
        group.allreduce([table[:, 0]], ask(dist.AllreduceOptions))
        return table.tolist()

    assert run(2, body) == [[[3.0, 10.0], [6.0, 20.0]], [[3.0, 20.0], [6.0, 40.0]]]


@pytest.mark.parametrize("is_coalesced", [False, True])
def test_several_tensors_are_reduced_by_one_call(is_coalesced: bool) -> None:
    def body(group: MpiGroup, rank: int) -> list[list[float]]:
        tensors = [torch.full((2,), rank + 1.0), torch.full((1,), 10.0 * rank)]
        call = group.allreduce_coalesced if is_coalesced else group.allreduce
        call(tensors, ask(dist.AllreduceOptions))
        return [tensor.tolist() for tensor in tensors]

    assert run(3, body) == [[[6.0, 6.0], [30.0]]] * 3


def test_a_call_with_a_tensor_that_requires_gradients_changes_its_values() -> None:
    def body(group: MpiGroup, rank: int) -> list[float]:
        leaf = torch.full((2,), rank + 1.0, requires_grad=True)
        group.allreduce([leaf], ask(dist.AllreduceOptions, dist.ReduceOp.AVG))
        half = torch.full((2,), rank + 1.0, dtype=torch.float16, requires_grad=True)
        group.allreduce([half], ask(dist.AllreduceOptions, dist.ReduceOp.AVG))
        return leaf.tolist() + half.tolist()

    assert run(2, body) == [[1.5] * 4] * 2


@pytest.mark.parametrize(("op", "expected"), [(dist.ReduceOp.SUM, 6.0), (dist.ReduceOp.AVG, 2.0)])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_only_the_root_gets_a_reduction_to_it(op: Any, expected: float, kind: torch.dtype) -> None:
    def body(group: MpiGroup, rank: int) -> float:
        tensor = torch.tensor([rank + 1.0], dtype=kind)
        group.reduce([tensor], ask(dist.ReduceOptions, op, root=1))
        return tensor.item()

    assert run(3, body) == [1.0, expected, 3.0]


@pytest.mark.parametrize(("op", "divisor"), [(dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, 2)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_each_rank_gets_its_part_of_a_sum_whatever_the_sizes_of_parts(op: Any, divisor: int, kind: torch.dtype) -> None:
    def body(group: MpiGroup, rank: int) -> list[float]:
        parts = [torch.tensor([1.0, 2.0, 3.0], dtype=kind) * (rank + 1), torch.tensor([[10.0]], dtype=kind)]
        output = torch.empty(parts[rank].shape, dtype=kind)
        group.reduce_scatter([output], [parts], ask(dist.ReduceScatterOptions, op))
        return output.flatten().tolist()

    assert run(2, body) == [[3.0 / divisor, 6.0 / divisor, 9.0 / divisor], [20.0 / divisor]]


@pytest.mark.parametrize(("op", "divisor"), [(dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, 2)])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_each_rank_gets_its_part_of_a_joined_sum(op: Any, divisor: int, kind: torch.dtype) -> None:
    def body(group: MpiGroup, rank: int) -> tuple[list[float], list[float]]:
        given = torch.arange(4).to(kind) * (rank + 1)
        output = torch.empty(2, dtype=kind)
        group._reduce_scatter_base(output, given, ask(dist.ReduceScatterOptions, op))
        return output.tolist(), given.tolist()

    (first, kept), (second, _) = run(2, body)
    assert first == [0.0, 3.0 / divisor]
    assert second == [6.0 / divisor, 9.0 / divisor]
    assert kept == [0.0, 1.0, 2.0, 3.0]


def test_a_sum_may_be_written_over_its_input_by_way_of_a_copy() -> None:
    """torch allows what MPI forbids: the output is a part of the input."""

    def body(group: MpiGroup, rank: int) -> tuple[list[float], set[str]]:
        given = torch.tensor([1.0, 2.0, 3.0, 4.0])
        group._reduce_scatter_base(given[2 * rank : 2 * rank + 2], given, ask(dist.ReduceScatterOptions))
        return given.tolist(), group._detours

    copied = {"input copied if it shares memory with the output"}
    assert run(2, body) == [([2.0, 4.0, 3.0, 4.0], copied), ([1.0, 2.0, 6.0, 8.0], copied)]


def test_neighboring_memory_is_not_copied() -> None:
    """The output begins where the input ends, or ends where it begins."""

    def body(group: MpiGroup, rank: int) -> tuple[list[float], set[str]]:
        memory = torch.ones(6)
        group._reduce_scatter_base(memory[4:], memory[:4], ask(dist.ReduceScatterOptions))
        group._reduce_scatter_base(memory[:2], memory[2:], ask(dist.ReduceScatterOptions))
        return memory.tolist(), group._detours

    assert run(2, body) == [([2.0, 2.0, 1.0, 1.0, 2.0, 2.0], set()), ([4.0, 4.0, 1.0, 1.0, 2.0, 2.0], set())]


def test_pairs_of_joined_tensors_are_scattered_and_gathered_in_one_call() -> None:
    def body(group: MpiGroup, rank: int) -> tuple[list[Any], list[Any]]:
        inputs = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]) * (rank + 1)]
        parts = [torch.empty(1), torch.empty(1)]
        opts = ask(dist.ReduceScatterOptions)
        assert group.reduce_scatter_tensor_coalesced(parts, inputs, opts).is_completed()
        wholes = [torch.empty(2), torch.empty(2)]
        assert group.allgather_into_tensor_coalesced(wholes, parts, ask(AllgatherOptions)).is_completed()
        assert group.reduce_scatter_tensor_coalesced([], [], opts).is_completed()
        return [one.tolist() for one in parts], [one.tolist() for one in wholes]

    assert run(2, body) == [([[2.0], [9.0]], [[2.0, 4.0], [9.0, 12.0]]), ([[4.0], [12.0]], [[2.0, 4.0], [9.0, 12.0]])]


# --- transfers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_a_broadcast_is_of_bytes_of_any_type(root: int, kind: torch.dtype) -> None:
    def body(group: MpiGroup, rank: int) -> list[Any]:
        tensor = torch.tensor([rank, 0, 1]).to(kind)
        table = torch.full((2, 2), rank).to(kind)
        group.broadcast([tensor, table[:, 1]], ask(dist.BroadcastOptions, root=root))
        assert table[:, 0].tolist() == torch.full((2,), rank).to(kind).tolist()
        return [*tensor.tolist(), *table[:, 1].tolist()]

    expected = torch.tensor([root, 0, 1, root, root]).to(kind).tolist()
    assert run(3, body) == [expected] * 3


def test_parts_of_several_sizes_are_gathered_everywhere_or_at_the_root() -> None:
    sizes = [2, 0, 3]

    def body(group: MpiGroup, rank: int) -> tuple[list[list[int]], list[list[int]]]:
        own = torch.full((sizes[rank],), rank + 1)
        everywhere = [torch.zeros(size, dtype=torch.int64) for size in sizes]
        group.allgather([everywhere], [own], ask(AllgatherOptions))
        at_root = [torch.zeros(size, dtype=torch.int64) for size in sizes]
        group.gather([at_root] if rank == 2 else [], [own], ask(dist.GatherOptions, root=2))
        return [one.tolist() for one in everywhere], [one.tolist() for one in at_root]

    parts = [[1, 1], [], [3, 3, 3]]
    nothing = [[0, 0], [], [0, 0, 0]]
    assert run(3, body) == [(parts, nothing), (parts, nothing), (parts, parts)]


def test_joined_tensors_are_gathered_also_into_the_memory_they_are_part_of() -> None:
    def body(group: MpiGroup, rank: int) -> tuple[list[float], list[float], set[str]]:
        output = torch.empty(4, dtype=torch.float16)
        group._allgather_base(output, torch.full((2,), rank + 1.0, dtype=torch.float16), ask(AllgatherOptions))
        assert not group._detours
        whole = torch.zeros(4)
        whole[2 * rank : 2 * rank + 2] = rank + 5.0
        group._allgather_base(whole, whole[2 * rank : 2 * rank + 2], ask(AllgatherOptions))
        return output.tolist(), whole.tolist(), group._detours

    copied = {"input copied if it shares memory with the output"}
    assert run(2, body) == [([1.0, 1.0, 2.0, 2.0], [5.0, 5.0, 6.0, 6.0], copied)] * 2


def test_gathering_into_columns_leaves_the_others_alone() -> None:
    def body(group: MpiGroup, rank: int) -> list[list[float]]:
        table = torch.zeros(2, 2)
        group._allgather_base(table[:, 1], torch.tensor([rank + 1.0]), ask(AllgatherOptions))
        return table.tolist()

    assert run(2, body) == [[[0.0, 1.0], [0.0, 2.0]]] * 2


def test_the_root_scatters_parts_of_several_shapes() -> None:
    shapes = [(2,), (1, 3)]

    def body(group: MpiGroup, rank: int) -> list[float]:
        output = torch.zeros(shapes[rank])
        parts = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 4.0, 5.0]])]
        group.scatter([output], [parts] if rank == 1 else [], ask(dist.ScatterOptions, root=1))
        return output.flatten().tolist()

    assert run(2, body) == [[1.0, 2.0], [3.0, 4.0, 5.0]]


def test_every_rank_sends_a_part_to_every_rank() -> None:
    def body(group: MpiGroup, rank: int) -> list[list[int]]:
        # Rank N sends N + M elements to rank M.
        inputs = [torch.full((rank + peer,), 10 * rank + peer) for peer in range(3)]
        outputs = [torch.empty(rank + peer, dtype=torch.int64) for peer in range(3)]
        group.alltoall(outputs, inputs, ask(dist.AllToAllOptions))
        return [one.tolist() for one in outputs]

    assert run(3, body) == [
        [[], [10], [20, 20]],
        [[1], [11, 11], [21, 21, 21]],
        [[2, 2], [12, 12, 12], [22, 22, 22, 22]],
    ]


def test_joined_tensors_are_exchanged_evenly_or_by_rows() -> None:
    def body(group: MpiGroup, rank: int) -> tuple[list[float], list[list[float]]]:
        given = torch.arange(4.0) + 10 * rank
        even = torch.empty(4)
        group.alltoall_base(even, given, [], [], ask(dist.AllToAllOptions))
        # Rows of two: rank 0 keeps one and sends two, rank 1 sends all of its two.
        rows = torch.arange(6.0 if rank == 0 else 4.0).reshape(-1, 2) + 10 * rank
        output = torch.empty(3 if rank == 0 else 2, 2)
        counts = ([1, 2], [1, 2]) if rank == 0 else ([2, 0], [2, 0])
        group.alltoall_base(output, rows, *counts, ask(dist.AllToAllOptions))
        return even.tolist(), output.tolist()

    first, second = run(2, body)
    assert first == ([0.0, 1.0, 10.0, 11.0], [[0.0, 1.0], [10.0, 11.0], [12.0, 13.0]])
    assert second == ([2.0, 3.0, 12.0, 13.0], [[2.0, 3.0], [4.0, 5.0]])


def test_an_exchange_may_be_written_over_its_input() -> None:
    def body(group: MpiGroup, rank: int) -> tuple[list[float], int]:
        given = torch.tensor([1.0, 2.0]) + 10 * rank
        group.alltoall_base(given, given, [], [], ask(dist.AllToAllOptions))
        return given.tolist(), len(group._detours)

    assert run(2, body) == [([1.0, 11.0], 1), ([2.0, 12.0], 1)]


def test_a_message_reaches_the_rank_and_tag_it_is_for() -> None:
    def body(group: MpiGroup, rank: int) -> list[float]:
        if rank == 0:
            group.send([torch.tensor([1.0, 2.0])], 1, 5)
            group.send([torch.tensor([[3.0, 9.0], [4.0, 9.0]])[:, 0]], 1, 7)
            return []
        second, table = torch.empty(2), torch.zeros(2, 2)
        assert group.recv([second], 0, 7).wait()
        work = group.recv([table[:, 1]], 0, 5)
        assert work.wait()
        assert work._source_rank() == 0
        return [*second.tolist(), *table.flatten().tolist()]

    assert run(2, body)[1] == [3.0, 4.0, 0.0, 1.0, 0.0, 2.0]


def test_a_message_of_whichever_rank_is_received_with_its_sender() -> None:
    def body(group: MpiGroup, rank: int) -> tuple[list[float], int] | None:
        if rank == 2:
            group.send([torch.tensor([7.0])], 1, 3)
        if rank != 1:
            return None
        table = torch.zeros(1, 2)
        work = group.recv_anysource([table[:, 1]], 3)
        assert work.wait()
        return table.flatten().tolist(), work._source_rank()

    assert run(3, body)[1] == ([0.0, 7.0], 2)


def test_a_rank_does_not_wait_for_a_message_of_its_own() -> None:
    group = MpiGroup(Library(), Communicator(1, 3, Meeting(3), defaultdict(deque)), set())
    awaited: Any = group.recv_anysource([torch.zeros(1)])
    assert awaited._sources == [0, 2]


# --- threads, buffers and the end ---------------------------------------------------------------------------------


def alone(after: Callable[[], None] | None = None) -> tuple[MpiGroup, Any, Any]:
    """A group of one rank, its library and its communicator."""
    library, communicator = Library(), Communicator(0, 1, Meeting(1), defaultdict(deque))
    return MpiGroup(library, communicator, set(), after), library, communicator


def test_asynchronous_calls_run_in_the_groups_thread_and_synchronous_ones_after_them_in_the_callers() -> None:
    group, _, communicator = alone()
    order: list[tuple[str, int]] = []
    gate = threading.Event()
    plain = communicator.Allreduce

    def reduce_slowly(send: Any, receive: Any, operation: Any) -> None:
        if threading.current_thread().name == "mpi":
            gate.wait(SECONDS)
        order.append((threading.current_thread().name, len(view(receive))))
        plain(send, receive, operation)

    group._comm.Allreduce = group._allreduce = reduce_slowly
    tensors = [torch.ones(number) for number in (1, 2, 3, 4)]
    first = group.allreduce([tensors[0]])  # without options, as torch's reducer calls
    second = group.allreduce([tensors[1]], ask(dist.AllreduceOptions, is_async=True))
    assert not first.is_completed()
    assert not second.is_completed()
    gate.set()
    own = threading.current_thread().name
    group.allreduce([tensors[2]], ask(dist.AllreduceOptions))
    group.allreduce([tensors[3]], ask(dist.AllreduceOptions, dist.ReduceOp.MAX))
    assert order == [("mpi", 1), ("mpi", 2), (own, 3), (own, 4)]
    assert second.result() == [tensors[1]]
    group.shutdown()


@pytest.mark.parametrize("name", ["reduce", "broadcast"])
def test_other_synchronous_calls_wait_for_the_asynchronous_ones_too(name: str) -> None:
    group, _, _ = alone()
    gate, order = threading.Event(), []
    group._thread.submit(lambda: order.append(gate.wait(SECONDS)), [])
    threading.Timer(0.005, gate.set).start()
    kind = dist.ReduceOptions if name == "reduce" else dist.BroadcastOptions
    getattr(group, name)([torch.ones(1)], ask(kind))
    assert order == [True]
    group.barrier(ask(dist.BarrierOptions))
    assert group.barrier().wait()
    group.shutdown()


def test_the_buffer_of_a_tensor_that_is_reduced_again_is_made_once() -> None:
    group, library, _ = alone()
    tensor, other = torch.ones(3), torch.ones(5)
    for one in (tensor, tensor, other, tensor):
        group.allreduce([one], ask(dist.AllreduceOptions))
    assert library.addresses == [(tensor.data_ptr(), 12), (other.data_ptr(), 20)]
    group.allreduce([tensor.view(torch.int32)], ask(dist.AllreduceOptions))  # the same memory as another type
    assert library.addresses[2:] == [(tensor.data_ptr(), 12)]


def test_old_buffers_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_group, "KEPT_MESSAGES", 2)
    group, library, _ = alone()
    first, second, third = (torch.ones(size) for size in (1, 2, 3))
    for one in (first, second, first, third, first):
        group.allreduce([one], ask(dist.AllreduceOptions))
    sizes = [size for _, size in library.addresses]
    assert sizes == [4, 8, 12, 4]


def test_shutting_down_frees_the_communicator_once_and_then_says_so() -> None:
    ended: list[str] = []
    group, _, communicator = alone(lambda: ended.append("left"))
    group.allreduce([torch.ones(1)], ask(dist.AllreduceOptions, is_async=True))
    thread: Any = group._thread._thread
    assert thread.is_alive()
    group.abort()
    assert not thread.is_alive()
    group.shutdown()
    assert (communicator.freed, ended) == (1, ["left"])
    other, _, _ = alone()
    other.shutdown()


def test_torch_gets_the_groups_name_rank_and_size() -> None:
    def body(group: MpiGroup, rank: int) -> tuple[str, str, int, int]:
        return group.name(), group.getBackendName(), group.rank(), group.size()

    assert run(2, body) == [("mpi", "mpi", 0, 2), ("mpi", "mpi", 1, 2)]


@pytest.mark.parametrize("given", [torch.ones(2), [torch.ones(2)], (torch.ones(2),)])
def test_tensors_are_taken_alone_or_in_sequences(given: Any) -> None:
    assert [one.tolist() for one in mpi_group._as_list(given)] == [[1.0, 1.0]]


def test_lists_of_tensors_are_taken_as_those_of_one_call() -> None:
    one = [torch.ones(1), torch.zeros(1)]
    assert mpi_group._as_nested_list(one) == [one]
    assert mpi_group._as_nested_list([one, one]) == [one, one]
    assert mpi_group._as_nested_list([]) == []


def test_a_tensor_elsewhere_is_copied_through_host_memory_and_that_is_noted() -> None:
    group, _, _ = alone()
    elsewhere: Any = SimpleNamespace(
        is_cpu=False,
        dtype=torch.float32,
        shape=(2,),
        is_contiguous=lambda: True,
        detach=lambda: torch.tensor([1.0, 2.0]),
    )
    for copy in (group._reducible(elsewhere), group._movable(elsewhere)):
        assert copy.tolist() == [1.0, 2.0]
    assert group._detours == {"GPU tensors copied through host memory"}
    empty: Tensor = group._movable(elsewhere, copy=False)
    assert (empty.shape, empty.dtype) == ((2,), torch.float32)
