"""GPT-2's smallest model in plain torch, without a line of mlbench: what the task gpt_pretraining is held against.

    python benchmarks/nanogpt.py --device cuda

Written after nanoGPT (Karpathy 2022): learned positions, LayerNorm, one matrix for queries, keys and values, GELU by
tanh, 50 304 tied rows, bf16 autocast, fused AdamW with two groups, the whole model compiled. Prints one JSON line.
"""

import argparse
import json
import math
import time

import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = torch.split(self.attend(self.first(x)), width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        result: torch.Tensor = x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))
        return result


class Model(nn.Module):
    def __init__(self, words: int, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                added = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(parameter, 0.0, 0.02 / math.sqrt(2 * layers) if added else 0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.head(self.norm(self.layers(x)))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    for name, default in (("words", 50_304), ("context", 1024), ("layers", 12), ("heads", 12), ("width", 768),
                          ("batch", 64), ("warmup", 10), ("updates", 50)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device(given.device)
    model = Model(given.words, given.context, given.layers, given.heads, given.width).to(device)
    matrices = [one for one in model.parameters() if one.dim() > 1]
    vectors = [one for one in model.parameters() if one.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
    if not given.eager:
        model.compile()
    rows = torch.randint(min(50_257, given.words), (8, given.batch, given.context + 1), device=device)

    def step(number: int) -> None:
        window = rows[number % len(rows)]
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(window[:, :-1].contiguous(), window[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    begin = time.perf_counter()
    for number in range(given.warmup):
        step(number)
    wait()
    warmup = time.perf_counter() - begin
    begin = time.perf_counter()
    for number in range(given.updates):
        step(number)
    wait()
    seconds = (time.perf_counter() - begin) / given.updates
    weights = sum(one.numel() for one in matrices) - model.places.weight.numel()
    flops = 6 * weights + 12 * given.layers * given.width * given.context
    rate = given.batch * given.context / seconds
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    found = {
        "tokens_per_second": rate,
        "seconds_per_update": seconds,
        "warmup_seconds": warmup,
        "peak_memory_bytes": memory,
    }
    print(json.dumps({**found, "flops_per_second": rate * flops, "flops_per_token": flops}))


if __name__ == "__main__":
    main()
