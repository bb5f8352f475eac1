"""Parameters of ResNet-50 on ImageNet."""

from dataclasses import dataclass

from task_images.parameters import CheckpointedSettings, parameter


@dataclass(frozen=True)
class Settings(CheckpointedSettings):
    """Parameters of the task, with the preset `spec` as defaults: how the field runs it, since the specification of
    the benchmark leaves this task open."""

    data: str = parameter(
        "imagenet",
        "imagenet: the real images; generated: generated files in its format; fake: random numbers without files,"
        " for throughput only",
        choices=("imagenet", "generated", "fake"),
    )
    classes: int = parameter(1000, "folders in train/ and in val/", min=1, max=100000)
    training_images: int = parameter(10000, "generated training images", min=1, max=1000000)
    validation_images: int = parameter(1000, "generated validation images", min=1, max=1000000)
    steps: int = parameter(10, "steps of an epoch with fake data; the first epoch is a warm-up", min=1, max=1000000)
    side: int = parameter(224, "side of the network's input in pixels", min=32, max=1024)
    shorter: int = parameter(
        256, "shorter side in validation before the middle is cut out; side of generated images", min=32, max=2048
    )
    least_crop: float = parameter(
        0.08, "minimum share of an image's area that is cropped in training", min=0.0001, max=1
    )
    draft: bool = parameter(True, "decode JPEGs no larger than needed (in the decoder's own 1/2, 1/4, 1/8)")
    model: str = parameter(
        "resnet50",
        "resnet50 and deeper are version 1.5",
        choices=(
            "resnet18",
            "resnet34",
            "resnet50",
            "resnet101",
            "resnet152",
            "vgg11",
            "vgg11_bn",
            "vgg13",
            "vgg13_bn",
            "vgg16",
            "vgg16_bn",
            "vgg19",
            "vgg19_bn",
            "densenet121",
            "densenet169",
            "densenet201",
            "inception3",
            "inception4",
        ),
    )
    width: float = parameter(1.0, "factor on the model's inner channels; 1: as published", min=0.0625, max=8)
    norm: str = parameter(
        "batch",
        "normalization; group: independent of the batch, so the curve does not depend on the number of ranks",
        choices=("batch", "group"),
    )
    zero_init: bool = parameter(True, "initialize residual blocks as the identity")
    batch_size: int = 64
    epochs: int = 90
    schedule: str = parameter("cosine", "what follows the warm-up", choices=("cosine", "multistep"))
    learning_rate: float = parameter(
        0.1, "learning rate per 256 images of a step, all ranks together", min=0, max=100, formerly="rate"
    )
    warmup_epochs: float = parameter(
        5.0,
        "epochs of linear warm-up from learning_rate to learning_rate x images / 256, update by update",
        min=0,
        max=100000,
    )
    milestones: list[int] = parameter([30, 60, 80], "epochs after which multistep multiplies the rate by step_factor")
    step_factor: float = parameter(0.1, "of multistep", min=0, max=1)
    label_smoothing: float = parameter(0.1, "label smoothing in training", min=0, max=0.999)
    decay_all: bool = parameter(False, "also apply weight decay to scales, shifts and biases")
    decoders: str = parameter(
        "threads",
        "type of the loaders; processes keep the interpreter free for GPUs that need thousands of images per second; "
        "device: torchvision decodes where the model is (nvJPEG)",
        choices=("threads", "processes", "device"),
    )
    reduction: str = parameter(
        "ddp",
        "ddp: gradients are reduced in buckets during the backward pass; flat: in one buffer after it",
        choices=("ddp", "flat"),
    )
    bucket_mb: float = parameter(
        25.0, "with ddp, bucket size in MiB at which gradients are sent", min=1e-06, max=100000
    )
    goal_full: float = 75.9
    loaders: int = 4
