"""ResNet-50 on ImageNet, and its relatives: synchronous SGD with large batches, linear scaling and warm-up."""

from dataclasses import dataclass

from task_images.parameters import CheckpointedSettings, Task, parameter


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


TASK = Task(
    settings=Settings,
    number="1b",
    title="ResNet-50 on ImageNet",
    packages=["pillow>=11,<14", "scipy>=1.11,<2"],
    backends=["gloo", "nccl", "mpi"],
    devices=["cpu", "gpu"],
    measured_on=["CPU", "1 x H100"],
    method={"own": "ddp"},
    goal={"metric": "Prec@1", "comparison": ">=", "wording": "{threshold}% Top 1 Validation Accuracy"},
    data=(
        "ImageNet (ILSVRC 2012, 1.28 million + 50,000 photographs) as train/ and val/ or as official "
        "archives, never downloaded; or generated; or fake"
    ),
    free=["checkpoint", "channels_last", "compile", "loaders", "decoders", "reduction", "bucket_mb"],
    files={
        "when": {"data": "imagenet"},
        "folders": [".", "imagenet"],
        "wanted": [
            ["train", "ILSVRC2012_img_train.tar", "imagenet-packed"],
            ["val", "ILSVRC2012_img_val.tar", "imagenet-packed"],
        ],
        "imports": ["ILSVRC2012_devkit_t12.tar.gz"],
        "default_folder": True,
        "instead": "--set data=generated, or --set data=fake",
    },
    workers={
        "sensible": 128,
        "reason": ("beyond 8192 images an update the linear rate no longer reaches the goal (Goyal et al. 2017)"),
    },
    presets={
        # Goyal et al. 2017, "ImageNet in 1 hour".
        "goyal": {
            "batch_size": 32,
            "schedule": "multistep",
            "label_smoothing": 0.0,
            "draft": False,
        },
        # The protocol of all throughput presets, on one batch of random numbers; no goal.
        "throughput": {
            "data": "fake",
            "warmup_epochs": 0.0,
            "learning_rate": 0.01,
            "blocks": 10,
        },
        "tiny": {
            "data": "generated",
            "classes": 4,
            "training_images": 256,
            "validation_images": 64,
            "side": 32,
            "shorter": 48,
            "least_crop": 0.5,
            "model": "resnet18",
            "width": 0.25,
            "batch_size": 16,
            "epochs": 20,
            "warmup_epochs": 1.0,
            "learning_rate": 0.5,
            "reduction": "flat",
            "loaders": 1,
            "goal_full": 80.0,
            "goal_light": 50.0,
        },
    },
)
