"""Benchmark 4a: GNMT on WMT16 English-German (Wu et al.: Google's Neural Machine Translation System)."""

from dataclasses import dataclass

from task_images.parameters import Task, TranslationSettings, parameter


@dataclass(frozen=True)
class Settings(TranslationSettings):
    """Parameters of the task, with the preset `spec` as defaults."""

    data: str = parameter("wmt16", "what to train on; sample is generated", choices=("wmt16", "sample"))
    longest: int = parameter(75, "maximum subwords of a training sentence, including start and end", min=3, max=1024)
    global_batch: int = parameter(2048, "sentences per update, over all ranks", min=1, max=10000000)
    largest_pass: int = parameter(128, "maximum sentences per pass of one rank", min=1, max=10000000)
    reshuffle: bool = parameter(True, "true: every epoch shuffles all pairs; false: every rank keeps its part")
    epochs: int = parameter(8, "maximum number of epochs; the rate's decay depends on it", min=1, max=100000)
    width: int = parameter(1024, "width of embedding and LSTM layers", min=1, max=65536)
    layers: int = parameter(4, "layers of encoder and decoder each", min=2, max=64)
    dropout: float = parameter(0.2, "dropout of the input of every LSTM layer", min=0, max=0.99)
    initial_range: float = parameter(0.1, "initial parameters are between minus and plus this", min=0, max=10)
    warmup_updates: int = parameter(200, "updates of the exponential warm-up", min=0, max=10000000)
    warmup_start: float = parameter(0.0, "fraction of the rate at which the warm-up starts; 0: from zero", min=0, max=1)
    decay_from: float = parameter(0.4, "share of all updates before the first decay of the rate", min=0, max=1)
    decay_every: float = parameter(0.05, "share of all updates between decays", min=0, max=1)
    decays: int = parameter(4, "number of decays", min=0, max=1000)
    decay_factor: float = parameter(0.5, "factor of the rate per decay", min=0, max=1)
    gradient_mean: str = parameter(
        "global",
        "global: per sentence of all ranks; local: per sentence of one rank, so that clipping depends on their number",
        choices=("global", "local"),
    )
    clip: float = parameter(5.0, "maximum norm of the gradient", min=1e-06, max=1000000)
    largest_loss_scale: float = parameter(8192.0, "maximum loss scale of fp16", min=1, max=16777216)
    coverage: float = parameter(0.1, "weight of the coverage penalty", min=0, max=10)
    longest_translation: int = parameter(150, "maximum subwords of a translation", min=1, max=100000)


TASK = Task(
    settings=Settings,
    number="4a",
    title="GNMT translation model on WMT16 English-German",
    legacy_name="PyTorch Machine Translation GNMT",
    packages=["sacrebleu>=2.4,<3", "sacremoses>=0.1.1,<1"],
    backends=["gloo", "nccl", "mpi"],
    devices=["cpu", "gpu"],
    measured_on=["CPU", "1 x H100"],
    method={
        "own": "bsp",
        "refuses": {"wraps": "it calls parts of its model", "gates": "it clips gradients by their norm"},
    },
    goal={"metric": "BLEU-Score", "comparison": ">=", "wording": "Validation BLEU-Score of {threshold}"},
    data=(
        "WMT16 English-German in the data folder, as written by python -m "
        "task_images.wmt16_gnmt.prepare: vocab.bpe.32000, train.tok.clean.bpe.32000.{en,de} (or "
        ".bin), newstest2014.tok.bpe.32000.{en,de}, newstest2014.de. The preset tiny generates a "
        "small language pair."
    ),
    files={
        "when": {"data": "wmt16"},
        "folders": [".", "wmt16"],
        "wanted": [["vocab.bpe.32000"], ["train.tok.clean.bpe.32000.bin", "train.tok.clean.bpe.32000.en"]],
        "imports": [
            "de-en.tgz",
            "training-parallel-commoncrawl.tgz",
            "training-parallel-nc-v11.tgz",
            "dev.tgz",
            "newstest2014.de",
        ],
        "instead": "--preset tiny",
    },
    notes=[
        (
            "Goal: corpus BLEU (sacrebleu, 13a) of lowercased text, because the thresholds were set "
            "on lowercased BLEU; the original"
        ),
        ("averaged the BLEU of batches. goal_bleu=cased uses cased BLEU instead. The result contains all three."),
        ("Deviation: gradients are averaged over ranks, so clipping at 5 means the same for any number of ranks; the"),
        "specification sums them (gradient_mean=local does, up to the loss scale).",
        (
            "With precision=fp16 on GPUs, gradients are sent in fp16, 321 MB per update as specified "
            "(tested on CPUs, not run on a GPU)."
        ),
        (
            "Deviations: parameters stay in fp32 and are sent once, at the start. On CPUs, gradients "
            "are fp32, so twice as large."
        ),
    ],
    workers={"sensible": 32, "reason": "the global batch of 2048 sentences leaves each of 32 ranks 64"},
    presets={
        "legacy": {
            "longest_test": 150,
            "reshuffle": False,
            "warmup_start": 0.01,
            "gradient_mean": "local",
        },
        # The protocol of all throughput presets, on generated sentences with a small vocabulary; no goal.
        "throughput": {
            "data": "sample",
            "blocks": 10,
            "block_updates": 5,
            "blocks_after": 5,
        },
        "tiny": {
            "data": "sample",
            "longest": 60,
            "global_batch": 32,
            "largest_pass": 16,
            "width": 64,
            "layers": 3,
            "dropout": 0.1,
            "initial_range": 0.4,
            "learning_rate": 0.01,
            "warmup_updates": 40,
            "decay_from": 0.9,
            "precision": "fp32",
            "longest_translation": 60,
            "validation_share": 1.0,
            "goal_full": 45,
            "goal_light": 8,
        },
    },
)
