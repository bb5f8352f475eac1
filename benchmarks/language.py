"""Language tasks against the obvious ways of doing the same, side by side in one run.

    python benchmarks/language.py [--full] [--device cuda]

AWD-LSTM: one training pass (forward, loss, backward) with a fused call per layer, against a loop over time in Python.
Beam search: with cached states, against a new forward pass over all words so far for every word.
Batches: share of padding of batches by length and tokens, against random ones.
--full adds one training pass of every model at full size: words/s, share of this device's matrix multiplication
rate, memory.
"""

import argparse
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from task_images.train import count_parameters
from task_images.translation.batches import Passes, SentenceBatches, TokenBatches
from task_images.translation.beam import Search, beam_search
from task_images.translation.corpora import Pairs, Side
from task_images.translation.training import TranslationModel
from task_images.wikitext2_awd_lstm.task import (
    AwdLstm,
    State,
    WeightDroppedLstm,
    drop_locked,
    drop_words,
    regularization,
)
from task_images.wikitext2_awd_lstm.task import Settings as AwdLstmSettings
from task_images.wmt16_gnmt.task import Gnmt
from task_images.wmt16_gnmt.task import Settings as GnmtSettings
from task_images.wmt17_transformer.task import Settings, Transformer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="also one training pass of every model at full size")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    device = torch.device(given.device)
    print(f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads")
    awd_lstm(device)
    search(device)
    padding()
    if given.full:
        full_size(device)


def awd_lstm(device: torch.device) -> None:
    print("\nAWD-LSTM, words/s of a training pass   fused    loop in Python   ratio")
    tiny = AwdLstm(1900, AwdLstmSettings(embedding=64, hidden=128, layers=2)).to(device)
    spec = AwdLstm(33_278, AwdLstmSettings()).to(device)
    for name, model, steps, streams in (("tiny (8 streams)", tiny, 70, 8), ("full size (20 streams)", spec, 35, 20)):
        words = torch.randint(0, len(model.embedding), (steps + 1, streams), device=device)
        fused, loop = side_by_side(
            partial(awd_pass, model, words, model.forward),
            partial(awd_pass, model, words, partial(looped_forward, model)),
            device,
        )
        count = steps * streams
        print(f"  {name:34} {count / fused:8.0f} {count / loop:16.0f} {loop / fused:7.1f}")


Forward = Callable[[Tensor, State], tuple[Tensor, Tensor, State]]


def awd_pass(model: AwdLstm, words: Tensor, forward: Forward) -> None:
    model.train()
    model.zero_grad(set_to_none=False)
    raw, dropped, _ = forward(words[:-1], model.initial_state(words.shape[1]))
    (model.score(dropped, words[1:]) + regularization(raw, dropped, 2.0, 1.0)).backward()  # type: ignore[no-untyped-call]


def looped_forward(model: AwdLstm, words: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
    """What `AwdLstm.forward` computes, a word at a time, with the recurrent weights dropped in Python."""
    p = model.p
    x = drop_words(F.embedding(words, model.embedding), words, len(model.embedding), p.dropout_embedding, True)
    x = drop_locked(x, p.dropout_input, True)
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, WeightDroppedLstm)
        hidden, cell = (half[0] for half in state[index])
        outputs = []
        weights = dict(layer.named_parameters())
        recurrent = F.dropout(weights["weight_hh_l0"], layer.share)
        for step in x:
            gates = F.linear(step, weights["weight_ih_l0"], weights["bias_ih_l0"])
            gates = gates + F.linear(hidden, recurrent, weights["bias_hh_l0"])
            i, f, g, o = gates.chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
            outputs.append(hidden)
        raw = torch.stack(outputs)
        last = index == len(model.layers) - 1
        x = drop_locked(raw, p.dropout_output if last else p.dropout_hidden, True)
    return raw, x, state


class Uncached:
    """A decoder that keeps nothing: for every word it runs the whole model over all words so far."""

    def __init__(self, model: TranslationModel) -> None:
        self.model = model

    def begin(self, source: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        return {"source": source, "lengths": lengths, "words": source.new_zeros(len(source), 1, 0)}

    def step(self, words: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, None]:
        state["words"] = torch.cat([state["words"], words[:, :, None]], 2)
        beams = words.shape[1]
        source, lengths = (state[name].repeat_interleave(beams, 0) for name in ("source", "lengths"))
        features = self.model(source, lengths, state["words"].flatten(0, 1))
        return self.model.scores(features[:, -1]).view(*words.shape, -1), None

    def select(self, state: dict[str, Tensor], sentences: Tensor, beams: Tensor) -> dict[str, Tensor]:
        return {
            "source": state["source"][sentences],
            "lengths": state["lengths"][sentences.cpu()],
            "words": state["words"][sentences[:, None], beams],
        }


def search(device: torch.device) -> None:
    print("\nBeam search, words/s                   cached   without cache    ratio")
    torch.manual_seed(0)
    kinds: list[tuple[str, TranslationModel, int]] = [
        (
            "Transformer, width 256, 3 + 3 layers",
            Transformer(Settings(vocabulary=2000, width=256, inner=1024, layers=3, heads=4)),
            4,
        ),
        ("GNMT, width 256, 4 + 4 layers", Gnmt(2000, GnmtSettings(width=256), padding=1), 5),
    ]
    lengths = torch.full((8,), 25)
    limits = torch.full((8,), 30)
    for name, model, beam in kinds:
        model = model.to(device).eval()
        source = torch.randint(4, 2000, (8, 25), device=device)
        # The end may come at the limit only, so that both ways make equally many words.
        rules = Search(beam, 2, 2, never=(1,))
        decoders = (NeverEnding(model), NeverEnding(Uncached(model)))
        runs = [partial(beam_search, decoder, source, lengths, limits, rules) for decoder in decoders]
        found = [[hypothesis.words for hypothesis in run()] for run in runs]
        assert found[0] == found[1], "the two ways disagree"
        cached, uncached = side_by_side(runs[0], runs[1], device, times=2)
        count = sum(map(len, found[0]))
        print(f"  {name:36} {count / cached:6.0f} {count / uncached:16.0f} {uncached / cached:7.1f}")


class NeverEnding:
    """A decoder to which the end of a sentence is the least likely word."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder
        self.begin, self.select = decoder.begin, decoder.select

    def step(self, words: Tensor, state: Any) -> tuple[Tensor, Tensor | None]:
        scores, attention = self.decoder.step(words, state)
        scores[:, :, 2] = -50.0
        return scores, attention


def padding() -> None:
    """Lengths like those of WMT: log-normal around 25 subwords, the target near the source's."""
    random = np.random.default_rng(0)
    source = np.clip(random.lognormal(3.1, 0.6, 200_000), 1, 79).astype(np.int64)
    target = np.clip(source * random.normal(1.05, 0.15, len(source)), 1, 79).astype(np.int64)
    numbers = np.zeros(1, np.int64)
    zeros = np.zeros(len(source), np.int64)
    pairs = Pairs(Side(numbers, zeros, source + 1), Side(numbers, zeros, target + 1))
    begin = time.perf_counter()
    tokens = TokenBatches(pairs, Passes(1, 8192), 1, 0, seed=1)
    share, seconds = tokens.padding(1), (time.perf_counter() - begin) / 2
    random_share = SentenceBatches(pairs, Passes(1, 128), 1, 0, seed=1).padding(1)
    print(f"\nPadding: {share:.1%} of positions in batches of 8192 by length, {random_share:.1%} in random ones of 128")
    print(f"Batches of an epoch of 200 000 pairs made in {seconds:.2f} s")


def full_size(device: torch.device) -> None:
    print("\nOne training pass at full size     words/s   FLOP share   parameters   peak memory")
    rate = multiplication_rate(device)
    words = torch.randint(4, 30_000, (71, 20), device=device)
    lstm = AwdLstm(33_278, AwdLstmSettings()).to(device)
    lstm_pass = partial(awd_pass, lstm, words, lstm.forward)
    describe("AWD-LSTM, 20 streams of 70", lstm, 70 * 20, lstm_pass, rate, device)
    del lstm, lstm_pass
    gnmt, transformer = (lambda: Gnmt(32_320, GnmtSettings(), 1)), (lambda: Transformer(Settings(), 1))
    for name, make, vocabulary in (("GNMT", gnmt, 32_320), ("Transformer", transformer, 33_712)):
        model = make().to(device).train()
        count, length = (8, 25) if device.type == "cpu" else (128, 50)
        source, target = torch.randint(4, vocabulary, (2, count, length), device=device)
        run = translation_pass(model, source, target)
        describe(f"{name}, {count} pairs of {length}", model, count * length, run, rate, device)
        del model, run


def translation_pass(model: TranslationModel, source: Tensor, target: Tensor) -> Callable[[], None]:
    lengths = torch.full((len(source),), source.shape[1])

    def run() -> None:
        model.zero_grad(set_to_none=True)
        scores = model.scores(model(source, lengths, target))
        F.cross_entropy(scores.flatten(0, 1).float(), target.flatten(), label_smoothing=0.1).backward()  # type: ignore[no-untyped-call]

    return run


def describe(
    name: str, model: nn.Module, words: int, run: Callable[[], None], rate: float, device: torch.device
) -> None:
    run()
    seconds = measure_seconds(run, device)
    parameters = count_parameters(model.parameters())
    # Six operations per parameter and word, those of attention not counted. Encoder and decoder see a word each.
    share = 6 * parameters * words / seconds / rate
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"  {name:32} {words / seconds:8.0f} {share:11.0%} {parameters:13,} {memory / 2**30:9.1f} GiB")


def multiplication_rate(device: torch.device) -> float:
    """Operations per second of a large matrix product, float32."""
    a = torch.randn(2048, 2048, device=device)
    torch.mm(a, a)
    return 2 * 2048**3 / min(measure_seconds(lambda: torch.mm(a, a), device) for _ in range(3))


def side_by_side(
    one: Callable[[], Any], other: Callable[[], Any], device: torch.device, times: int = 3
) -> tuple[float, float]:
    """Least seconds of each, taken in turns after one go to warm up."""
    one()
    other()
    seconds = [(measure_seconds(one, device), measure_seconds(other, device)) for _ in range(times)]
    return min(pair[0] for pair in seconds), min(pair[1] for pair in seconds)


def measure_seconds(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
