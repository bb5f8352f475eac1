"""How ranks agree on an update: a method is a class in one file. Start reading at `base.Method.step`.

`catalog` finds methods by name, for ranks and for the command line; `check` is the self-check before a training.
No file here imports torch before it is used, because the command line reads them all.
"""

from typing import TYPE_CHECKING

from task_images import Lazy

if TYPE_CHECKING:
    import torch as torch
    import torch.distributed as dist
    from torch import nn as nn
else:
    torch, dist, nn = Lazy("torch"), Lazy("torch.distributed"), Lazy("torch.nn")

__all__ = ["FILES", "Lazy", "dist", "nn", "torch"]

# The file of each method, in the order in which they are listed.
FILES = {
    **dict.fromkeys(("bsp", "noop"), "base"),
    **dict.fromkeys(("wfbp", "fusion", "mgwfbp", "optfusion", "bytescheduler", "dear"), "scheduled"),
    **dict.fromkeys(("bsp-ps", "wfbp-ps", "bytescheduler-ps"), "servers"),
    **dict.fromkeys(("fp16", "bf16"), "half"),
    **dict.fromkeys(("ef-signsgd", "signsgd-mv"), "sign"),
    **dict.fromkeys(("topk", "eftopk", "dgc"), "topk"),
    "gtopk": "gtopk",
    "qsgd": "qsgd",
    "powersgd": "powersgd",
    **dict.fromkeys(("localsgd", "slowmo", "diloco"), "local"),
    **dict.fromkeys(("dpsgd", "choco"), "gossip"),
    "onebit-adam": "onebit",
    **dict.fromkeys(("ddp", "zero1"), "ddp"),
    **dict.fromkeys(("fsdp2", "hsdp"), "fsdp"),
}
