"""Benchmark 3a: AWD-LSTM on WikiText-2 (Merity, Keskar, Socher: Regularizing and Optimizing LSTM Language Models)."""

from dataclasses import dataclass

from task_images.parameters import CudaSettings, Task, TrainingSettings, UpdateSettings, parameter


@dataclass(frozen=True)
class Settings(UpdateSettings, TrainingSettings, CudaSettings):
    """Parameters of the task, with the preset `spec` as defaults."""

    data: str = parameter("wikitext-2", "text to train on", choices=("wikitext-2", "python-topics"))
    batch_size: int = parameter(80, "streams per rank and pass", min=1, max=65536)
    accumulation: int = parameter(1, "passes per rank and update; each counts like a rank", min=1, max=4096)
    sequence_length: int = parameter(70, "base length of a sequence in words", min=2, max=65536)
    short_sequence_share: float = parameter(0.05, "probability that the base length is halved", min=0, max=1)
    least_sequence_length: int = parameter(5, "minimum length of a sequence in words", min=1, max=65536)
    epochs: int = parameter(750, "maximum number of epochs", min=1, max=100000)
    embedding: int = parameter(400, "width of the embedding and the last layer", min=1, max=65536)
    hidden: int = parameter(1150, "width of the hidden layers", min=1, max=65536)
    layers: int = parameter(3, "number of LSTM layers", min=1, max=64)
    dropout_embedding: float = parameter(0.1, "share of words whose embedding is dropped", min=0, max=0.99)
    dropout_input: float = parameter(0.65, "locked dropout of the embedded words", min=0, max=0.99)
    dropout_hidden: float = parameter(0.2, "locked dropout between layers", min=0, max=0.99)
    dropout_output: float = parameter(0.4, "locked dropout after the last layer", min=0, max=0.99)
    weight_drop: float = parameter(0.5, "dropout of the entries of hidden-to-hidden matrices", min=0, max=0.99)
    activation_penalty: float = parameter(2.0, "alpha of activation regularization", min=0, max=1000)
    temporal_penalty: float = parameter(1.0, "beta of temporal activation regularization", min=0, max=1000)
    learning_rate: float = parameter(30.0, "base rate of SGD for a sequence of the base length", min=0, max=10000)
    warmup_epochs_per_rank: float = parameter(
        3.0, "epochs per rank until the rate is base x sqrt(ranks)", min=0, max=1000
    )
    averaged_learning_rate: float = parameter(0.0, "rate of averaged SGD; 0: that of plain SGD", min=0, max=10000)
    switch_rule: str = parameter(
        "stalled",
        "switch to averaged SGD when the last epochs brought no new minimum, or when the last one is above the "
        "earlier minimum",
        choices=("stalled", "non_monotone"),
    )
    switch_patience: int = parameter(5, "epochs that the switch rule looks back", min=1, max=1000)
    weight_decay: float = parameter(1.2e-06, "weight decay of SGD", min=0, max=1)
    clip: float = parameter(0.25, "maximum norm of the mean gradient", min=1e-06, max=1000000)
    precision: str = parameter("fp32", "number format of training", choices=("fp32", "bf16"))
    validation_streams: int = parameter(10, "streams of the validation and test text", min=1, max=65536)
    goal_full: float = parameter(70.0, "validation perplexity of the full goal", min=1, max=1000000)
    goal_light: float = parameter(90.0, "validation perplexity of the light goal", min=1, max=1000000)


TASK = Task(
    settings=Settings,
    number="3a",
    title="AWD-LSTM language model on WikiText-2",
    legacy_name="PyTorch Language Modeling (AWD-LSTM)",
    backends=["gloo", "nccl", "mpi"],
    devices=["cpu", "gpu"],
    measured_on=["CPU", "1 x H100"],
    method={
        "own": "bsp",
        "refuses": {"wraps": "it calls parts of its model", "gates": "it clips gradients by their norm"},
    },
    goal={"metric": "Perplexity", "comparison": "<=", "wording": "Validation Perplexity of {threshold}"},
    data=(
        "WikiText-2, word level: wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens, or "
        "wikitext-2-v1.zip, in the data folder. The preset tiny uses the language reference that "
        "comes with Python."
    ),
    files={
        "when": {"data": "wikitext-2"},
        "folders": [".", "wikitext-2"],
        "wanted": [["wiki.train.tokens", "wikitext-2-v1.zip"]],
        "instead": "--preset tiny",
    },
    workers={
        "sensible": 32,
        "reason": ("each of 32 ranks has 12 updates an epoch; 256 have 2, and a warm-up longer than the training"),
    },
    notes=[
        (
            "Validation reads 10 streams in parallel, each in pieces of 70 words: MLBench's text says"
            " sequence length 10, its code 10 streams."
        )
    ],
    presets={
        "legacy": {
            "batch_size": 20,
            "learning_rate": 15.0,
            "warmup_epochs_per_rank": 0.0,
            "averaged_learning_rate": 15.0,
            "switch_rule": "non_monotone",
        },
        # The protocol of all throughput presets, on a text with fewer words; no goal.
        "throughput": {
            "data": "python-topics",
            "blocks": 10,
        },
        "tiny": {
            "data": "python-topics",
            "batch_size": 8,
            "epochs": 12,
            "embedding": 64,
            "hidden": 128,
            "layers": 2,
            "dropout_input": 0.2,
            "dropout_hidden": 0.1,
            "dropout_output": 0.2,
            "weight_drop": 0.2,
            "learning_rate": 20.0,
            "warmup_epochs_per_rank": 0.5,
            "goal_full": 90,
            "goal_light": 150,
        },
    },
)
