"""FSDP2: parameters, gradients and optimizer state are shards (torch's fully_shard)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from task_images.methods import Lazy, nn, torch
from task_images.methods.base import LossScale, Method, MethodError, Option

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import device_mesh, fsdp
    from torch.utils import _pytree as pytree

    from task_images import world as distributed
else:
    device_mesh, fsdp = Lazy("torch.distributed.device_mesh"), Lazy("torch.distributed.fsdp")
    distributed, pytree = Lazy("task_images.world"), Lazy("torch.utils._pytree")


class Fsdp2(Method):
    """torch exchanges gradients within the backward pass of the last pass, as means over ranks; unequal batches are
    weighted at the start of the backward pass. Nothing is replicated.

    A model may come on the meta device, so that no rank ever has all of it. Then it has `parts`, the modules to shard
    in the order of the forward pass, and `materialize(device)`, which makes the parameters of this rank.
    """

    name = "fsdp2"
    summary = "shards parameters, gradients and optimizer state across ranks (torch's fully_shard)"
    source = "Zhao et al. 2023, arXiv:2304.11277"
    formula = "(P-1)/P (3 M - last part); 4 M with gloo, whose reduce-scatter is an all-reduce"
    options = {  # noqa: RUF012
        "reshard": Option(1, 0, 1, "whether gathered parameters are freed between forward and backward pass: 1 or 0")
    }
    exact = True
    wraps = True
    replays = False
    is_sharded = True
    mixed = ("forward", "backward")
    is_bf16 = False  # gather and use parameters in bf16, and sum gradients in fp32

    def share_model(self) -> None:
        """A model on the meta device gets its parameters when it is sharded."""
        if not any(parameter.is_meta for parameter in self.model.parameters()):
            super().share_model()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard the parts of the model, then the rest. Torch gathers each while the one before it computes; the last
        one is needed again at once."""
        distributed.require_sharding(self.world)
        policy, mesh = fsdp.MixedPrecisionPolicy(), self.make_mesh()
        if self.is_bf16:
            policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        is_meta = any(parameter.is_meta for parameter in model.parameters())
        for parameter in model.parameters():  # fully_shard does not support other memory formats, such as channels last
            parameter.data = parameter.data.contiguous()
        parts = [*getattr(model, "parts", _list_blocks(model)), model]
        for part in parts:
            reshard = bool(self.values["reshard"]) and part not in parts[-2:]
            fsdp.fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        if is_meta:
            model.materialize(self.world.device)  # type: ignore[operator]
        model.register_forward_hook(self._weigh_outputs)
        return model

    def make_mesh(self) -> device_mesh.DeviceMesh:
        """All ranks share one copy of the model."""
        return device_mesh.init_device_mesh(self.world.device.type, (self.world.size,))

    def begin(self, weight: float, total: float, passes: int = 1, scale: LossScale | None = None) -> None:
        """Begin an update; only its last pass reduces gradients."""
        super().begin(weight, total, passes, scale)
        self._set_last(self.is_last_pass)

    def begin_last_pass(self) -> None:
        """From now on gradients are reduced."""
        self._set_last(True)

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

    def _weigh_outputs(self, module: nn.Module, inputs: object, outputs: object) -> None:
        for tensor in pytree.tree_leaves(outputs):
            if getattr(tensor, "requires_grad", False):
                tensor.register_hook(self._weigh)

    def _weigh(self, gradient: Tensor) -> Tensor:
        factor = self.world.size * self.share
        return gradient if factor == 1 else gradient * factor


class Hsdp(Fsdp2):
    """Each group of ranks has all shards; a group is a node, or half of the ranks if there is one node or one rank per
    node."""

    name = "hsdp"
    summary = "fsdp2 within each node or half of the ranks, all-reduce between these groups"
    formula = "(1-G/P) (3 M - last part) + 2 (G-1)/P M with G groups; with gloo 4 M"
    options = {  # noqa: RUF012
        **Fsdp2.options,
        "groups": Option(0, 0, 65536, "copies of the sharded model; 0: one per node, or 2 if nodes have one rank each"),
    }

    def check(self, ranks: int) -> None:
        """There are two groups at least, all of the same size."""
        groups = self.values["groups"] or 2
        if groups < 2 or ranks < 2 * groups or ranks % groups:
            raise MethodError(f"hsdp cannot divide {ranks} ranks into {groups} groups of at least 2", "--method fsdp2")

    def make_mesh(self) -> device_mesh.DeviceMesh:
        """Ranks of a group are neighbors: they gather parameters layer by layer, and so belong on one node."""
        size, nodes = self.world.size, count_nodes(self.world.size, self.world.contract.local_world_size)
        groups = self.values["groups"] or nodes
        return device_mesh.init_device_mesh(
            self.world.device.type, (groups, size // groups), mesh_dim_names=("replicate", "shard")
        )


def count_nodes(ranks: int, per_node: int) -> int:
    """Number of groups of hsdp: one per node, or two if there is one node or one rank per node."""
    nodes, rest = divmod(ranks, per_node)
    return 2 if per_node == 1 or nodes == 1 or rest else nodes


def _list_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that are sharded separately: the model's children, or their children if they are lists."""
    found: list[nn.Module] = []
    for child in model.children():
        parts = child.children() if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential) else [child]
        found += [part for part in parts if any(True for _ in part.parameters())]
    return found
