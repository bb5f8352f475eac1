"""Shared code of the two translation tasks: parallel data, batches, beam search, BLEU and training."""

from dataclasses import dataclass

from task_images.parameters import CudaSettings, TrainingSettings, UpdateSettings, parameter


@dataclass(frozen=True)
class TranslationSettings(TrainingSettings, UpdateSettings, CudaSettings):
    """Parameters of both translation tasks."""

    longest_test: int = parameter(150, "maximum subwords of a test sentence; 0: no limit", min=0, max=1024)
    epochs: int = parameter(8, "maximum number of epochs", min=1, max=100000)
    label_smoothing: float = parameter(
        0.1, "share of the target spread over the vocabulary (label smoothing)", min=0, max=0.99
    )
    learning_rate: float = parameter(0.002, "maximum rate of Adam", min=0, max=10)
    precision: str = parameter(
        "fp16", "number format; fp16 on GPUs only, replaced by fp32 on CPUs", choices=("fp32", "bf16", "fp16")
    )
    loss_scale: float = parameter(1024.0, "initial loss scale of fp16", min=1, max=16777216)
    loss_scale_window: int = parameter(
        128, "updates without overflow until the loss scale doubles", min=1, max=10000000
    )
    beam: int = parameter(5, "hypotheses of the beam search", min=1, max=1000)
    length_power: float = parameter(0.6, "power of the length penalty", min=0, max=10)
    validation_share: float = parameter(0.3, "share of an epoch between validations", min=0.01, max=1)
    evaluation_batch: int = parameter(64, "sentences per batch of the test set", min=1, max=100000)
    goal_bleu: str = parameter(
        "lowercased",
        "BLEU on which the goal is measured; the goals were set on lowercased text",
        choices=("lowercased", "cased"),
    )
    goal_full: float = parameter(24.0, "corpus BLEU of the full goal", min=0, max=100)
    goal_light: float = parameter(20.0, "corpus BLEU of the light goal", min=0, max=100)

    # Set by each task.
    data: str = "sample"
    longest: int = 75
    global_batch: int = 2048
    largest_pass: int = 128
    reshuffle: bool = True
    longest_translation: int = 150
