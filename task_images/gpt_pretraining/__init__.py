"""Decoder pretraining, from a minute on one core to the sizes by which clusters are judged."""

from dataclasses import dataclass

from task_images.gpt_pretraining.plan import SHAPES
from task_images.language import PretrainingSettings
from task_images.language.layout import PARALLEL
from task_images.parameters import Task, parameter


@dataclass(frozen=True)
class Settings(PretrainingSettings):
    """Parameters of the task, with the preset `spec` as defaults: GPT-2's smallest size by llm.c's recipe
    (scripts/run_gpt2_124M.sh): 18 865 updates of 524 288 tokens, 9.89 billion in all. llm.c and its PyTorch trainer end
    at 3.27 to 3.29 there."""

    model: str = parameter(
        "124M",
        "shape of the decoder: 124M as GPT-2, the others as Llama 3",
        choices=tuple(SHAPES),
    )
    data: str = parameter(
        "shards",
        "shards: FineWeb-10B's files in the data folder; tokens: token files of your own; python-text: bytes "
        "of the text that comes with Python; synthetic: random, for throughput only",
        choices=("shards", "tokens", "python-text", "synthetic"),
    )
    order: str = parameter(
        "files",
        "files: windows in file order; shuffled: reshuffled every epoch",
        choices=("files", "shuffled"),
    )
    vocabulary_multiple: int = parameter(
        64,
        "pad the rows of embedding and output layer to a multiple of this, which suits GPUs; same loss; 1: no padding",
        min=1,
        max=65536,
    )
    stream: str = parameter(
        "fp32",
        "number format of the residual stream; bf16 only with precision=bf16",
        choices=("fp32", "bf16"),
    )
    validation_sequences: int = 10240
    parallel: str = parameter(
        "ddp",
        "ddp: replicas; fsdp2: sharded state; hsdp: replicated shards",
        choices=PARALLEL,
    )
    goal_full: float = 3.28
    global_batch: int = 512
    micro_batch: int = 64
    steps: int = 18865
    final_rate: float = 0.0
    compile: str = "whole"


TASK = Task(
    settings=Settings,
    number="5a",
    title="GPT and Llama pretraining",
    backends=["gloo", "nccl"],
    devices=["cpu", "gpu"],
    measured_on=["CPU", "1 x H100"],
    method={
        "own": "ddp",
        "refuses": {"fsdp2": "--set parallel=fsdp2 shards its model", "hsdp": "--set parallel=hsdp shards its model"},
    },
    goal={"metric": "loss", "comparison": "<=", "wording": "validation loss of {threshold} nats per token"},
    data=(
        "FineWeb-10B as GPT-2's tokens in llm.c's shards (fineweb_train_000001.bin, ...), 20 GB, or "
        "your own token files (train.bin, val.bin, tokens.json); the preset tiny uses text that comes"
        " with Python"
    ),
    free=[
        "micro_batch",
        "parallel",
        "replicas",
        "reshard",
        "activation_checkpointing",
        "compile",
        "attention",
        "checkpoint_every",
        "checkpoint_dir",
        "vocabulary_multiple",
    ],
    files={
        "when": {"data": ["shards", "tokens"]},
        "folders": ["."],
        "wanted": [["*_train_000001.bin", "train.bin"], ["*_val_000000.bin", "val.bin"]],
        "instead": "--set data=synthetic, or --preset tiny",
    },
    preflight="task_images.gpt_pretraining.plan",
    notes=[
        ("models: tiny 125,248 parameters, 124M (GPT-2) 124,439,808, 1B 1,235,814,400, 8B (Llama 3) 8,030,261,248"),
        (
            "embedding and output layer of 124M have 50,304 rows for GPT-2's 50,257 words, a multiple"
            " of 64 (vocabulary_multiple); padding rows stay 0, have no probability, and count "
            "neither as parameters nor as FLOPs. The gain on a GPU has not been measured"
        ),
    ],
    presets={
        # The defaults, under the name of llm.c.
        "llmc": {},
        # Your own token files, with the same goal or another: shuffled windows.
        "own": {
            "data": "tokens",
            "order": "shuffled",
            "validation_sequences": 0,
        },
        # The protocol of all tasks' throughput presets, on synthetic tokens; no goal.
        "throughput": {
            "data": "synthetic",
            "order": "shuffled",
            "batch_per_rank": 64,
            "micro_batch": 64,
            "clip": 0.0,
            "blocks": 10,
        },
        "124M": {
            "data": "synthetic",
            "order": "shuffled",
            "compile": "blocks",
            "batch_per_rank": 64,
            "micro_batch": 64,
            "blocks": 10,
        },
        "1B": {
            "model": "1B",
            "data": "synthetic",
            "order": "shuffled",
            "compile": "blocks",
            "sequence_length": 8192,
            "batch_per_rank": 2,
            "micro_batch": 1,
            "parallel": "fsdp2",
            "activation_checkpointing": "selective",
            "learning_rate": 0.0003,
            "blocks": 10,
            "block_updates": 5,
        },
        "8B": {
            "model": "8B",
            "data": "synthetic",
            "order": "shuffled",
            "compile": "blocks",
            "sequence_length": 8192,
            "batch_per_rank": 2,
            "micro_batch": 1,
            "parallel": "fsdp2",
            "activation_checkpointing": "selective",
            "learning_rate": 0.0003,
            "blocks": 10,
            "block_updates": 5,
        },
        # Bytes of the language reference that comes with Python; half a minute on one core.
        "tiny": {
            "model": "tiny",
            "data": "python-text",
            "order": "shuffled",
            "compile": "no",
            "validation_sequences": 0,
            "final_rate": 0.1,
            "sequence_length": 64,
            "global_batch": 32,
            "micro_batch": 0,
            "steps": 800,
            "learning_rate": 0.005,
            "warmup_steps": 40,
            "evaluate_every": 50,
            "precision": "fp32",
            "goal_full": 1.5,
            "goal_light": 1.75,
        },
    },
)
