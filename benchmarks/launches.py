"""Operations that an update of the decoder dispatches, and the host's time for it: before and after each change.

    python -m benchmarks.launches [LAYERS]

Without a GPU the operations that torch dispatches stand for kernels: in eager mode each launches at least one. The
decoder is narrow, so that the time is the host's own. `before` is what the task did until 2026: three matrices for
queries, keys and values, a padded vocabulary masked in place, clipping at infinity, and gradients zeroed in place.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from task_images.gpt_pretraining.model import Decoder
from task_images.gpt_pretraining.plan import SHAPES
from task_images.language.model import fill_parameters

SEQUENCES, LENGTH, UPDATES = 2, 32, 30
# Views and the like launch nothing.
FREE = (
    *("view", "_unsafe_view", "transpose", "t.default", "detach", "split", "slice", "expand", "unsqueeze", "select"),
    *("alias", "permute"),
)


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is dispatched within the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).removeprefix("aten.")
        if not name.startswith(FREE):
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


class OldAttention(nn.Module):
    """Causal attention with a matrix each for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, rotation: object) -> Tensor:
        layers = self.query, self.key, self.value
        query, key, value = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in layers)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def make(layers: int, *, is_before: bool) -> tuple[Decoder, Callable[[], None]]:
    """The decoder and one update of it."""
    shape = replace(
        SHAPES["124M"], vocabulary=500, multiple=64, width=64, heads=4, kv_heads=4, hidden=128, layers=layers
    )
    model = Decoder(shape)
    if is_before:
        for block in model.blocks:
            block.attention = OldAttention(shape.width, shape.heads)
    fill_parameters(model, lambda name: 0.02, 0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(500, (SEQUENCES, LENGTH + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    parameters = list(model.parameters())

    def update() -> None:
        if is_before:
            logits = model.output.head(model.output.norm(run_blocks(model, inputs)))
            logits.data[..., 500:] = float("-inf")
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        else:
            loss = model(inputs, targets=targets)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None])
        if is_before:
            nn.utils.clip_grads_with_norm_(parameters, float("inf"), norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not is_before)

    return model, update


def run_blocks(model: Decoder, inputs: Tensor) -> Tensor:
    """The decoder without its output."""
    assert model.positions is not None
    x: Tensor = model.embedding(inputs) + model.positions(torch.arange(inputs.shape[1]))
    for block in model.blocks:
        x = block(x, None)
    return x


def main() -> None:
    layers = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    torch.set_num_threads(1)
    counts = {}
    for word in ("before", "after"):
        _, update = make(layers, is_before=word == "before")
        update()
        with Counting() as counting:
            update()
        seconds = []
        for _ in range(UPDATES):
            begin = time.perf_counter()
            update()
            seconds.append(time.perf_counter() - begin)
        counts[word] = counting.found
        total, host = counting.found.total(), 1e3 * statistics.median(seconds)
        print(f"{word:<8}{total:>6} operations an update, {host:.1f} ms of the host (one thread, {layers} layers)")
    for name in sorted(counts["before"] | counts["after"]):
        if counts["before"][name] != counts["after"][name]:
            print(f"  {name:<44}{counts['before'][name]:>5} -> {counts['after'][name]}")


if __name__ == "__main__":
    main()
