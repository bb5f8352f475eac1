"""Parameters of AWD-LSTM."""

from dataclasses import dataclass

from task_images.harness.settings import CudaSettings, TrainingSettings, UpdateSettings


@dataclass(frozen=True)
class Settings(TrainingSettings, UpdateSettings, CudaSettings):
    """As in task.yaml, with the preset `spec` as defaults."""

    data: str = "wikitext-2"
    batch_size: int = 80
    accumulation: int = 1
    sequence_length: int = 70
    short_sequence_share: float = 0.05
    least_sequence_length: int = 5
    epochs: int = 750
    embedding: int = 400
    hidden: int = 1150
    layers: int = 3
    dropout_embedding: float = 0.1
    dropout_input: float = 0.65
    dropout_hidden: float = 0.2
    dropout_output: float = 0.4
    weight_drop: float = 0.5
    activation_penalty: float = 2.0
    temporal_penalty: float = 1.0
    learning_rate: float = 30.0
    warmup_epochs_per_rank: float = 3.0
    averaged_learning_rate: float = 0.0
    switch_rule: str = "stalled"
    switch_patience: int = 5
    weight_decay: float = 1.2e-6
    clip: float = 0.25
    precision: str = "fp32"
    validation_streams: int = 10
    goal_full: float = 70.0
    goal_light: float = 90.0
