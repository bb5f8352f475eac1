"""One MPI communicator as a torch process group: the collectives and messages of trainings, not all that torch has.

Synchronous collectives run in the caller's thread. Asynchronous ones (e.g. of DistributedDataParallel) run in a thread
of the group, in the order of the calls, so they overlap with computation. Point-to-point messages use MPI's non-
blocking calls.

MPI cannot reduce half precision or bool, so these are summed as float32 or int32. GPU tensors are copied through host
memory. Both are reported as detours.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from task_images.mpi.work import Collective, Message, Thread

KEPT_MESSAGES = 1024

# Types that MPI cannot reduce, and the types used instead.
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.bool: torch.int32}
_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
_SUM = dist.ReduceOp.SUM
_OPS = {
    dist.ReduceOp.SUM: "SUM",
    dist.ReduceOp.AVG: "SUM",
    dist.ReduceOp.PRODUCT: "PROD",
    dist.ReduceOp.MIN: "MIN",
    dist.ReduceOp.MAX: "MAX",
    dist.ReduceOp.BAND: "BAND",
    dist.ReduceOp.BOR: "BOR",
    dist.ReduceOp.BXOR: "BXOR",
}


class MpiGroup(dist.ProcessGroup):
    """One communicator as a process group. Methods have the names and argument orders with which torch calls them."""

    def __init__(
        self, mpi: Any, communicator: Any, detours: set[str], after_shutdown: Callable[[], None] | None = None
    ) -> None:
        super().__init__(communicator.Get_rank(), communicator.Get_size())
        self._comm = communicator
        self._detours = detours
        self._after_shutdown = after_shutdown
        self._own = communicator.Get_rank()
        self._ranks = communicator.Get_size()
        self._thread = Thread()
        self._types = {kind: getattr(mpi, name) for kind, name in _TYPES.items()}
        self._ops = {op: getattr(mpi, name) for op, name in _OPS.items()}
        self._address = mpi.buffer.fromaddress
        self._byte = mpi.BYTE
        self._in_place = mpi.IN_PLACE
        self._sum = (mpi.SUM, False)
        self._mpi_sum = mpi.SUM
        self._allreduce = communicator.Allreduce
        self._messages: dict[tuple[int, int, torch.dtype], list[Any]] = {}
        self._done = Collective(None)
        self._done.future.set_result(None)

    def name(self) -> str:
        """The backend's name, read by torch."""
        return "mpi"

    getBackendName = name

    # torch keeps a group's name and the backends per device in C++, where subclasses cannot set them.

    def _set_group_name(self, name: Any) -> None:
        super()._set_group_name(name)
        self._group_name = name

    @property
    def group_name(self) -> Any:
        """The name that torch assigned to this group."""
        return self._group_name

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def shutdown(self) -> None:
        """End the thread and free the communicator; a second call does nothing."""
        self._thread.close()
        if self._comm:
            self._messages.clear()
            self._comm.Free()
            self._comm = None
            if self._after_shutdown:
                self._after_shutdown()

    abort = shutdown

    # -- reductions: typed, using MPI's operations

    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> dist.Work:
        """Reduce each tensor over ranks, in place."""
        # Fast path for the most common call, a synchronous sum of one tensor: at small sizes each access to `opts` or
        # the tensor is measurable against the bare library.
        if opts is not None and not opts.asyncOp and opts.reduceOp == _SUM and type(tensors) is list:
            tensor = tensors[0]
            if len(tensors) == 1 and tensor.is_cpu and tensor.is_contiguous() and tensor.dtype in self._types:
                place = (tensor.data_ptr(), tensor.nbytes, tensor.dtype)
                message = self._messages.get(place) or self._message_at(place)
                if self._thread.last is not None:
                    self._thread.drain()
                self._allreduce(self._in_place, message, self._mpi_sum)
                return self._done
        tensors = _as_list(tensors)
        op, average = self._reduction(opts)
        if opts is None or opts.asyncOp:
            return self._thread.submit(lambda: self._sum_up(tensors, op, average), tensors)
        self._thread.drain()
        self._sum_up(tensors, op, average)
        return self._done

    def _sum_up(self, tensors: list[Tensor], op: Any, average: bool) -> None:
        for tensor in tensors:
            buffer = self._reducible(tensor)
            self._comm.Allreduce(self._in_place, self._describe_buffer(buffer), op)
            self._return(buffer, tensor, average)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Reduce several tensors over ranks, in place."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None, *_: Any) -> dist.Work:
        """Reduce each tensor to the root `opts.rootRank`; other ranks keep theirs."""
        tensors = _as_list(tensors)
        op, average = self._reduction(opts)
        root = opts.rootRank

        def call() -> None:
            for tensor in tensors:
                buffer = self._reducible(tensor)
                if self._own == root:
                    self._comm.Reduce(self._in_place, self._describe_buffer(buffer), op, root)
                    self._return(buffer, tensor, average)
                else:
                    self._comm.Reduce(self._describe_buffer(buffer), None, op, root)

        return self._run(call, opts, tensors)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        op, average = self._reduction(opts)

        def call() -> None:
            send = self._reducible(input)
            receive = output if self._usable(output, send.dtype) else torch.empty(output.shape, dtype=send.dtype)
            send = self._apart(send, receive)
            self._comm.Reduce_scatter_block(self._describe_buffer(send), self._describe_buffer(receive), op)
            self._return(receive, output, average)

        return self._run(call, opts, [output])

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Reduce-scatter several pairs of joined tensors."""
        return self._each(self._reduce_scatter_base, outputs, inputs, opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]

    # -- transfers: bytes of any type

    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> dist.Work:
        """Overwrite each tensor with the root's."""
        tensors = _as_list(tensors)
        root = opts.rootRank

        def call() -> None:
            for tensor in tensors:
                buffer = self._movable(tensor)
                self._comm.Bcast(self._bytes(buffer), root)
                self._return(buffer, tensor)

        return self._run(call, opts, tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> dist.Work:
        """Gather each input of all ranks into the outputs [ranks]; parts may differ in size."""
        outputs, inputs = _as_nested_list(outputs), _as_list(inputs)

        def call() -> None:
            for parts, tensor in zip(outputs, inputs, strict=True):
                send = self._movable(tensor)  # named, because nothing else references it if it is a copy
                receive, counts = self._room(parts)
                self._comm.Allgatherv(self._bytes(send), [self._span(receive), counts, self._byte])
                self._deal(receive, parts)

        return self._run(call, opts, outputs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gather several tensors of all ranks."""
        return self.allgather(outputs, inputs, opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        def call() -> None:
            receive = self._movable(output, copy=False)
            send = self._apart(self._movable(input), receive)
            self._comm.Allgather(self._bytes(send), self._bytes(receive))
            self._return(receive, output)

        return self._run(call, opts, [output])

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gather several tensors of all ranks into joined ones."""
        return self._each(self._allgather_base, outputs, inputs, opts)

    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]

    def barrier(self, opts: Any = None, *_: Any) -> dist.Work:
        """Wait for all ranks."""
        return self._run(self._comm.Barrier, opts, [])

    # -- point to point

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> dist.Work:
        """Send one tensor to a rank of this group."""
        buffer = self._movable(tensors[0])
        request = self._comm.Isend(self._bytes(buffer), dstRank, tag)
        return Message(request, [buffer])

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> dist.Work:
        """Receive one tensor from a rank of this group."""
        tensor = tensors[0]
        buffer = self._movable(tensor, copy=False)
        request = self._comm.Irecv(self._bytes(buffer), srcRank, tag)
        return Message(request, tensors, lambda: self._return(buffer, tensor))

    # -- implementation

    def _run(self, call: Callable[[], None], opts: Any, tensors: Any) -> dist.Work:
        if opts is None or opts.asyncOp:
            return self._thread.submit(call, tensors)
        self._thread.drain()
        call()
        return self._done

    def _each(self, one: Callable[..., dist.Work], outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        works = [one(output, input, opts) for output, input in zip(outputs, inputs, strict=True)]
        return works[-1] if works else self._done

    def _reduction(self, opts: Any) -> tuple[Any, bool]:
        """MPI's operation, and whether to divide its result by the number of ranks."""
        if opts is None or opts.reduceOp == _SUM:
            return self._sum
        op = opts.reduceOp.op
        try:
            return self._ops[op], op == dist.ReduceOp.AVG
        except KeyError:
            raise ValueError(f"the backend mpi has no reduction {op}") from None

    def _usable(self, tensor: Tensor, kind: torch.dtype) -> bool:
        return tensor.dtype is kind and tensor.is_cpu and tensor.is_contiguous()

    def _reducible(self, tensor: Tensor) -> Tensor:
        """The tensor itself if MPI can reduce it in place, else a copy in host memory with a type that MPI supports."""
        kind = tensor.dtype
        if kind in self._types and tensor.is_cpu and tensor.is_contiguous():
            return tensor
        wider = _WIDER.get(kind, kind)
        if wider not in self._types:
            raise ValueError(f"the backend mpi cannot reduce tensors of type {kind}")
        if wider is not kind:
            self._detours.add(f"{kind} reduced as {wider}".replace("torch.", ""))
        return self._host_copy(tensor, wider)

    def _movable(self, tensor: Tensor, copy: bool = True) -> Tensor:
        """The tensor itself if it is contiguous in host memory, else a copy there (or an empty buffer)."""
        if tensor.is_cpu and tensor.is_contiguous():
            return tensor
        return self._host_copy(tensor, tensor.dtype) if copy else torch.empty(tensor.shape, dtype=tensor.dtype)

    def _host_copy(self, tensor: Tensor, kind: torch.dtype) -> Tensor:
        if not tensor.is_cpu:
            self._detours.add("GPU tensors copied through host memory")
        return tensor.detach().to("cpu", kind, copy=True, memory_format=torch.contiguous_format)

    def _apart(self, send: Tensor, receive: Tensor) -> Tensor:
        """`send`, or a copy if it overlaps with `receive`, which torch allows and MPI does not."""
        start, end = receive.data_ptr(), receive.data_ptr() + receive.nbytes
        if not (send.data_ptr() < end and start < send.data_ptr() + send.nbytes):
            return send
        self._detours.add("input copied if it shares memory with the output")
        return send.clone()

    def _return(self, buffer: Tensor, tensor: Tensor, average: bool = False) -> None:
        """Divide by the number of ranks if a mean is wanted, and copy the buffer back if it is a copy."""
        if average:
            buffer = buffer.detach()
            if buffer.is_floating_point() or buffer.is_complex():
                buffer.div_(self._ranks)
            else:
                buffer.div_(self._ranks, rounding_mode="trunc")
        if buffer.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(buffer)

    def _message_at(self, place: tuple[int, int, torch.dtype]) -> list[Any]:
        """The mpi4py buffer for a tensor at this address; cached, because a training loop reduces the same tensors
        again."""
        if len(self._messages) >= KEPT_MESSAGES:
            self._messages.clear()
        address, size, kind = place
        return self._messages.setdefault(place, [self._address(address, size), self._types[kind]])

    def _describe_buffer(self, tensor: Tensor) -> list[Any]:
        return [self._span(tensor), self._types[tensor.dtype]]

    def _span(self, tensor: Tensor) -> Any:
        return self._address(tensor.data_ptr(), tensor.nbytes)

    def _bytes(self, tensor: Tensor) -> list[Any]:
        return [self._span(tensor), self._byte]

    def _room(self, parts: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        counts = [part.nbytes for part in parts]
        return torch.empty(sum(counts), dtype=torch.uint8), counts

    def _deal(self, received: Tensor, parts: Sequence[Tensor]) -> None:
        rows = torch.split(received, [part.nbytes for part in parts])
        for part, row in zip(parts, rows, strict=True):
            part.detach().copy_(row.view(part.dtype).view(part.shape))


def _as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _as_nested_list(tensors: Any) -> list[list[Tensor]]:
    """A list of lists; some calls of torch pass a list of tensors, and [] on ranks other than the root."""
    tensors = list(tensors)
    return [tensors] if tensors and isinstance(tensors[0], Tensor) else tensors
