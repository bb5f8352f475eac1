"""How a rank outlives the loss of another one: it leaves the group, waits until the missing rank is started again, and
begins the next attempt from the last checkpoint, in the same process.

In the folder of the checkpoints:
waiting-A-N      there once rank N has left attempt A
next-A-N.json    by the agent: the variables of the contract that attempt A changes for rank N
"""

import gc
import json
import os
import time
from pathlib import Path

import torch.distributed as dist

from task_images.contract import Contract

LOOK_SECONDS = 0.02


def await_next_attempt(contract: Contract) -> None:
    """Leave the group, which closes this rank's connections and so tells the ranks that still wait for it; return when
    the environment is that of the next attempt."""
    assert contract.checkpoint_dir is not None
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()
    gc.collect()  # the model of this attempt and its process groups
    folder = Path(contract.checkpoint_dir)
    (folder / f"waiting-{contract.attempt}-{contract.rank}").touch()
    word = folder / f"next-{contract.attempt + 1}-{contract.rank}.json"
    while not word.exists():
        time.sleep(LOOK_SECONDS)
    os.environ.update(json.loads(word.read_bytes()))
