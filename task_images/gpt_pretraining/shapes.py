"""Sizes of the decoders, and what follows from them: parameters, FLOPs, memory. Standard library only.

Two forms. `llama`: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases (Touvron et al. 2023; Llama 3,
2024). `gpt2`: LayerNorm, learned positions, GELU (tanh), biases (Radford et al. 2019).
"""

from dataclasses import dataclass

FORMS = ("llama", "gpt2")


@dataclass(frozen=True)
class Shape:
    """One decoder. Counts are of tokens, channels, layers and heads.

    context   longest sequence; only the form gpt2 has parameters for it
    hidden    inner channels of a feed-forward block
    tied      input and output embedding are one tensor
    theta     base of the rotary frequencies; eps: of the normalisation
    multiple  embedding and output layer have rows for a multiple of so many words, which suits the tiles of a GPU's
              matrix products. The rows beyond the vocabulary stay 0, have no probability, and count in no figure
    """

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    form: str = "llama"
    tied: bool = False
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
        d, f, key = self.width, self.hidden, self.kv_heads * self.head_size
        if self.form == "gpt2":
            block = 4 * d * d + 2 * d * f + 9 * d + f
            return self.vocabulary * d * (1 if self.tied else 2) + self.context * d + self.layers * block + 2 * d
        block = 2 * d * d + 2 * d * key + 3 * d * f + 2 * d
        return self.vocabulary * d * (1 if self.tied else 2) + self.layers * block + d

    @property
    def matmul_parameters(self) -> int:
        """Weights that every token is multiplied by: of the blocks, and the output embedding, tied or not."""
        d, key = self.width, self.kv_heads * self.head_size
        feed_forward = (2 if self.form == "gpt2" else 3) * d * self.hidden
        return self.layers * (2 * d * d + 2 * d * key + feed_forward) + self.vocabulary * d

    def flops_per_token(self, length: int) -> float:
        """FLOPs of forward and backward pass for one token of a sequence of `length` tokens.

        6 (matmul parameters) + 12 layers x width x length: backward is twice forward, attention counts all length^2
        pairs although half are masked, and nothing is counted twice for activation checkpointing (the convention of
        torchtitan and of PaLM's appendix B, without the input embedding).
        """
        return 6.0 * self.matmul_parameters + 12.0 * self.layers * self.width * length


SHAPES = {
    "tiny": Shape(vocabulary=256, context=64, width=64, layers=2, heads=4, kv_heads=2, hidden=176),
    "124M": Shape(50_257, 1024, 768, 12, 12, 12, 3072, form="gpt2", tied=True),
    "1B": Shape(128_256, 8192, 2048, 16, 32, 8, 8192, tied=True, theta=500_000.0),
    "8B": Shape(128_256, 8192, 4096, 32, 32, 8, 14_336, theta=500_000.0),
}
FLOPS_FORMULA = "6 N_matmul + 12 L d T per token"
