"""The communication backends by themselves: how long an all-reduce takes, and the other collectives."""

from dataclasses import dataclass

from task_images.parameters import Task, parameter


@dataclass(frozen=True)
class Settings:
    """Parameters of the task, with the preset `spec` as defaults."""

    collectives: list[str] = parameter(
        ["all_reduce"],
        "what is measured",
        choices=(
            "all_reduce",
            "broadcast",
            "reduce",
            "all_gather",
            "reduce_scatter",
            "all_to_all",
            "ping_pong",
            "bidirectional",
        ),
    )
    dtypes: list[str] = parameter(["fp32", "fp16"], "data types", choices=("fp32", "fp16", "bf16", "int32"))
    places: list[str] = parameter(
        ["in_place"],
        "in place or out of place; collectives with only one form use that",
        choices=("in_place", "out_of_place"),
    )
    sizes: list[int] = parameter(
        [], "bytes of the larger side, e.g. 8B:64MiB:x2 or 4KiB,1MiB; empty: use the exponents", kind="sizes"
    )
    min_exponent: float = parameter(0.0, "the smallest buffer has 10 to this power elements", min=0, max=10)
    max_exponent: float = parameter(8.0, "the largest buffer has 10 to this power elements", min=0, max=10)
    count: int = parameter(
        80, "number of sizes, evenly spaced on a log scale; duplicates are measured once", min=1, max=10000
    )
    samples: int = parameter(100, "calls per size and data type", min=3, max=1000000)
    warmup: int = parameter(5, "calls before the first sample of a size", min=1, max=100000)
    seconds_per_size: float = parameter(0.0, "fewer samples if a size would take longer; 0: no limit", min=0, max=86400)
    seconds_total: float = parameter(0.0, "skip larger sizes after this time; 0: no limit", min=0, max=864000)
    protocol: str = parameter(
        "current",
        "legacy: the original's, fresh random numbers per sample and only the mean",
        choices=("current", "legacy"),
    )


TASK = Task(
    settings=Settings,
    number="0a",
    title="All-reduce of 1 to 100 million numbers, other collectives by parameter",
    legacy_name="PyTorch Distributed Backend benchmarking",
    backends=["gloo", "nccl", "mpi", "grpc"],
    devices=["cpu", "gpu"],
    measured_on=["CPU"],
    data="generated buffers with a known sum",
    notes=[
        ("S: the larger side in bytes, k: number of ranks, algbw = S / p50; sides and factors as in nccl-tests"),
        "(ping_pong and bidirectional as in the OSU benchmarks):",
        ("  all_reduce      S = the buffer                                busbw = algbw * 2 (k - 1) / k"),
        "  broadcast       S = the buffer                                busbw = algbw",
        "  reduce          S = the buffer                                busbw = algbw",
        ("  all_gather      S = the gathered data, k parts                busbw = algbw * (k - 1) / k"),
        ("  reduce_scatter  S = the reduced data, k parts                 busbw = algbw * (k - 1) / k"),
        ("  all_to_all      S = data sent by a rank, k parts              busbw = algbw * (k - 1) / k"),
        "  ping_pong       S = one message; time is half the round trip  busbw = algbw",
        "  bidirectional   S = the message of each side, both at once    busbw = algbw * 2",
        (
            "Ping-pong and bidirectional: rank r with rank r + k/2, all pairs at once. Each sample is"
            " the time of the slowest rank."
        ),
        (
            "torch supports all_reduce, broadcast and reduce only in place; out_of_place copies the "
            "input before the clock starts."
        ),
        ("backend grpc (extra tensorflow, CPUs): TensorFlow's all-reduce and all-gather, out of place only."),
        ("spec takes all 100 samples of each size, however long they take; capped gives up a size after a minute."),
    ],
    presets={
        "legacy": {
            "protocol": "legacy",
        },
        # Not comparable with spec where a limit was met: large sizes have fewer samples.
        "capped": {
            "seconds_per_size": 60.0,
            "seconds_total": 3600.0,
        },
        "collectives": {
            "collectives": ["all"],
            "dtypes": ["fp32"],
            "places": ["all"],
            "sizes": "8B:64MiB:x2",
            "seconds_per_size": 10.0,
            "seconds_total": 1200.0,
        },
        "tiny": {
            "max_exponent": 5.0,
            "count": 6,
            "samples": 10,
            "warmup": 2,
            "seconds_per_size": 1.0,
            "seconds_total": 20.0,
        },
    },
)
