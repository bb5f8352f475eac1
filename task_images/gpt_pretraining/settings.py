"""Parameters of the pretraining of decoders."""

from dataclasses import dataclass

from task_images.gpt_pretraining.shapes import ACTIVATIONS, NORMS, POSITIONS, SHAPES
from task_images.harness.settings import PretrainingSettings, parameter


@dataclass(frozen=True)
class Settings(PretrainingSettings):
    """Parameters of the task, with the preset `spec` as defaults: GPT-2's smallest size by llm.c's recipe
    (scripts/run_gpt2_124M.sh): 18 865 updates of 524 288 tokens, 9.89 billion in all. llm.c and its PyTorch trainer end
    at 3.27 to 3.29 there."""

    model: str = parameter(
        "124M",
        "shape of the decoder: 124M as GPT-2, 124M-modern as in the speed runs, the others as Llama 3",
        choices=tuple(SHAPES),
    )
    norm: str = parameter("model", "RMSNorm or LayerNorm instead of the model's own", choices=("model", *NORMS))
    positions: str = parameter(
        "model",
        "how positions are told instead of the model's own way; half-rotary: half of each head does not turn",
        choices=("model", *POSITIONS),
    )
    activation: str = parameter(
        "model",
        "of the feed-forward layers instead of the model's own; relu2: the square of ReLU",
        choices=("model", *ACTIVATIONS),
    )
    qk_norm: str = parameter("model", "whether queries and keys are normalized", choices=("model", "yes", "no"))
    tied: str = parameter("model", "whether embedding and output layer are one tensor", choices=("model", "yes", "no"))
    softcap: float = parameter(
        -1.0, "logits stay within this bound on both sides; 0: no bound; -1: the model's own", min=-1, max=1000
    )
    data: str = parameter(
        "shards",
        "shards: FineWeb-10B's files in the data folder; tokens: token files of your own; python-text: bytes "
        "of the text that comes with Python; synthetic: random, for throughput only",
        choices=("shards", "tokens", "python-text", "synthetic"),
    )
    order: str = parameter(
        "files",
        "files: windows follow each other as in the files; shuffled: once more for every epoch",
        choices=("files", "shuffled"),
    )
    documents: str = parameter(
        "joined",
        "joined: windows ignore the ends of documents; separate: no attention across their borders, and "
        "positions begin again",
        choices=("joined", "separate"),
    )
    vocabulary_multiple: int = parameter(
        64,
        "embedding and output layer have rows for a multiple of so many words, which suits GPUs; the loss is "
        "the same; 1: for the vocabulary alone",
        min=1,
        max=65536,
    )
    stream: str = parameter(
        "fp32",
        "number format of what the layers add to (the residual stream); bf16 with precision=bf16 only",
        choices=("fp32", "bf16"),
    )
    float8: str = parameter(
        "none",
        "products in 8 bits: of the output layer, or of all linear layers. Other numbers than bf16",
        choices=("none", "head", "all"),
    )
    optimizer: str = parameter(
        "adamw",
        "muon: for the matrices of the layers, shared out over the ranks; the rest by AdamW",
        choices=("adamw", "muon"),
    )
    matrix_rate: float = parameter(0.0, "highest rate of Muon; 0: learning_rate", min=0, max=100)
    matrix_decay: float = parameter(0.1, "weight decay of the matrices that Muon moves", min=0, max=10)
    orthogonalization: str = parameter(
        "fast",
        "of Muon; fast: 5 iterations, singular values end near 1; exact: 12 iterations, they end at 1",
        choices=("fast", "exact"),
    )
    embedding_rate: float = parameter(0.0, "highest rate of the embedding; 0: learning_rate", min=0, max=100)
    head_rate: float = parameter(
        0.0, "highest rate of the output layer's matrix, if it is not tied; 0: learning_rate", min=0, max=100
    )
    validation_sequences: int = 10240
    parallel: str = parameter(
        "ddp",
        "ddp: copies; fsdp2: state in shards; hsdp: copies of shards; tp: split layers; tp+fsdp2: both",
        choices=("ddp", "fsdp2", "hsdp", "tp", "tp+fsdp2"),
    )
    tensor_parallel: int = parameter(
        0, "ranks that share every layer; 0: all with tp, 2 with tp+fsdp2", min=0, max=1024
    )
    loss_chunk: int = parameter(
        0,
        "tokens of a rank whose logits exist at a time; the backward pass computes them again; 0: those of "
        "the whole pass",
        min=0,
        max=16777216,
    )
    goal_full: float = 3.28
    global_batch: int = 512
    micro_batch: int = 64
    steps: int = 18865
    final_rate: float = 0.0
    compile: str = "whole"
