"""Parameters of the pretraining of BERT."""

from dataclasses import dataclass

from task_images.bert_pretraining.shapes import SHAPES
from task_images.parameters import PretrainingSettings, parameter


@dataclass(frozen=True)
class Settings(PretrainingSettings):
    """Parameters of the task, with the preset `spec` as defaults: Devlin et al. 2018, on WikiText-103."""

    model: str = parameter("base", "shape of the encoder", choices=tuple(SHAPES))
    data: str = parameter(
        "wikitext-103",
        "wikitext-103: paragraphs of WikiText-103; wikipedia: those of a dump; text: train.txt, valid.txt and perhaps "
        "vocab.txt in the data folder; python-text: bytes of the text that comes with Python; synthetic: random; "
        "legacy: one random batch, the answers 0, as in the benchmark of 2020",
        choices=("wikitext-103", "wikipedia", "text", "python-text", "synthetic", "legacy"),
    )
    validation_sequences: int = parameter(
        4096, "sequences per validation, always with the same masked tokens", min=1, max=100000000
    )
    dropout: float = parameter(0.1, "of embeddings, attention and layers", min=0, max=0.9)
    sequence_length: int = parameter(128, "tokens of both sentences, including three special tokens", min=8, max=512)
    parallel: str = parameter(
        "ddp", "ddp: replicas; fsdp2: sharded state; hsdp: replicated shards", choices=("ddp", "fsdp2", "hsdp")
    )
    tensor_parallel: int = parameter(0, "not supported by this model", min=0, max=0)
    goal_full: float = parameter(
        2.0, "validation loss of masked tokens, in nats, at which the clock stops", min=0, max=1000
    )
    global_batch: int = 256
    micro_batch: int = 32
    steps: int = 1000000
    learning_rate: float = 0.0001
    warmup_steps: int = 10000
    final_rate: float = 0.0
    beta2: float = 0.999
    weight_decay: float = 0.01
    evaluate_every: int = 1000
    goal_light: float = 2.4
