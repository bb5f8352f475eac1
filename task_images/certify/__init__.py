"""Measures every node of a cluster, for `mlbench certify`: alone, in pairs and together, with fresh data on suspects.

Start with `task.py`, the plan that rank 0 drives. `node.py` is the process of a rank: it obeys rank 0 and keeps a child
(`measure.py`) that computes, and that is killed if it exceeds its limit, so that a device that hangs is one finding and
not the end of the run. `rules.py` and `pairs.py` are arithmetic that the judge of the certificate uses, too.
"""

from dataclasses import dataclass

from task_images.certify.rules import LEAST_DIP
from task_images.parameters import Task, parameter

STAGES = ("drift", "node", "pairs", "collectives", "training", "soak")


@dataclass(frozen=True)
class Settings:
    """Parameters of the task."""

    stages: list[str] = parameter(list(STAGES[:-1]), "what is measured, in this order", choices=STAGES)
    limit_seconds: float = parameter(60.0, "longest time of one measurement, after which its process is killed", min=1)
    rounds: int = parameter(3, "how often every node and pair is measured for the screen", min=1, max=100)
    burst_seconds: float = parameter(0.25, "duration of a short measurement", min=0.01, max=600)
    sustained_seconds: float = parameter(1.0, "duration of a sustained matrix product", min=0.01, max=3600)
    disk_bytes: int = parameter(33554432, "size of the file that is written and removed; 0: none", min=0, max=1 << 40)
    pair_bytes: int = parameter(
        0, "size of the all-reduce of two nodes; 0: 16 MiB, on GPUs 256 MiB", min=0, max=1 << 40
    )
    matchings: int = parameter(8, "rounds of pairs of more than 16 nodes; 0: all", min=0, max=10000)
    sizes: list[int] = parameter(
        [1048576, 16777216], "bytes of collectives among all nodes, the larger side", kind="sizes"
    )
    samples: int = parameter(7, "calls of each collective and size", min=3, max=10000)
    training_seconds: float = parameter(10.0, "duration of the reference training", min=0.1, max=864000)
    least_dip_seconds: float = parameter(
        LEAST_DIP,
        "mean length of disturbances of a healthy node that the confirmation outlasts; less voids the error rate",
        min=0,
        max=86400,
    )
    confirm_seconds: float = parameter(
        3600.0, "when the confirmation ends, since the start; who is not decided by then is on watch", min=0, max=864000
    )
    soak_hours: float = parameter(0.0, "how long the stage soak repeats the others", min=0, max=720)
    recheck: str = parameter("", "the node that is measured again, beside others that were ok")
    earlier: str = parameter("", "SHA-256 of the archive of the earlier certificate that this one is linked to")
    expect: str = parameter("", "published figures to compare with, as a JSON list (see --expect of mlbench certify)")


_STANDARD = {
    "limit_seconds": 600.0,
    "burst_seconds": 5.0,
    "sustained_seconds": 60.0,
    "disk_bytes": 2147483648,
    "matchings": 63,
    "sizes": "1MiB:128MiB:x2",
    "samples": 20,
    "training_seconds": 600.0,
    "confirm_seconds": 7200.0,
}
TASK = Task(
    settings=Settings,
    number="0b",
    title="Acceptance test of a cluster: every node alone, in pairs and together (see mlbench certify)",
    backends=["gloo", "nccl"],
    devices=["cpu", "gpu"],
    measured_on=["CPU"],
    data="none",
    notes=['Samples are lines of the logs that begin with "certify"; certificate.json follows from them.'],
    presets={
        "standard": _STANDARD,
        "soak": {
            **_STANDARD,
            "stages": list(STAGES),
            "least_dip_seconds": 1800.0,
            "confirm_seconds": 21600.0,
            "soak_hours": 24.0,
        },
        "tiny": {
            "burst_seconds": 0.05,
            "sustained_seconds": 0.1,
            "disk_bytes": 1048576,
            "pair_bytes": 262144,
            "sizes": [262144],
            "samples": 3,
            "training_seconds": 0.5,
            "least_dip_seconds": 0.0,
            "confirm_seconds": 120.0,
        },
    },
)
