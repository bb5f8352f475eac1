"""Parameters of the measurement of collectives."""

from dataclasses import dataclass

from task_images.parameters import parameter


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
            "ring",
            "permutation",
            "incast",
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
    min_busbw_gbps: float = parameter(
        0.0,
        "fail if a collective's bus bandwidth is below this many GB/s at every size; 0: no threshold",
        min=0,
        max=100000,
    )
    mode: str = parameter(
        "isolated",
        "isolated: a barrier before every call; pipelined: calls back to back",
        choices=("isolated", "pipelined"),
    )
    protocol: str = parameter(
        "current",
        "legacy: the original's, fresh random numbers per sample and only the mean",
        choices=("current", "legacy"),
    )
