"""Pretraining of language models: the code shared by gpt_pretraining and bert_pretraining.

layout       the mesh of ranks (data, replicas, tensor parallel), checked before any process group exists
parallel     a model spread over ranks by that layout (FSDP2, HSDP, tensor parallel), initial weights, its updates
tokens       text and token files -> fixed windows of tokens, in an order that depends only on seed and step
pretraining  a task as a subclass, from the contract to the result: corpus, model, passes, validation, checkpoints
"""

from dataclasses import dataclass

from task_images.parameters import CudaSettings, TrainingSettings, parameter


@dataclass(frozen=True)
class PretrainingSettings(TrainingSettings, CudaSettings):
    """Pretraining of language models on any layout of ranks."""

    vocabulary: int = parameter(0, "vocabulary size; 0: that of the model", min=0, max=4194304)
    synthetic_tokens: int = parameter(4194304, "tokens of synthetic data", min=1024, max=4294967296)
    global_batch: int = parameter(480, "sequences per update, over all ranks", min=1, max=1048576)
    batch_per_rank: int = parameter(
        0,
        "sequences per update and data-parallel rank, instead of global_batch (weak scaling); 0: global_batch",
        min=0,
        max=1048576,
    )
    micro_batch: int = parameter(
        12,
        "sequences per pass and data-parallel rank; 0: all sequences of a rank in one pass",
        min=0,
        max=65536,
    )
    steps: int = parameter(
        10000, "maximum number of updates; the learning rate schedule ends there", min=1, max=100000000
    )
    learning_rate: float = parameter(0.0006, "highest rate of AdamW", min=0, max=100)
    warmup_steps: int = parameter(700, "updates of linear warm-up", min=0, max=10000000)
    final_rate: float = parameter(0.1, "share of learning_rate at which the schedule ends", min=0, max=1)
    beta1: float = parameter(0.9, "of AdamW", min=0, max=1)
    beta2: float = parameter(0.95, "of AdamW", min=0, max=1)
    epsilon: float = parameter(1e-08, "of AdamW", min=0, max=1)
    weight_decay: float = parameter(0.1, "of matrices; scales, shifts and biases have none", min=0, max=10)
    clip: float = parameter(1.0, "maximum gradient norm; 0: no limit", min=0, max=1000000)
    evaluate_every: int = parameter(250, "updates between validations", min=1, max=100000000)
    replicas: int = parameter(
        0,
        "replicas of the sharded model with hsdp; 0: one per node, or 2 if nodes have one rank each",
        min=0,
        max=65536,
    )
    reshard: bool = parameter(True, "FSDP frees gathered parameters after the forward pass")
    activation_checkpointing: str = parameter(
        "none",
        "what the backward pass recomputes: nothing, everything except matrix products and attention, or whole blocks",
        choices=("none", "selective", "full"),
    )
    precision: str = parameter(
        "bf16", "bf16: mixed, with parameters and sums of gradients in fp32", choices=("fp32", "bf16")
    )
    compile: str = parameter(
        "no",
        "torch.compile, for each block and the output with its loss, or for all of the model; graphs: all of "
        "it, replayed as CUDA graphs on a GPU; compiling counts as training",
        choices=("no", "blocks", "whole", "graphs"),
    )
    attention: str = parameter(
        "auto",
        "attention implementation; auto: torch's choice. The result names the one used",
        choices=("auto", "flash", "cudnn", "efficient", "math"),
    )
    checkpoint_every: int = parameter(0, "updates between checkpoints; 0: none", min=0, max=100000000)
    checkpoint_dir: str = parameter("", "folder for checkpoints that all ranks share")
    resume: str = parameter("", "checkpoint to resume from (a folder, checkpoint_dir/UPDATE), on any number of ranks")
    sequence_length: int = parameter(1024, "tokens of a sequence", min=2, max=1048576)
    validation_sequences: int = parameter(0, "sequences per validation; 0: all", min=0, max=100000000)
    goal_full: float = parameter(1.5, "validation loss in nats per token at which the clock stops", min=0, max=1000)
    goal_light: float = parameter(3.6, "the easier goal", min=0, max=1000)

    # Choices are set by each task.
    model: str = ""
    data: str = ""
    parallel: str = "ddp"
