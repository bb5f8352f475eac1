"""Sizes and parts of the decoders, and what follows from them: parameters, FLOPs, memory. Standard library only."""

from dataclasses import dataclass

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
