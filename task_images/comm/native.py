"""torch's own engines, for comparison: DistributedDataParallel, ZeroRedundancyOptimizer, and fully_shard."""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from task_images.comm.base import MakeOptimizer, MethodState, Strategy, StrategyState, Traits
from task_images.comm.ddp import DdpAllReduce
from task_images.comm.methods import Method, parse_size
from task_images.harness.distributed import World, require_sharding
from task_images.harness.language.layout import count_nodes
from task_images.harness.precision import LossScale
from task_images.harness.tracker import Tracker

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
SPREAD = StateDictOptions(full_state_dict=True)


def make_native(method: Method) -> Strategy:
    """The strategy for a method that names an engine of torch.

    torch imports its compiler when the first model is wrapped, which takes two seconds of CPU time. It is imported
    here, so that it counts neither as self-check nor as training.
    """
    importlib.import_module("torch._dynamo")
    if method.engine in ("fsdp2", "hsdp"):
        return ShardedModel(in_groups=method.engine == "hsdp")
    bucket_mb = parse_size(method.plan.partition(":")[2]) / 2**20
    if method.engine == "zero1":
        return ShardedOptimizer(bucket_mb)
    wire = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(method.codec)
    return DdpAllReduce(bucket_mb, static=method.engine == "ddp-static", wire=wire)


class ShardedOptimizer(DdpAllReduce):
    """ZeRO-1: DistributedDataParallel averages gradients; each rank updates a part of the parameters and broadcasts
    it."""

    traits = Traits(mixed=("backward", "optimizer"))

    def attach(
        self,
        world: World,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        tracker: Tracker | None = None,
    ) -> nn.Module:
        """Wrap the model for DDP and the optimizer for ZeRO-1, with the settings of `make_optimizer`."""

        def make_sharded(model: nn.Module) -> torch.optim.Optimizer:
            whole = make_optimizer(model)
            if world.size == 1:
                return whole
            known = inspect.signature(type(whole)).parameters
            defaults = {name: value for name, value in whole.defaults.items() if name in known}
            groups = [
                {name: value for name, value in group.items() if name == "params" or name in known}
                for group in whole.param_groups
            ]
            return ZeroRedundancyOptimizer(groups, type(whole), **defaults)

        return super().attach(world, model, make_sharded, tracker)

    @property
    def keeps_optimizer_state(self) -> bool:
        return not isinstance(self.optimizer, ZeroRedundancyOptimizer)

    def state_dict(self) -> StrategyState:
        """The common form, so that any other method, on any number of ranks, can resume from it."""
        if self.keeps_optimizer_state:
            return super().state_dict()
        [whole] = self.method_state()["optimizers"] or [{}]
        return {"model": self.model.state_dict(), "optimizer": whole, "method": {}}

    def method_state(self) -> MethodState:
        """For sharded checkpoints: the optimizer's full state, on rank 0."""
        if not isinstance(self.optimizer, ZeroRedundancyOptimizer):
            return {}
        self.optimizer.consolidate_state_dict(0)
        return {"optimizers": [self.optimizer.state_dict()] if self.world.rank == 0 else []}

    def load_method_state(self, state: MethodState) -> None:
        if state:
            self.optimizer.load_state_dict(state["optimizers"][0])


class ShardedModel(Strategy):
    """FSDP2: sharded parameters, gradients and optimizer state. With HSDP each group of ranks has all shards; a group
    is a node, or half of the ranks if there is one node or one rank per node.

    Gradients are means over ranks; unequal batches are weighted at the start of the backward pass.
    """

    traits = Traits(mixed=("forward", "backward"))

    def __init__(self, in_groups: bool) -> None:
        self._in_groups = in_groups

    def _prepare(self, model: nn.Module) -> nn.Module:
        if self.world.size == 1:
            return model
        require_sharding(self.world)
        kind, local = self.world.device.type, self.world.contract.local_world_size
        count = count_nodes(self.world.size, local) if self._in_groups else 1
        if count == 1:
            mesh = init_device_mesh(kind, (self.world.size,))
        else:
            mesh = init_device_mesh(kind, (count, self.world.size // count), mesh_dim_names=("replicate", "shard"))
        for parameter in model.parameters():  # fully_shard does not support other memory formats, such as channels last
            parameter.data = parameter.data.contiguous()
        for block in _list_blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.register_forward_hook(self._weigh_outputs)
        return model

    def _connect(self) -> None:
        if self.world.size > 1 and isinstance(self.optimizer, torch.optim.SGD):
            for group in self.optimizer.param_groups:  # torch has no fused SGD for sharded parameters
                group["fused"] = False

    def _weigh_outputs(self, module: nn.Module, inputs: object, outputs: Tensor | tuple[Tensor, ...]) -> None:
        for tensor in outputs if isinstance(outputs, tuple) else (outputs,):
            if tensor.requires_grad:
                tensor.register_hook(self._weigh)  # type: ignore[no-untyped-call]

    def _weigh(self, gradient: Tensor) -> Tensor:
        factor = self.world.size * self._weight / self._total
        return gradient if factor == 1 else gradient * factor

    def begin(self, weight: float, total: float, passes: int = 1, scale: LossScale | None = None) -> None:
        """Begin an update of `passes` passes; only the last one reduces gradients."""
        super().begin(weight, total, passes, scale)
        if self.world.size > 1:
            self.model.set_requires_gradient_sync(passes == 1)  # type: ignore[operator]

    def last_pass(self) -> Any:
        """A context for the last pass, in which gradients are reduced."""
        if self.world.size > 1:
            self.model.set_requires_gradient_sync(True)  # type: ignore[operator]
        return super().last_pass()

    def _reduce(self) -> None:
        if self.world.size == 1:
            self._scale_alone()

    def check_replicas(self) -> float | None:
        """None: the ranks hold shards of one model."""
        return None

    def state_dict(self) -> StrategyState:
        """The full state of model and optimizer, gathered on rank 0. Collective."""
        if self.world.size == 1:
            return super().state_dict()
        return {
            "model": get_model_state_dict(self.model, options=WHOLE),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=WHOLE),
            "method": {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Distribute a full state over the ranks. Collective."""
        if self.world.size == 1:
            super().load_state_dict(state)
            return
        set_model_state_dict(self.model, dict(state["model"]), options=SPREAD)
        set_optimizer_state_dict(self.model, self.optimizer, dict(state["optimizer"]), options=SPREAD)


def _list_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that are sharded separately: the model's children, or their children if they are lists."""
    found: list[nn.Module] = []
    for child in model.children():
        parts = child.children() if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential) else [child]
        found += [part for part in parts if any(True for _ in part.parameters())]
    return found
