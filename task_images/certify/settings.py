"""Parameters of the acceptance test. The default preset, spec, is the level quick."""

from dataclasses import dataclass

from task_images.parameters import parameter

STAGES = ("drift", "node", "pairs", "collectives", "training", "soak")


@dataclass(frozen=True)
class Settings:
    """Parameters of the task."""

    stages: list[str] = parameter(list(STAGES[:-1]), "what is measured, in this order", choices=STAGES)
    join_seconds: float = parameter(60.0, "how long a node may be late", min=1, max=86400)
    limit_seconds: float = parameter(60.0, "longest time of one measurement, after which its process is killed", min=1)
    rounds: int = parameter(3, "how often every node and pair is measured for the screen", min=1, max=100)
    burst_seconds: float = parameter(0.25, "duration of a short measurement", min=0.01, max=600)
    sustained_seconds: float = parameter(1.0, "duration of a sustained matrix product", min=0.01, max=3600)
    disk_bytes: int = parameter(33554432, "size of the file that is written and removed; 0: none", min=0, max=1 << 40)
    pair_bytes: int = parameter(0, "size of the all-reduce of two nodes; 0: 1 MiB, on GPUs 256 MiB", min=0, max=1 << 40)
    matchings: int = parameter(8, "rounds of pairs of more than 16 nodes; 0: all", min=0, max=10000)
    sizes: list[int] = parameter(
        [1048576, 16777216], "bytes of collectives among all nodes, the larger side", kind="sizes"
    )
    samples: int = parameter(7, "calls of each collective and size", min=3, max=10000)
    training_seconds: float = parameter(10.0, "duration of the reference training", min=0.1, max=864000)
    least_dip_seconds: float = parameter(
        20.0,
        "shortest disturbance of a healthy node that the confirmation outlasts; less voids the error rate",
        min=0,
        max=86400,
    )
    soak_hours: float = parameter(0.0, "how long the stage soak repeats the others", min=0, max=720)
    expect: str = parameter("", "published figures to compare with, as JSON: name -> value and source")
