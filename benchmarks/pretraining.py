"""Steps of the pretraining tasks against programs without mlbench, one rank with one thread, in turn.

    python benchmarks/pretraining.py [ROUNDS]

    gpt   the task with its preset tiny, against a plain loop in torch over the same model: windows of tokens in memory,
          forward pass, backward pass, clipped gradient, torch's AdamW as it comes
    bert  the task with BERT-Base, one sentence of 64 tokens, against transformers' BertForPreTraining with dropout,
          attention by scaled_dot_product_attention, and torch's AdamW as it comes

Each round runs every program once, by the throughput protocol: warm-up, then blocks of equally many updates; a
program's figure is the median over the blocks of all rounds. The losses are the same function of as many tokens.
Budget: the task takes no longer, 1.0 each. Last, two ranks train the tiny decoder, and the time that the protocol
itself takes at the borders of blocks, on the rank that waits least there, is compared with the blocks. Budget: 0.5 %.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _ranks
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mlbench_cli.tasks.catalog import load_task
from task_images.bert_pretraining.plan import SHAPES as BERT_SHAPES
from task_images.clock import Throughput
from task_images.contract import Contract, parse_event
from task_images.gpt_pretraining.model import Decoder, initial_deviation
from task_images.gpt_pretraining.plan import SHAPES
from task_images.language.model import fill_parameters
from task_images.parameters import ThroughputProtocol
from task_images.world import open_world

ROOT = Path(__file__).parents[1]
SEQUENCES, TOKENS = 32, 64  # an update of the tiny decoder
RATE, BETAS, DECAY = 1e-3, (0.9, 0.95), 0.1
PROTOCOLS = {
    "gpt": ThroughputProtocol(warmup=10, blocks=5, updates=20),
    "bert": ThroughputProtocol(warmup=2, blocks=3, updates=4),
}
PARAMETERS: dict[str, dict[str, object]] = {
    "gpt": {"preset": "tiny", "data": "synthetic", "synthetic_tokens": 65_536},
    "bert": {
        "preset": "throughput",
        "model": "base",
        "precision": "fp32",
        "sequence_length": TOKENS,
        "global_batch": 1,
        "batch_per_rank": 0,
        "micro_batch": 1,
        "synthetic_tokens": 65_536,
    },
}
Step = Callable[[], None]


def main() -> None:
    role = os.environ.get("BENCHMARK_ROLE")
    if role == "protocol":
        measure_protocol()
    elif role:
        print(json.dumps(time_blocks({"gpt": plain_gpt, "bert": transformers_bert}[role](), PROTOCOLS[role])))
    else:
        compare(int(sys.argv[1]) if len(sys.argv) > 1 else 4)


def compare(rounds: int) -> None:
    for name, other in (("gpt", "plain torch"), ("bert", "transformers")):
        seconds: dict[str, list[float]] = {"task": [], other: []}
        for number in range(rounds):
            ways = [("task", run_task), (other, run_other)]
            for way, run in ways if number % 2 else ways[::-1]:
                seconds[way] += run(name)
        task, theirs = (statistics.median(values) for values in seconds.values())
        print(f"{name:<5} task {1e3 * task:8.1f} ms a step, {other} {1e3 * theirs:8.1f} ms", end="", flush=True)
        print(f"  = {theirs / task:.2f} times as fast (budget 1.0)")
    sys.exit(_ranks.start(__file__, 2, {"BENCHMARK_ROLE": "protocol"}))


def run_task(name: str) -> list[float]:
    """Seconds of an update in each block of a run of the task."""
    protocol = PROTOCOLS[name]
    changes = {**PARAMETERS[name], "blocks_after": protocol.warmup, "blocks": protocol.blocks}
    changes["block_updates"] = protocol.updates
    task = load_task(f"{name}_pretraining")
    parameters = task.resolve(str(changes.pop("preset")), changes)
    given = {"MLBENCH_DEVICE": "cpu", "MLBENCH_PARAMETERS": json.dumps(parameters), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "task_images.run", f"{name}_pretraining"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **given}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    events = (parse_event(line) for line in done.stdout.splitlines())
    [result] = [event for event in events if event and event["event"] == "result"]
    return [max(block) / protocol.updates for block in result["details"]["throughput_protocol"]["seconds"]]


def run_other(name: str) -> list[float]:
    given = {**os.environ, "BENCHMARK_ROLE": name, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=given, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return [float(value) for value in json.loads(done.stdout.splitlines()[-1])]


def time_blocks(step: Step, protocol: ThroughputProtocol) -> list[float]:
    """Seconds of an update in each block."""
    for _ in range(protocol.warmup):
        step()
    found = []
    for _ in range(protocol.blocks):
        begin = time.perf_counter()
        for _ in range(protocol.updates):
            step()
        found.append((time.perf_counter() - begin) / protocol.updates)
    return found


# --- the other programs -----------------------------------------------------------------------------------------------


def plain_gpt() -> Step:
    """The same decoder in a loop as one writes it."""
    shape = SHAPES["tiny"]
    model = Decoder(shape)
    fill_parameters(model, lambda name: initial_deviation(name, shape), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY)
    stream = torch.randint(shape.vocabulary, (65_536,))

    def step() -> None:
        begins = torch.randint(len(stream) - TOKENS - 1, (SEQUENCES,)).tolist()
        windows = torch.stack([stream[begin : begin + TOKENS + 1] for begin in begins])
        optimizer.zero_grad()
        logits = model(windows[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def transformers_bert() -> Step:
    """BERT-Base of the library that most people train it with; the head sees all 64 positions there."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=BERT_SHAPES["base"].vocabulary)
    model: Any = transformers.BertForPreTraining(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY)
    hidden = torch.zeros(1, TOKENS, dtype=torch.bool)
    hidden[0, 1 : 1 + max(1, round(0.15 * TOKENS))] = True

    def step() -> None:
        tokens = torch.randint(config.vocab_size, (1, TOKENS))
        types = (torch.arange(TOKENS) >= TOKENS // 2).long().unsqueeze(0)
        optimizer.zero_grad()
        answer = model(
            input_ids=tokens,
            token_type_ids=types,
            attention_mask=torch.ones_like(tokens),
            labels=tokens.masked_fill(~hidden, -100),
            next_sentence_label=torch.zeros(1, dtype=torch.long),
        )
        answer.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


# --- the protocol -----------------------------------------------------------------------------------------------------


def measure_protocol() -> None:
    """What two ranks spend at the borders of blocks."""
    world, step = open_world(Contract()), plain_gpt()
    protocol = PROTOCOLS["gpt"]
    meter, calls, begin = Throughput(world, protocol, unit="sequences"), [], time.perf_counter()
    while not meter.is_over:
        step()
        asked = time.perf_counter()
        meter.after_update(SEQUENCES * world.size)
        calls.append(time.perf_counter() - asked)
    whole = time.perf_counter() - begin
    rows = world.gather(calls)  # whoever comes first waits for the others, which is no work of the protocol's
    if world.is_first:
        share = sum(min(column) for column in zip(*rows, strict=True)) / whole
        print(f"the protocol itself: {share:.3%} of the time (budget 0.5 %)")
    world.close()


if __name__ == "__main__":
    main()
