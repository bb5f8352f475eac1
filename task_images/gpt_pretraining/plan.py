"""Sizes and parts of the decoders, and what follows from parameters and number of ranks: FLOPs, batches.

Standard library only, so that the tool refuses a run that cannot work before anything starts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from task_images.language.plan import PlanError, PretrainingPlan, plan_batch


@dataclass(frozen=True)
class Shape:
    """One decoder. Counts are of tokens, channels, layers and heads. The defaults are those of Llama 3.

    context     longest sequence; only learned positions have parameters for it
    hidden      inner channels of a feed-forward block
    tied        input and output embedding are one tensor
    norm        rms: RMSNorm; layer: LayerNorm with a shift
    positions   rotary: all channels of a head turn; learned: an embedding
    activation  swiglu; gelu: its approximation by tanh
    bias        linear layers have one, but for a tied output layer
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
        return embeddings + head + self.layers * block + norm

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
    "1B": Shape(128_256, 8192, 2048, 16, 32, 8, 8192, tied=True, theta=500_000.0),
    "8B": Shape(128_256, 8192, 4096, 32, 32, 8, 14_336, theta=500_000.0),
}
FLOPS_FORMULA = "6 N_matmul + 12 L d T per token"


def choose_shape(parameters: Mapping[str, Any]) -> Shape:
    """The model's shape, with the run's own vocabulary and context. Raises PlanError if they do not go together."""
    shape = SHAPES[parameters["model"]]
    if parameters["vocabulary"]:
        shape = replace(shape, vocabulary=parameters["vocabulary"])
    shape = replace(shape, multiple=parameters["vocabulary_multiple"])
    length = parameters["sequence_length"]
    if length > shape.context:
        if shape.positions == "learned":
            raise PlanError(
                f"sequence_length is {length}, but the model {parameters['model']} has {shape.context} positions",
                f"--set sequence_length={shape.context}, or a model with rotary positions",
            )
        shape = replace(shape, context=length)
    if parameters["data"] == "python-text" and shape.vocabulary < 256:
        raise PlanError(f"bytes need a vocabulary of 256, the model has {shape.vocabulary}", "--set vocabulary=256")
    return shape


def make_plan(parameters: Mapping[str, Any], ranks: int) -> PretrainingPlan:
    """Raises PlanError, with what to change, if the batch does not fit."""
    return PretrainingPlan(choose_shape(parameters), *plan_batch(ranks, parameters))
