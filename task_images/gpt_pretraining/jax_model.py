"""The decoders of Llama's form (`model.Decoder`) in JAX, on the same names of parameters."""

from functools import partial
from typing import Any

from torch import Tensor

from task_images.gpt_pretraining.settings import Settings
from task_images.gpt_pretraining.shapes import Shape
from task_images.harness.errors import TaskUsageError
from task_images.harness.jax_training import Arrays, JaxProgram, MakeProgram
from task_images.harness.language.tokens import IGNORED, Batch

LLAMA = Shape(vocabulary=1, context=1, width=1, layers=1, heads=1, kv_heads=1, hidden=1)
FORM = ("norm", "positions", "activation", "bias", "qk_norm", "embedding_norm", "softcap", "scale")


def make_decoder(shape: Shape, settings: Settings, shares: int) -> MakeProgram:
    """The program of a decoder. `shares`: passes of all ranks in an update. Raises TaskUsageError for what it lacks."""
    for is_so, what, instead in (
        (any(getattr(shape, name) != getattr(LLAMA, name) for name in FORM), "this model", "--set model=tiny"),
        (settings.parallel != "ddp", f"parallel={settings.parallel}", "--set parallel=ddp"),
        (settings.documents == "separate", "documents=separate", "--set documents=joined"),
        (settings.float8 != "none", "float8", "--set float8=none"),
        (settings.resume or settings.checkpoint_every, "these checkpoints", "Leave out resume and checkpoint_every."),
    ):
        if is_so:
            raise TaskUsageError(f"the backend jax does not have {what}", instead)

    def make(jax: Any) -> JaxProgram:
        compute = partial(_sum_losses, jax, shape)
        return JaxProgram(
            lambda parameters, buffers, tokens, targets: compute(parameters, tokens, targets),
            lambda parameters, buffers, tokens, targets: (
                (loss := compute(parameters, tokens, targets)),
                (loss, buffers),
            ),
            unpack,
        )

    def unpack(batch: Batch) -> tuple[tuple[Tensor, ...], float, float]:
        weight = batch.terms / shares
        return (batch.inputs, batch.targets), weight, weight

    return make


def _sum_losses(jax: Any, shape: Shape, p: Arrays, tokens: Any, targets: Any) -> Any:
    """The sum of cross-entropies in nats; tokens and targets [B, T]."""
    jnp = jax.numpy
    x = p["embedding.weight"][tokens]
    frequencies = 1.0 / shape.theta ** (jnp.arange(0, shape.head_size, 2) / shape.head_size)
    angles = jnp.tile(jnp.outer(jnp.arange(tokens.shape[1]), frequencies), (1, 2))
    turn = partial(_rotate, jnp, jnp.cos(angles)[:, None], jnp.sin(angles)[:, None])

    def norm(name: str, x: Any) -> Any:
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + shape.eps) * p[f"{name}.weight"]

    for name in (f"blocks.{index}" for index in range(shape.layers)):
        rows = norm(f"{name}.attention_norm", x) @ p[f"{name}.attention.qkv.weight"].T
        groups = rows.reshape(*tokens.shape, shape.kv_heads, -1, shape.head_size)  # queries of a key, it, its value
        query = groups[..., :-2, :].reshape(*tokens.shape, shape.heads, shape.head_size)
        mixed = jax.nn.dot_product_attention(turn(query), turn(groups[..., -2, :]), groups[..., -1, :], is_causal=True)
        x = x + mixed.reshape(x.shape) @ p[f"{name}.attention.output.weight"].T
        features = norm(f"{name}.feed_forward_norm", x)
        gate, up, down = (p[f"{name}.feed_forward.{part}.weight"].T for part in ("gate", "up", "down"))
        x = x + (jax.nn.silu(features @ gate) * (features @ up)) @ down
    head = p["embedding.weight" if shape.tied else "output.head.weight"][: shape.vocabulary]
    chances = jax.nn.log_softmax(norm("output.norm", x) @ head.T)
    counts = targets != IGNORED
    chosen = jnp.take_along_axis(chances, jnp.where(counts, targets, 0)[..., None], axis=-1)[..., 0]
    return -(chosen * counts).sum()


def _rotate(jnp: Any, cosines: Any, sines: Any, x: Any) -> Any:
    """Turn pairs (i, i + size/2) of x [B, T, heads, size]."""
    first, second = jnp.split(x, 2, axis=-1)
    return x * cosines + jnp.concatenate((-second, first), axis=-1) * sines
