"""The part of TensorFlow that mlbench uses, in torch, for tests of what mlbench makes of it.

`load` gives the task's modules with this instead of TensorFlow. Nothing is compiled. As in TensorFlow, gradients are
recorded only by a tape, so tests run within `torch.no_grad`.
"""

import contextlib
import sys
from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

PACKAGE = "task_images.cifar10_resnet20_tensorflow"
MODULES = ("world", "model", "training", "servers", "task")


class Variable(Tensor):
    """A tensor that can be changed."""

    # Results are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: Any, values: Any, dtype: Any = None, trainable: bool = True) -> "Variable":
        data = torch.as_tensor(values, dtype=dtype).detach().clone()
        made: Variable = Tensor._make_subclass(cls, data, trainable and data.is_floating_point())
        return made

    def __init__(self, values: Any, dtype: Any = None, trainable: bool = True) -> None:
        self.handle = self
        self.is_trainable = trainable

    @torch.no_grad()
    def assign(self, value: Any) -> "Variable":
        self.detach().copy_(torch.as_tensor(value))
        return self

    @torch.no_grad()
    def assign_add(self, value: Any, read_value: bool = True) -> Tensor:
        self.detach().add_(torch.as_tensor(value))
        return self.detach().clone()

    @torch.no_grad()
    def assign_sub(self, value: Any) -> "Variable":
        self.detach().sub_(torch.as_tensor(value))
        return self

    def read_value(self) -> Tensor:
        return self.detach().clone()

    def numpy(self, *, force: bool = False) -> Any:
        return self.detach().clone().numpy()


class GradientTape:
    """Records what is computed within."""

    def __enter__(self) -> "GradientTape":
        self._was_on = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_grad_enabled(self._was_on)

    def gradient(self, loss: Tensor, variables: Sequence[Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(variables)))


class Module:
    """The base of models."""


class Lost(Exception):
    """The base of TensorFlow's errors."""


class TensorFlow:
    """The module `tensorflow`. `calls` records what changes the process or its servers."""

    __version__ = "2.20.0"
    Variable, GradientTape, Module = Variable, GradientTape, Module
    float32, float64, uint8, int64 = torch.float32, torch.float64, torch.uint8, torch.int64

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.gpus: list[Any] = []
        self.build: dict[str, str] = {}
        self.others: Any = lambda tensor: torch.zeros_like(tensor)  # what other ranks add to a sum
        note = self.calls.append
        threading = SimpleNamespace(
            set_intra_op_parallelism_threads=lambda number: note(("within", number)),
            set_inter_op_parallelism_threads=lambda number: note(("between", number)),
        )
        self.config = SimpleNamespace(
            threading=threading,
            list_physical_devices=lambda kind: list(self.gpus),
            set_visible_devices=lambda devices, kind: note(("visible", devices)),
            get_visible_devices=lambda kind: self.gpus[:1],
            experimental=SimpleNamespace(
                enable_tensor_float_32_execution=lambda is_on: note(("tf32", is_on)),
                set_memory_growth=lambda device, is_on: note(("growth", device, is_on)),
                get_memory_info=lambda device: {"current": 1, "peak": 5000, "device": device},
                get_device_details=lambda device: {"device_name": "H100"} if device.is_known else {},
            ),
        )
        self.test = SimpleNamespace(experimental=SimpleNamespace(sync_devices=lambda: note("sync")))
        self.sysconfig = SimpleNamespace(get_build_info=lambda: self.build)
        self.errors = SimpleNamespace(
            **{
                name: type(name, (Lost,), {})
                for name in (
                    *("UnavailableError", "DeadlineExceededError", "CancelledError", "AbortedError", "InternalError"),
                    "InvalidArgumentError",
                )
            }
        )
        self.nn = SimpleNamespace(
            relu=functional.relu, conv2d=convolve, sparse_softmax_cross_entropy_with_logits=cross_entropy
        )
        self.math = SimpleNamespace(in_top_k=is_in_top)
        self.linalg = SimpleNamespace(matmul=torch.matmul)
        self.raw_ops = SimpleNamespace(ResourceApplyMomentum=apply_momentum)
        self.compat = SimpleNamespace(
            v1=SimpleNamespace(nn=SimpleNamespace(fused_batch_norm=normalize), ConfigProto=lambda **settings: settings)
        )
        self.DeviceSpec = SimpleNamespace(from_string=lambda text: SimpleNamespace(task=text))
        context = SimpleNamespace(all_reduce=lambda op, own: own + self.others(own) if op == "sum" else None)
        self.train = SimpleNamespace(ClusterSpec=lambda jobs: jobs)
        self.distribute = SimpleNamespace(
            ReduceOp=SimpleNamespace(SUM="sum"),
            get_replica_context=lambda: context,
            Server=self._start_server,
            ParameterServerStrategy=lambda resolver: ("strategy", resolver),
            cluster_resolver=SimpleNamespace(SimpleClusterResolver=lambda spec, **more: (spec, more)),
            coordinator=SimpleNamespace(ClusterCoordinator=lambda strategy: ("coordinator", strategy)),
        )

    def function(self, function: Any, **_: object) -> Any:
        return function

    def TensorSpec(self, shape: Any, dtype: Any) -> Any:
        return shape, dtype

    def constant(self, values: Any, dtype: Any = None) -> Tensor:
        if dtype is None and not isinstance(values, np.ndarray):
            dtype = torch.float32
        return torch.as_tensor(values, dtype=dtype).clone()

    def identity(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def concat(self, tensors: Sequence[Tensor], axis: int) -> Tensor:
        return torch.cat(list(tensors), axis)

    def reshape(self, tensor: Tensor, shape: Any) -> Tensor:
        return tensor.reshape(list(shape))

    def split(self, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        return [part.clone() for part in torch.split(tensor, list(sizes))]

    def stack(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([tensor.detach() for tensor in tensors])

    def cast(self, tensor: Tensor, dtype: Any) -> Tensor:
        return tensor.to(dtype)

    def size(self, tensor: Tensor) -> int:
        return tensor.numel()

    def ones(self, width: int) -> Tensor:
        return torch.ones(width)

    def zeros(self, width: int) -> Tensor:
        return torch.zeros(width)

    def zeros_like(self, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor)

    def reduce_mean(self, tensor: Tensor, axes: Any = None) -> Tensor:
        return tensor.mean() if axes is None else tensor.mean(tuple(axes))

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        return tensor.sum()

    def device(self, name: Any) -> Any:
        return contextlib.nullcontext()

    def control_dependencies(self, operations: Any) -> Any:
        return contextlib.nullcontext()

    def _start_server(self, jobs: Any, **more: Any) -> Any:
        self.calls.append(("server", jobs, more))
        return SimpleNamespace(target=f"grpc://localhost:{9000 + len(self.calls)}")


def convolve(x: Tensor, kernel: Tensor, stride: int, padding: Any) -> Tensor:
    """x [n, height, width, channels], kernel [height, width, inputs, outputs]."""
    assert padding[0] == padding[3] == [0, 0]
    around = [one for one, other in padding[1:3] if one == other]
    found = functional.conv2d(x.permute(0, 3, 1, 2), kernel.permute(3, 2, 0, 1), None, stride, around)
    return found.permute(0, 2, 3, 1)


def normalize(
    x: Tensor,
    scale: Tensor,
    offset: Tensor,
    *,
    epsilon: float,
    is_training: bool,
    mean: Any = None,
    variance: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The batch is divided by its deviation; the variance that is returned is that of the population."""
    if not is_training:
        return (x - mean) / torch.sqrt(variance + epsilon) * scale + offset, mean, variance
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2), correction=0)
    count = x.numel() // x.shape[-1]
    found = (x - mean) / torch.sqrt(variance + epsilon) * scale + offset
    return found, mean, variance * count / (count - 1)


def cross_entropy(labels: Tensor, logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels, reduction="none")


def is_in_top(labels: Tensor, logits: Tensor, count: int) -> Tensor:
    own = logits.gather(1, labels[:, None])
    return (logits > own).sum(1) < count


@torch.no_grad()
def apply_momentum(
    *, var: Variable, accum: Variable, lr: Tensor, grad: Tensor, momentum: float, use_locking: bool, use_nesterov: bool
) -> str:
    """As TensorFlow documents it: accum = accum momentum + grad; var -= lr accum, or lr (grad + momentum accum)."""
    assert use_locking
    accum.assign(momentum * accum + grad)
    var.assign_sub(lr * (grad + momentum * accum if use_nesterov else accum))
    return "applied"


def load() -> Any:
    """The modules of the task, by their names, and `tf`. Other tests do not see them: none of them stays imported."""
    names = [f"{PACKAGE}.{name}" for name in MODULES]
    kept = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    outer = sys.modules.get("tensorflow")
    tf: Any = TensorFlow()
    sys.modules["tensorflow"] = tf
    try:
        found = {name: import_module(f"{PACKAGE}.{name}") for name in MODULES}
    finally:
        package = import_module(PACKAGE)
        for short, name in zip(MODULES, names, strict=True):
            sys.modules.pop(name, None)
            if short in vars(package):
                delattr(package, short)
        sys.modules.update(kept)
        del sys.modules["tensorflow"]
        if outer is not None:
            sys.modules["tensorflow"] = outer
    return SimpleNamespace(tf=tf, **found)
