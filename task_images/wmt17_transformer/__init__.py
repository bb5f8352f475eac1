"""Benchmark 4b: the big Transformer on WMT17 English-German (Vaswani et al.: Attention Is All You Need)."""

from dataclasses import dataclass

from task_images.parameters import Task, TranslationSettings, parameter


@dataclass(frozen=True)
class Settings(TranslationSettings):
    """Parameters of the task, with the preset `spec` as defaults."""

    data: str = parameter("wmt17", "what to train on; sample is generated", choices=("wmt17", "sample"))
    vocabulary: int = parameter(33712, "number of embeddings; the dictionary must fit", min=16, max=1000000)
    longest: int = parameter(80, "maximum subtokens of a training sentence", min=2, max=1024)
    longest_test: int = parameter(80, "maximum subtokens of a test sentence; 0: no limit", min=0, max=1024)
    global_batch: int = parameter(131072, "positions per update, over all ranks", min=1, max=100000000)
    largest_pass: int = parameter(8192, "maximum positions per pass of one rank", min=1, max=100000000)
    reshuffle: bool = parameter(True, "rebuild batches every epoch")
    epochs: int = 10
    width: int = parameter(1024, "width of embedding and residual stream", min=4, max=65536)
    inner: int = parameter(4096, "width of the feed-forward layers", min=1, max=1000000)
    layers: int = parameter(6, "layers of encoder and decoder each", min=1, max=128)
    heads: int = parameter(16, "attention heads; must divide the width", min=1, max=1024)
    dropout: float = parameter(0.1, "dropout of embeddings and of branches before the residual sum", min=0, max=0.99)
    attention_dropout: float = parameter(0.1, "dropout of attention weights", min=0, max=0.99)
    inner_dropout: float = parameter(0.1, "dropout within feed-forward layers", min=0, max=0.99)
    learning_rate: float = 0.001976
    warmup_updates: int = parameter(1000, "updates until the maximum rate", min=1, max=10000000)
    loss_scale: float = 128.0
    loss_scale_window: int = 2000
    beam: int = 4
    translation_extra: int = parameter(
        50, "maximum extra subtokens of a translation over its source", min=1, max=100000
    )
    longest_translation: int = parameter(0, "maximum subtokens of a translation; 0: no limit", min=0, max=100000)
    goal_full: float = 25.0


TASK = Task(
    settings=Settings,
    number="4b",
    title="Transformer translation model on WMT17 English-German",
    legacy_name="PyTorch Machine Translation Transformer",
    packages=["sacrebleu>=2.4,<3"],
    backends=["gloo", "nccl", "mpi"],
    devices=["cpu", "gpu"],
    measured_on=["CPU", "1 x H100"],
    method={
        "own": "bsp",
        "refuses": {"wraps": "it calls parts of its model", "gates": "it clips gradients by their norm"},
    },
    goal={"metric": "BLEU-Score", "comparison": ">=", "wording": "Validation BLEU-Score of {threshold}"},
    data=(
        "WMT17 English-German in the data folder: dict.en.txt, train.en-de.{en,de}.{bin,idx} and "
        "test.en-de.{en,de}.{bin,idx}, or plain text train.{en,de} and test.{en,de}. The preset tiny "
        "generates a small language pair."
    ),
    files={
        "when": {"data": "wmt17"},
        "folders": [".", "wmt17"],
        "wanted": [["dict.en.txt"], ["train.en-de.en.idx", "train.en"]],
        "imports": [
            "training-parallel-nc-v12.tgz",
            "training-parallel-commoncrawl.tgz",
            "training-parallel-europarl-v7.tgz",
            "test-full.tgz",
            "train.de",
            "test.en",
            "test.de",
        ],
        "instead": "--preset tiny",
    },
    notes=[
        (
            "Goal: corpus BLEU (sacrebleu, 13a) of lowercased text, because the thresholds were set "
            "on lowercased BLEU; the original"
        ),
        ("averaged the BLEU of batches. goal_bleu=cased uses cased BLEU instead. The result contains all three."),
        (
            "With precision=fp16 on GPUs, gradients are sent in fp16, 422 MB per update as specified "
            "(tested on CPUs, not run on a GPU)."
        ),
        (
            "Deviations: parameters stay in fp32 and are sent once, at the start. On CPUs, gradients "
            "are fp32, so twice as large."
        ),
    ],
    workers={"sensible": 32, "reason": "the global batch of 131072 tokens leaves each of 32 ranks 4096"},
    presets={
        "legacy": {
            "longest_test": 80,
            "longest_translation": 80,
            "reshuffle": False,
        },
        # The protocol of all throughput presets, on generated sentences with a small vocabulary; no goal.
        "throughput": {
            "data": "sample",
            "vocabulary": 512,
            "blocks": 10,
            "block_updates": 5,
            "blocks_after": 5,
        },
        "tiny": {
            "data": "sample",
            "vocabulary": 512,
            "longest": 60,
            "global_batch": 1024,
            "largest_pass": 512,
            "width": 64,
            "inner": 128,
            "layers": 2,
            "heads": 2,
            "attention_dropout": 0.0,
            "inner_dropout": 0.0,
            "learning_rate": 0.005,
            "warmup_updates": 60,
            "precision": "fp32",
            "validation_share": 1.0,
            "goal_full": 45,
            "goal_light": 10,
        },
    },
)
