"""BERT pretraining as defined in 2018, for comparison with the communication benchmarks that used it."""

from dataclasses import dataclass

from task_images.bert_pretraining.plan import SHAPES
from task_images.language import PretrainingSettings
from task_images.language.layout import PARALLEL
from task_images.parameters import Task, parameter


@dataclass(frozen=True)
class Settings(PretrainingSettings):
    """Parameters of the task, with the preset `spec` as defaults: Devlin et al. 2018, on WikiText-103."""

    model: str = parameter("base", "shape of the encoder", choices=tuple(SHAPES))
    data: str = parameter(
        "wikitext-103",
        "wikitext-103: paragraphs of WikiText-103; text: train.txt, valid.txt and vocab.txt in the data folder; "
        "python-text: bytes of the text that comes with Python; synthetic: random; "
        "legacy: one random batch, the answers 0, as in the benchmark of 2020",
        choices=("wikitext-103", "text", "python-text", "synthetic", "legacy"),
    )
    validation_sequences: int = parameter(
        4096, "sequences per validation, always with the same masked tokens", min=1, max=100000000
    )
    dropout: float = parameter(0.1, "of embeddings, attention and layers", min=0, max=0.9)
    sequence_length: int = parameter(128, "tokens of both sentences, including three special tokens", min=8, max=512)
    parallel: str = parameter("ddp", "ddp: replicas; fsdp2: sharded state; hsdp: replicated shards", choices=PARALLEL)
    goal_full: float = parameter(
        2.0, "validation loss of masked tokens, in nats, at which the clock stops", min=0, max=1000
    )
    global_batch: int = 256
    micro_batch: int = 32
    steps: int = 1000000
    learning_rate: float = 0.0001
    warmup_steps: int = 10000
    final_rate: float = 0.0
    beta2: float = 0.999
    weight_decay: float = 0.01
    evaluate_every: int = 1000
    goal_light: float = 2.4


TASK = Task(
    settings=Settings,
    number="5b",
    title="BERT pretraining",
    backends=["gloo", "nccl"],
    devices=["cpu", "gpu"],
    measured_on=["CPU", "1 x H100"],
    method={
        "own": "ddp",
        "refuses": {"fsdp2": "--set parallel=fsdp2 shards its model", "hsdp": "--set parallel=hsdp shards its model"},
    },
    goal={"metric": "mlm_loss", "comparison": "<=", "wording": "validation loss of {threshold} nats per hidden token"},
    data=(
        "WikiText-103 (wikitext-103-raw-v1.zip, 192 MB) with BERT's vocabulary (vocab.txt); or your "
        "own text (preset own: train.txt, valid.txt); the preset tiny uses text that comes with Python"
    ),
    free=[
        "micro_batch",
        "parallel",
        "replicas",
        "reshard",
        "activation_checkpointing",
        "compile",
        "checkpoint_every",
        "checkpoint_dir",
    ],
    files={
        "when": {"data": ["wikitext-103", "text"]},
        "folders": ["."],
        "wanted": [
            ["wikitext-103-raw-v1.zip", "train.txt", "bert-*.cache"],
            ["vocab.txt", "valid.txt", "bert-*.cache"],
        ],
        "instead": "--set data=synthetic, or --preset tiny",
    },
    preflight="task_images.bert_pretraining.plan",
    notes=[
        (
            "base has 110,111,042 parameters in 206 tensors, large 336,232,258 in 398 (vocabulary "
            "30,522, padded to 30,528)"
        ),
        ("15 % of the tokens are masked: 80 % of these become [MASK], 10 % a random token, 10 % stay unchanged"),
    ],
    presets={
        # Your own train.txt, valid.txt and vocab.txt.
        "own": {
            "data": "text",
        },
        # Sentences per second by the protocol of all tasks' throughput presets; 64 sentences of 64 tokens per rank.
        "throughput": {
            "data": "synthetic",
            "sequence_length": 64,
            "batch_per_rank": 64,
            "micro_batch": 0,
            "precision": "fp32",
            "clip": 0.0,
            "blocks": 10,
        },
        "throughput-512": {
            "data": "synthetic",
            "sequence_length": 512,
            "batch_per_rank": 8,
            "micro_batch": 0,
            "blocks": 10,
        },
        "large": {
            "model": "large",
            "data": "synthetic",
            "sequence_length": 64,
            "batch_per_rank": 8,
            "micro_batch": 0,
            "precision": "fp32",
            "clip": 0.0,
            "blocks": 10,
        },
        # As the benchmark of 2020 ran it: one fixed batch, attention masks, token types and answers all 0, fp32.
        "legacy": {
            "data": "legacy",
            "sequence_length": 64,
            "batch_per_rank": 64,
            "micro_batch": 0,
            "precision": "fp32",
            "clip": 0.0,
            "blocks": 10,
        },
        "legacy-large": {
            "model": "large",
            "data": "legacy",
            "sequence_length": 64,
            "batch_per_rank": 8,
            "micro_batch": 0,
            "precision": "fp32",
            "clip": 0.0,
            "blocks": 10,
        },
        # Bytes of the language reference that comes with Python; half a minute on one core.
        "tiny": {
            "model": "tiny",
            "data": "python-text",
            "validation_sequences": 384,
            "dropout": 0.0,
            "sequence_length": 32,
            "global_batch": 64,
            "micro_batch": 0,
            "steps": 1500,
            "learning_rate": 0.005,
            "warmup_steps": 100,
            "beta2": 0.98,
            "evaluate_every": 100,
            "precision": "fp32",
        },
    },
)
