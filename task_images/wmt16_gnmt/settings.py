"""Parameters of GNMT."""

from dataclasses import dataclass

from task_images.parameters import TranslationSettings, parameter


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
