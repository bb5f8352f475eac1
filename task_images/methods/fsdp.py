"""FSDP2: parameters, gradients and optimizer state are shards (torch's fully_shard)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from task_images.methods import Lazy, nn, torch
from task_images.methods.base import LossScale, Method, MethodError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import device_mesh, fsdp
    from torch.distributed.checkpoint import state_dict as states

    from task_images import world as distributed
    from task_images.language import layout
else:
    device_mesh, fsdp = Lazy("torch.distributed.device_mesh"), Lazy("torch.distributed.fsdp")
    states = Lazy("torch.distributed.checkpoint.state_dict")
    distributed, layout = Lazy("task_images.world"), Lazy("task_images.language.layout")


class Fsdp2(Method):
    """torch exchanges gradients within the backward pass of the last pass, as means over ranks; unequal batches are
    weighted at the start of the backward pass. Nothing is replicated."""

    name = "fsdp2"
    summary = "shards parameters, gradients and optimizer state across ranks (torch's fully_shard)"
    source = "Zhao et al. 2023, arXiv:2304.11277"
    formula = "3 (P-1)/P M; 4 (P-1)/P M with gloo, whose reduce-scatter is an all-reduce"
    exact = True
    wraps = True
    replays = False
    mixed = ("forward", "backward")
    in_groups: ClassVar[bool] = False

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard the blocks of the model, then the rest."""
        distributed.require_sharding(self.world)
        kind, size = self.world.device.type, self.world.size
        count = layout.count_nodes(size, self.world.contract.local_world_size) if self.in_groups else 1
        if count == 1:
            mesh = device_mesh.init_device_mesh(kind, (size,))
        else:
            mesh = device_mesh.init_device_mesh(kind, (count, size // count), mesh_dim_names=("replicate", "shard"))
        for parameter in model.parameters():  # fully_shard does not support other memory formats, such as channels last
            parameter.data = parameter.data.contiguous()
        shard(model, _list_blocks(model), mesh)
        return self.weigh(model)

    def weigh(self, model: nn.Module) -> nn.Module:
        """Have this rank's share of the update multiplied into the gradients of the model's outputs."""
        model.register_forward_hook(self._weigh_outputs)
        return model

    def begin(self, weight: float, total: float, passes: int = 1, scale: LossScale | None = None) -> None:
        """Begin an update; only its last pass reduces gradients."""
        super().begin(weight, total, passes, scale)
        self._set_last(passes == 1)

    @contextlib.contextmanager
    def last_pass(self) -> Iterator[None]:
        """A context in which gradients are reduced."""
        self._set_last(True)
        yield

    def _set_last(self, is_last: bool) -> None:
        if isinstance(self.model, fsdp.FSDPModule):
            self.model.set_requires_gradient_sync(is_last)
            self.model.set_is_last_backward(is_last)

    def stats(self) -> dict[str, float]:
        """torch counts no messages."""
        return {"updates": float(self._updates)}

    def check_replicas(self) -> float | None:
        """None: the ranks hold shards of one model."""
        return None

    def start(self) -> None:
        """torch has no fused SGD for sharded parameters."""
        if isinstance(self.optimizer, torch.optim.SGD):
            for group in self.optimizer.param_groups:
                group["fused"] = False

    def _weigh_outputs(self, module: nn.Module, inputs: object, outputs: Tensor | tuple[Tensor, ...]) -> None:
        for tensor in outputs if isinstance(outputs, tuple) else (outputs,):
            if tensor.requires_grad:
                tensor.register_hook(self._weigh)  # type: ignore[no-untyped-call]

    def _weigh(self, gradient: Tensor) -> Tensor:
        factor = self.world.size * self.share
        return gradient if factor == 1 else gradient * factor

    def state_dict(self) -> dict[str, Any]:
        """The full state of model and optimizer, gathered on rank 0. Collective."""
        if self.world.size == 1:
            return super().state_dict()
        whole = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
        return {
            "model": states.get_model_state_dict(self.model, options=whole),
            "optimizer": states.get_optimizer_state_dict(self.model, self.optimizer, options=whole),
            "update": self.update,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Distribute a full state over the ranks. Collective."""
        if self.world.size == 1:
            super().load_state_dict(state)
            return
        spread = states.StateDictOptions(full_state_dict=True)
        states.set_model_state_dict(self.model, dict(state["model"]), options=spread)
        states.set_optimizer_state_dict(self.model, self.optimizer, dict(state["optimizer"]), options=spread)
        self.update = int(state["update"])


class Hsdp(Fsdp2):
    """Each group of ranks has all shards; a group is a node, or half of the ranks if there is one node or one rank per
    node."""

    name = "hsdp"
    summary = "fsdp2 within each node or half of the ranks, all-reduce between these groups"
    formula = "3 (1-G/P) M + 2 (G-1)/P M with G groups; with gloo 4 (1-G/P) M + 2 (G-1)/P M"
    in_groups = True

    def check(self, ranks: int) -> None:
        """There are two groups at least."""
        if ranks < 4 or ranks % 2:
            raise MethodError(
                f"hsdp needs two groups of ranks: an even number of at least 4, not {ranks}", "--method fsdp2"
            )


class Sharded(Fsdp2):
    """For a model that is sharded before it comes here, each rank with its parts of the same initial values."""

    name = "sharded"
    is_sharded = True

    def share_model(self) -> None:
        """All ranks have their parts."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Only the shares are left to do."""
        return self.weigh(model)


def shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: device_mesh.DeviceMesh,
    is_bf16: bool = False,
    reshard: bool | None = None,
) -> None:
    """Shard each of the blocks, then the rest of the model. `is_bf16`: parameters are gathered and used in bf16, and
    gradients summed in fp32; `reshard`: whether gathered parameters are freed after the forward pass; None: only those
    of the blocks."""
    policy = fsdp.MixedPrecisionPolicy()
    if is_bf16:
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*blocks, model):
        fsdp.fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)


def _list_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that are sharded separately: the model's children, or their children if they are lists."""
    found: list[nn.Module] = []
    for child in model.children():
        parts = child.children() if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential) else [child]
        found += [part for part in parts if any(True for _ in part.parameters())]
    return found
