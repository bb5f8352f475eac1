"""How TensorFlow connects the ranks of a run. Without torch, which images of TensorFlow do not have."""

import json
import os
from collections.abc import Sequence
from typing import Any

from task_images.harness.ranks import GROUP_SECONDS


def make_strategy(tensorflow: Any, addresses: Sequence[str], rank: int, *, is_nccl: bool = False) -> Any:
    """The strategy of workers at `addresses`, of which this one is number `rank`: a ring over gRPC, or NCCL."""
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": list(addresses)}, "task": task})
    experimental = tensorflow.distribute.experimental
    kinds = experimental.CommunicationImplementation
    options = experimental.CommunicationOptions(
        implementation=kinds.NCCL if is_nccl else kinds.RING, timeout_seconds=GROUP_SECONDS
    )
    return tensorflow.distribute.MultiWorkerMirroredStrategy(communication_options=options)
