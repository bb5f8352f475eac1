"""Parameters of the pretraining of decoders."""

from dataclasses import dataclass

from task_images.gpt_pretraining.shapes import ACTIVATIONS, NORMS, POSITIONS, SHAPES
from task_images.parameters import PretrainingSettings, parameter


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
    norm: str = parameter("model", "RMSNorm or LayerNorm instead of the model's default", choices=("model", *NORMS))
    positions: str = parameter(
        "model",
        "position encoding instead of the model's default; half-rotary: half of each head is not rotated",
        choices=("model", *POSITIONS),
    )
    activation: str = parameter(
        "model",
        "activation of the feed-forward layers instead of the model's default; relu2: squared ReLU",
        choices=("model", *ACTIVATIONS),
    )
    qk_norm: str = parameter("model", "whether queries and keys are normalized", choices=("model", "yes", "no"))
    tied: str = parameter("model", "whether embedding and output layer are one tensor", choices=("model", "yes", "no"))
    softcap: float = parameter(
        -1.0, "cap logits at this absolute value; 0: no cap; -1: the model's default", min=-1, max=1000
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
    documents: str = parameter(
        "joined",
        "joined: windows ignore document ends; separate: no attention across documents, and positions restart",
        choices=("joined", "separate"),
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
    float8: str = parameter(
        "none",
        "8-bit products in the output layer or all linear layers; changes the numbers",
        choices=("none", "head", "all"),
    )
    optimizer: str = parameter(
        "adamw",
        "muon: for the matrices of the layers, distributed over the ranks; AdamW for the rest",
        choices=("adamw", "muon"),
    )
    matrix_rate: float = parameter(0.0, "highest rate of Muon; 0: learning_rate", min=0, max=100)
    matrix_decay: float = parameter(0.1, "weight decay of the matrices that Muon updates", min=0, max=10)
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
        "ddp: replicas; fsdp2: sharded state; hsdp: replicated shards; tp: split layers; tp+fsdp2: both",
        choices=("ddp", "fsdp2", "hsdp", "tp", "tp+fsdp2"),
    )
    tensor_parallel: int = parameter(
        0, "ranks that share every layer; 0: all with tp, 2 with tp+fsdp2", min=0, max=1024
    )
    loss_chunk: int = parameter(
        0,
        "tokens per rank whose logits are in memory at once; the backward pass recomputes them; 0: the whole pass",
        min=0,
        max=16777216,
    )
    goal_full: float = 3.28
    global_batch: int = 512
    micro_batch: int = 64
    steps: int = 18865
    final_rate: float = 0.0
    compile: str = "whole"
