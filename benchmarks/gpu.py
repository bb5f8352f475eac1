"""What one GPU does, in ten minutes: every line is written and shown as soon as it is known, the most important first.

    python -m benchmarks.gpu [--output FOLDER] [--minutes 9.3] [--only WORD ...]
    python -m benchmarks.gpu --device cpu --tiny          # that the program works, in a few minutes and without a GPU

It needs numpy and torch. Lines of tasks are runs of the task itself, of one rank, with the preset `throughput`
and the changes named. They are compared with a nanoGPT in plain torch (nanogpt.py), torch's own fastest matrix product,
and what others have published.
FOLDER gets lines.jsonl and table.md, and a profile of the last timed block of the lines that have one; the rate of a
line is the median of its blocks. Each line has a limit of its own. Lines that no longer fit into the minutes are listed
as not run; called again with the same FOLDER on the same machine, it measures those alone, and what failed. MFU: share
of the datasheet's dense rate in the format of the run; without a datasheet, or in fp32, of the matrix product that was
measured.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from task_images.certify.rules import PREFIX
from task_images.contract import parse_event
from task_images.peak import find_peak

ROOT = Path(__file__).parents[1]
# Read here, because the tool itself needs packages that a machine lent by the minute has not.
TASKS = {task["name"]: task for task in json.loads((ROOT / "task_images" / "catalog.json").read_text("utf-8"))["tasks"]}
Changes = Mapping[str, Any]
DECODER = "decoder 124M, synthetic tokens"
BF16: Changes = {"precision": "bf16"}


@dataclass(frozen=True)
class Line:
    """One line. `task` empty: another program. `goal`: samples (or tokens) a second on one H100, and its source.
    `limit`: seconds, compilation included."""

    name: str
    limit: float
    task: str = ""
    changes: Changes = field(default_factory=dict)
    preset: str = "throughput"
    program: str = ""
    goal: str = ""
    profiled: bool = False
    label: str = ""


LINES = (
    Line("fastest matrix product, bf16", 30, program="matmul"),
    Line("nanoGPT in plain torch, compiled", 120, program="nanogpt", goal="463 000 tokens/s (llm.c's PyTorch trainer)"),
    Line(f"{DECODER}, whole model compiled", 150, "gpt_pretraining", goal="520 000 tokens/s (45 % MFU)", profiled=True),
    Line(f"{DECODER}, cuDNN attention, stream in bf16", 150, "gpt_pretraining",
         {"attention": "cudnn", "stream": "bf16"}, label="other numbers: bf16 stream"),
    Line("ResNet-20, resident, graphs", 90, "cifar10_resnet20", preset="throughput-graphs",
         changes={"batch_size": 1024, **BF16}, goal="60 000 images/s", profiled=True,
         label="resident synthetic images"),
    Line("BERT-Base, 512 sentences of 128, compiled", 120, "bert_pretraining",
         {"sequence_length": 128, "batch_per_rank": 512, "compile": "whole", **BF16}, goal="40 % MFU", profiled=True),
    Line("ResNet-50, channels-last, compiled", 120, "imagenet_resnet", {"batch_size": 256, "compile": "whole", **BF16},
         goal="3 300 images/s", label="resident synthetic images: no decoding, no transfer"),
    Line("tests/gpu", 90, program="tests"),
    Line("certify, a node alone", 60, program="certify", label="stage node, medians of 3 rounds"),
)  # fmt: skip
# Sizes with which every line runs on a CPU in seconds, compilation left out.
TINY: dict[str, Changes] = {
    "gpt_pretraining": {"sequence_length": 64, "batch_per_rank": 2, "micro_batch": 2, "vocabulary": 256,
                        "synthetic_tokens": 65_536, "attention": "auto", "model": "tiny"},
    "bert_pretraining": {"model": "tiny", "sequence_length": 32, "batch_per_rank": 4, "synthetic_tokens": 65_536},
    "cifar10_resnet20": {"depth": 8, "batch_size": 16, "training_images": 256, "validation_images": 64},
    "imagenet_resnet": {"batch_size": 2, "training_images": 64, "validation_images": 8, "classes": 4, "side": 64,
                        "model": "resnet18"},
}  # fmt: skip
TINY_BLOCKS: Changes = {"blocks_after": 1, "blocks": 2, "block_updates": 2}
TINY_NANOGPT = "--words 256 --context 64 --layers 2 --heads 4 --width 64 --batch 2 --warmup 1 --updates 2 --eager"


@dataclass
class Found:
    """What a line found. `ended`: "measured", or why not."""

    name: str
    ended: str
    label: str = ""
    goal: str = ""
    rate: float | None = None
    unit: str = ""
    mfu: float | None = None
    milliseconds: float | None = None
    gigabytes: float | None = None
    joules_per_sample: float | None = None  # mean power over the rate; by the GPU's counter where it has one
    seconds: float = 0.0


def main() -> int:
    given = parse()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no NVIDIA or AMD GPU; --device cpu --tiny shows that this program works")
    folder = given.output
    folder.mkdir(parents=True, exist_ok=True)
    named = torch.cuda.get_device_name() if given.device == "cuda" else f"CPU, {platform.machine()}"
    title = f"{named}, torch {torch.__version__}" + (", tiny sizes: no figures" if given.tiny else "")
    end, found = time.monotonic() + 60 * given.minutes, []
    known = read_measured(folder / "lines.jsonl", title)
    lines = [line for line in LINES if not given.only or any(word in line.name for word in given.only)]
    for line in lines:
        begin = time.monotonic()
        left = min(line.limit, end - begin)
        if line.name in known:
            found.append(known[line.name])
            continue
        one = Found(line.name, "not run: no time left") if left < 20 else measure(line, given, folder, left)
        one.label, one.goal, one.seconds = line.label, line.goal, round(time.monotonic() - begin, 1)
        found.append(one)
        with open(folder / "lines.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"machine": title, **asdict(one)}) + "\n")
        (folder / "table.md").write_text(make_table(title, found))
        print(make_row(one), flush=True)
    return int(any(one.ended.startswith("failed") for one in found))


def read_measured(file: Path, title: str) -> dict[str, Found]:
    """The lines that an earlier call has measured on this machine with this torch, by name."""
    known = {}
    for text in file.read_text("utf-8").splitlines() if file.exists() else ():
        row = json.loads(text)
        if row.pop("machine") == title and row["ended"] == "measured":
            known[row["name"]] = Found(**row)
    return known


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="sizes that say nothing, to try this program")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--minutes", type=float, default=9.3)
    parser.add_argument("--only", nargs="*", default=[], help="lines whose name has one of these words")
    return parser.parse_args()


def measure(line: Line, given: argparse.Namespace, folder: Path, limit: float) -> Found:
    """Run one line, for `limit` seconds at most."""
    try:
        if line.task:
            return measure_task(line, given, folder, limit)
        return PROGRAMS[line.program](line, given, limit)
    except subprocess.TimeoutExpired:
        return Found(line.name, f"not run: more than {limit:.0f} s")
    except subprocess.CalledProcessError as error:
        text = f"{error.stdout or ''}\n{error.stderr or ''}".strip() or f"exit code {error.returncode}"
    except Exception:  # of this process: no line may end the others, whatever a program printed or torch says
        text = traceback.format_exc().strip()
    (folder / "failed.log").open("a").write(f"# {line.name}\n{text[-20_000:]}\n")
    return Found(line.name, f"failed: {text.splitlines()[-1][:160]}")


def measure_task(line: Line, given: argparse.Namespace, folder: Path, limit: float) -> Found:
    changes = {**line.changes}
    if given.tiny:
        changes |= {**TINY[line.task], **TINY_BLOCKS}
        if "compile" in TASKS[line.task]["parameters"]:
            changes["compile"] = "no"  # which would take longer than everything else
    profile = ["benchmarks._profiled", str(folder / f"profile-{slug(line.name)}.txt")] if line.profiled else []
    parameters = {**TASKS[line.task]["presets"][line.preset], **changes}
    details = run_task([*profile, line.task], given, parameters, limit)[-1]["details"]
    protocol = details["throughput_protocol"]
    rate, per_update = protocol["summary"]["median"], protocol["per_update"]
    power = details.get("gpu", {}).get("power_watts")
    unit, factor = protocol["unit"], 1
    if unit == "tokens":
        factor = details["tokens_per_update"] / per_update if "tokens_per_update" in details else 1
    return Found(
        line.name,
        "measured",
        rate=rate * factor,
        unit=unit,
        mfu=details.get("mfu", details.get("mfu_of_measured_peak")),
        milliseconds=1e3 * per_update / rate,
        gigabytes=protocol["peak_memory_bytes"] / 1e9,
        joules_per_sample=power and power / rate,
    )


def run_task(
    words: Sequence[str], given: argparse.Namespace, parameters: Changes, limit: float
) -> list[dict[str, Any]]:
    """Run a task as one rank, and give the lines that it reported: those of certify, and the result as the last."""
    variables = {
        "MLBENCH_DEVICE": "gpu" if given.device == "cuda" else "cpu",
        "MLBENCH_BACKEND": "nccl" if given.device == "cuda" else "gloo",
        "MLBENCH_PARAMETERS": json.dumps(parameters),
    }
    module = words if len(words) > 1 else ["task_images.run", *words]
    printed = run([sys.executable, "-m", *module], limit, variables).splitlines()
    rates = [json.loads(text.removeprefix(PREFIX)) for text in printed if text.startswith(PREFIX)]
    [result] = [event for event in map(parse_event, printed) if event and event["event"] == "result"]
    return [*rates, dict(result)]


def measure_certify(line: Line, given: argparse.Namespace, limit: float) -> Found:
    changes: Changes = {
        "stages": ["drift", "node"],
        **({"burst_seconds": 0.05, "disk_bytes": 1 << 20} if given.tiny else {}),
    }
    said = run_task(["certify"], given, changes, limit)
    rounds = [each["values"] for each in said if each.get("kind") == "rates"]
    if not rounds:
        raise ValueError("stage node reported no rates")
    median = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    rate, peak = 1e9 * median.pop("matmul.burst"), find_peak(torch.device(given.device), "bf16")
    others = ", ".join(f"{name} {value:.0f} G" for name, value in median.items())
    return Found(
        line.name, "measured", rate=rate / 1e12, unit=f"TFLOP; {others}", mfu=rate / (peak.datasheet or peak.measured)
    )


def measure_nanogpt(line: Line, given: argparse.Namespace, limit: float) -> Found:
    options = ["--device", given.device, *(TINY_NANOGPT.split() if given.tiny else ())]
    output = run([sys.executable, str(ROOT / "benchmarks" / "nanogpt.py"), *options], limit, {})
    found = json.loads(output.splitlines()[-1])
    peak = find_peak(torch.device(given.device), "bf16")
    return Found(
        line.name,
        "measured",
        rate=found["tokens_per_second"],
        unit="tokens",
        mfu=found["flops_per_second"] / (peak.datasheet or peak.measured),
        milliseconds=1e3 * found["seconds_per_update"],
        gigabytes=found["peak_memory_bytes"] and found["peak_memory_bytes"] / 1e9,
    )


def measure_matmul(line: Line, given: argparse.Namespace, limit: float) -> Found:
    peak = find_peak(torch.device(given.device), "bf16")
    share = peak.datasheet and peak.measured / peak.datasheet
    return Found(line.name, "measured", rate=peak.measured / 1e12, unit="TFLOP", mfu=share)


def run_tests(line: Line, given: argparse.Namespace, limit: float) -> Found:
    if given.device == "cpu":
        return Found(line.name, "not run: they need a GPU")
    output = run([sys.executable, "-m", "pytest", "-q", "tests/gpu", "-n", "4"], limit, {})
    return Found(line.name, "measured", unit=output.strip().splitlines()[-1])


PROGRAMS = {
    "matmul": measure_matmul,
    "nanogpt": measure_nanogpt,
    "tests": run_tests,
    "certify": measure_certify,
}


def run(command: Sequence[str], limit: float, variables: Mapping[str, str]) -> str:
    """What a command prints. Raises CalledProcessError or TimeoutExpired."""
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=limit)
    return done.stdout


def make_table(title: str, found: Sequence[Found]) -> str:
    columns = ("what", "goal on one H100", "a second", "MFU", "ms an update", "GB", "J a sample", "label")
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    return f"# {title}\n\n{head}" + "".join(make_row(one) + "\n" for one in found)


def make_row(one: Found) -> str:
    def show(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    rate = f"{one.rate:,.0f} {one.unit}" if one.rate is not None else one.unit or one.ended
    if one.rate is not None and one.rate < 100:
        rate = f"{one.rate:.2f} {one.unit}"
    columns = (one.name, one.goal or "–", rate, show(one.mfu, ".1%"), show(one.milliseconds, ".2f"),
               show(one.gigabytes, ".1f"), show(one.joules_per_sample, ".4f"), one.label or "–")  # fmt: skip
    return f"| {' | '.join(columns)} |"


def slug(name: str) -> str:
    return "-".join("".join(letter if letter.isalnum() else " " for letter in name.lower()).split())


if __name__ == "__main__":
    sys.exit(main())
