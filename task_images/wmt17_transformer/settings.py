"""Parameters of the Transformer."""

from dataclasses import dataclass

from task_images.parameters import TranslationSettings, parameter


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
