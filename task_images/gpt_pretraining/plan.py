"""Sizes and parts of the decoders, and what follows from parameters and number of ranks: FLOPs, layout, batches.

Standard library only, so that the tool refuses a run that cannot work before anything starts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from task_images.language.layout import (
    LayoutError,
    PretrainingPlan,
    check_tensor_parallel,
    plan_batch,
    plan_layout,
)

NORMS = ("rms", "layer")
POSITIONS = ("rotary", "half-rotary", "learned")
ACTIVATIONS = ("swiglu", "gelu", "relu2")


@dataclass(frozen=True)
class Shape:
    """One decoder. Counts are of tokens, channels, layers and heads. The defaults are those of Llama 3.

    context     longest sequence; only learned positions have parameters for it
    hidden      inner channels of a feed-forward block
    tied        input and output embedding are one tensor
    norm        rms: RMSNorm; layer: LayerNorm with a shift
    positions   rotary: all channels of a head turn; half-rotary: the slower half stands still; learned: an embedding
    activation  swiglu; gelu: its approximation by tanh; relu2: the square of ReLU (Primer, So et al. 2021)
    bias        linear layers have one, but for a tied output layer
    qk_norm     queries and keys of a head are divided by their root mean square
    embedding_norm   the embedding is normalized before the first layer
    softcap     logits z become c z / sqrt(z^2 + c^2), which stays within -c and c; 0: not
    scale       of the attention's products; 0: 1 / sqrt(head size)
    initial     gpt2: deviation 0.02, less for what is added to the stream; zero: see `model.initial_deviation`
    theta       base of the rotary frequencies; eps: of the normalization
    multiple    embedding and output layer have rows for a multiple of so many words, which suits the tiles of a GPU's
                matrix products. The rows beyond the vocabulary stay 0, have no probability, and count in no figure
    """

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    tied: bool = False
    norm: str = "rms"
    positions: str = "rotary"
    activation: str = "swiglu"
    bias: bool = False
    qk_norm: bool = False
    embedding_norm: bool = False
    softcap: float = 0.0
    scale: float = 0.0
    initial: str = "gpt2"
    theta: float = 10_000.0
    eps: float = 1e-5
    multiple: int = 1

    @property
    def padded_vocabulary(self) -> int:
        """Rows of embedding and output layer."""
        return -(-self.vocabulary // self.multiple) * self.multiple

    @property
    def head_size(self) -> int:
        """Channels of one head."""
        return self.width // self.heads

    @property
    def parameters(self) -> int:
        """Number of parameters; a tied tensor counts once."""
        d, v, biases = self.width, self.vocabulary, int(self.bias)
        norm = 2 * d if self.norm == "layer" else d
        rows = d + 2 * self.kv_heads * self.head_size + d  # of all matrices of the attention
        inner = self.hidden * (2 if self.activation == "swiglu" else 1)
        block = rows * (d + biases) + inner * (d + biases) + self.hidden * d + d * biases + 2 * norm
        embeddings = v * d + (self.context * d if self.positions == "learned" else 0)
        head = 0 if self.tied else v * (d + biases)
        return embeddings + head + self.layers * block + norm * (2 if self.embedding_norm else 1)

    @property
    def matmul_parameters(self) -> int:
        """Weights that every token is multiplied by: of the blocks, and the output embedding, tied or not."""
        d, key = self.width, self.kv_heads * self.head_size
        feed_forward = (3 if self.activation == "swiglu" else 2) * d * self.hidden
        return self.layers * (2 * d * d + 2 * d * key + feed_forward) + self.vocabulary * d

    def flops_per_token(self, length: int) -> float:
        """FLOPs of forward and backward pass for one token of a sequence of `length` tokens.

        6 (matmul parameters) + 12 layers x width x length: backward is twice forward, attention counts all length^2
        pairs although half are masked, and nothing is counted twice for activation checkpointing (the convention of
        torchtitan and of PaLM's appendix B, without the input embedding).
        """
        return 6.0 * self.matmul_parameters + 12.0 * self.layers * self.width * length


GPT2 = {"norm": "layer", "positions": "learned", "activation": "gelu", "bias": True, "tied": True}

SHAPES = {
    "tiny": Shape(vocabulary=256, context=64, width=64, layers=2, heads=4, kv_heads=2, hidden=176),
    "124M": Shape(50_257, 1024, 768, 12, 12, 12, 3072, **GPT2),  # type: ignore[arg-type]
    # The decoder of modded-nanogpt's optimizer track (train_gpt_simple.py).
    "124M-modern": Shape(
        vocabulary=50_257,
        context=1024,
        width=768,
        layers=12,
        heads=6,
        kv_heads=6,
        hidden=3072,
        positions="half-rotary",
        activation="relu2",
        bias=True,
        qk_norm=True,
        embedding_norm=True,
        softcap=15.0,
        scale=0.12,
        initial="zero",
        theta=1024.0,
        eps=1e-6,
    ),
    "1B": Shape(128_256, 8192, 2048, 16, 32, 8, 8192, tied=True, theta=500_000.0),
    "8B": Shape(128_256, 8192, 4096, 32, 32, 8, 14_336, theta=500_000.0),
}
FLOPS_FORMULA = "6 N_matmul + 12 L d T per token"


@dataclass(frozen=True)
class Plan(PretrainingPlan):
    """The plan of a decoder."""

    shape: Shape


def choose_shape(parameters: Mapping[str, Any]) -> Shape:
    """The model's shape, with the run's own vocabulary and context. Raises LayoutError if they do not go together."""
    shape = SHAPES[parameters["model"]]
    if parameters["vocabulary"]:
        shape = replace(shape, vocabulary=parameters["vocabulary"])
    shape = replace(shape, multiple=parameters["vocabulary_multiple"], **choose_parts(parameters))
    length = parameters["sequence_length"]
    if length > shape.context:
        if shape.positions == "learned":
            raise LayoutError(
                f"sequence_length is {length}, but the model {parameters['model']} has {shape.context} positions",
                f"--set sequence_length={shape.context}, or a model with rotary positions",
            )
        shape = replace(shape, context=length)
    if parameters["data"] == "python-text" and shape.vocabulary < 256:
        raise LayoutError(f"bytes need a vocabulary of 256, the model has {shape.vocabulary}", "--set vocabulary=256")
    return shape


def choose_parts(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of the shape that the parameters name instead of the model's own."""
    found = {name: parameters[name] for name in ("norm", "positions", "activation") if parameters[name] != "model"}
    found |= {name: parameters[name] == "yes" for name in ("qk_norm", "tied") if parameters[name] != "model"}
    if parameters["softcap"] >= 0:
        found["softcap"] = parameters["softcap"]
    return found


def make_plan(parameters: Mapping[str, Any], ranks: int, per_node: int = 1) -> Plan:
    """Raises LayoutError, with what to change, if the mesh or the batch does not fit."""
    shape = choose_shape(parameters)
    tensor, replicas = parameters["tensor_parallel"], parameters["replicas"]
    layout = plan_layout(parameters["parallel"], ranks, tensor, replicas, per_node)
    if layout.tensor > 1:
        if shape.positions == "learned" or shape.bias or shape.embedding_norm:
            raise LayoutError(
                f"the model {parameters['model']} has parts that do not support tensor parallelism: learned"
                " positions, biases, or a norm of the embedding",
                "--set parallel=fsdp2, or a Llama model (1B, 8B)",
            )
        length = parameters["sequence_length"]
        check_tensor_parallel(layout, heads=shape.heads, kv_heads=shape.kv_heads, length=length, hidden=shape.hidden)
        if parameters["loss_chunk"]:
            raise LayoutError(
                "loss_chunk does not support tensor parallelism, which already splits sequences",
                "--set loss_chunk=0, or --set parallel=fsdp2",
            )
    global_batch, passes, micro_batch = plan_batch(layout, parameters)
    return Plan(shape, layout, global_batch, passes, micro_batch)


def check(parameters: Mapping[str, Any], ranks: int, per_machine: int) -> None:
    """Raise LayoutError if `ranks` ranks, `per_machine` of them on each machine, cannot run this."""
    make_plan(parameters, ranks, per_machine)
