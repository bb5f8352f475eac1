"""ResNet-50 on ImageNet, and its relatives, as the field trains them: synchronous SGD with large batches, linear
scaling of the rate, gradual warm-up.
"""

from dataclasses import dataclass
from functools import partial

from torch.nn.functional import cross_entropy

from task_images.cache import data_folder
from task_images.classification import check_settings, train_classifier
from task_images.contract import Contract, TaskUsageError
from task_images.data import seed_all
from task_images.imagenet_resnet.data import FakeData, FileData, generate
from task_images.imagenet_resnet.folders import load
from task_images.imagenet_resnet.model import MODELS, imagenet_model
from task_images.methods.ddp import Ddp
from task_images.parameters import LongClassifierSettings, Task, parameter, read_parameters
from task_images.report import Reporter, made_up, training_session
from task_images.schedules import Cosine, Formula, MultiStep, PerUpdate, Schedule
from task_images.train import split_decay
from task_images.world import World


@dataclass(frozen=True)
class Settings(LongClassifierSettings):
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
        "resnet50 and deeper are version 1.5; vgg, densenet and inception need torchvision",
        choices=MODELS,
    )
    width: float = parameter(1.0, "ResNets: factor on the inner channels; 1: as published", min=0.0625, max=8)
    norm: str = parameter(
        "batch",
        "ResNets: normalization; group: independent of the batch, so the curve does not depend on the number of ranks",
        choices=("batch", "group"),
    )
    zero_init: bool = parameter(True, "initialize residual blocks as the identity")
    batch_size: int = 64
    epochs: int = 90
    schedule: str = parameter("cosine", "what follows the warm-up", choices=("cosine", "multistep"))
    learning_rate: float = parameter(0.1, "learning rate per 256 images of a step, all ranks together", min=0, max=100)
    warmup_epochs: float = parameter(
        5.0,
        "epochs of linear warm-up from learning_rate to learning_rate x images / 256, update by update",
        min=0,
        max=100000,
    )
    milestones: list[int] = parameter([30, 60, 80], "epochs after which multistep multiplies the rate by step_factor")
    step_factor: float = parameter(0.1, "of multistep", min=0, max=1)
    label_smoothing: float = parameter(0.1, "label smoothing in training", min=0, max=0.999)
    goal_full: float = 75.9
    loaders: int = 4


TASK = Task(
    settings=Settings,
    number="1b",
    title="ResNet-50 on ImageNet",
    packages=["pillow>=11,<14", "scipy>=1.11,<2"],
    measured_on=["CPU", "1 x H100"],
    method={"own": "ddp"},
    goal={"metric": "Prec@1", "comparison": ">=", "wording": "{threshold}% Top 1 Validation Accuracy"},
    data=(
        "ImageNet (ILSVRC 2012, 1.28 million + 50,000 photographs) as train/ and val/ or as official "
        "archives, never downloaded; or generated; or fake"
    ),
    free=["checkpoint_every", "checkpoint_dir", "channels_last", "compile", "loaders"],
    files={
        "when": {"data": "imagenet"},
        "folders": [".", "imagenet"],
        "wanted": [
            ["train", "ILSVRC2012_img_train.tar"],
            ["val", "ILSVRC2012_img_val.tar"],
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
            "loaders": 1,
            "goal_full": 80.0,
            "goal_light": 50.0,
        },
    },
)


LEAST_INCEPTION_SIDE = 75  # pixels; smaller images would shrink to nothing
# The rate is per so many images of a step, all ranks together (Goyal et al. 2017).
REFERENCE_BATCH = 256


def make_schedule(settings: Settings, workers: int, steps: int) -> Schedule:
    """learning_rate x global batch / 256, reached linearly from `learning_rate` (if that is less) in the warm-up; then
    down along half a cosine, or in steps. Update by update, `steps` of them an epoch. Raises TaskUsageError."""
    target = settings.learning_rate * settings.batch_size * workers / REFERENCE_BATCH
    start = min(settings.learning_rate, target)
    try:
        formula: Formula = (
            Cosine(target, settings.epochs, settings.warmup_epochs, start)
            if settings.schedule == "cosine"
            else MultiStep(target, tuple(settings.milestones), settings.step_factor, settings.warmup_epochs, start)
        )
    except (ValueError, TypeError) as error:
        raise TaskUsageError(
            f"{settings.warmup_epochs:g} epochs of warm-up, {settings.epochs} in all, milestones {settings.milestones}:"
            f" {error}",
            "--set warmup_epochs=0 leaves the warm-up out.",
        ) from None
    return PerUpdate(lambda update: formula(update / steps))


# From this size on even a single image has more than one pixel at the end of every network.
SIDE_FOR_ONE = 64

NAMES = {
    "imagenet": "ImageNet (ILSVRC 2012)",
    "generated": "images in the folders of ImageNet, generated",
    "fake": "one batch of random numbers, no files and no decoding",
}


def main(contract: Contract) -> None:
    """Find or generate the images and train the chosen network to the goal."""
    settings = read_parameters(Settings, contract.parameters)
    check(settings, contract.world_size)
    synthetic = settings.data != "imagenet"
    with training_session(contract, NAMES[settings.data], synthetic) as (world, report):
        data, images = make_data(world, settings, report)
        check_batches(settings, data.least)
        seed_all(contract.seed)
        train_classifier(
            world,
            report,
            settings,
            model=imagenet_model(
                settings.model, settings.classes, width=settings.width, norm=settings.norm, zero_init=settings.zero_init
            ),
            data=data,
            schedule=make_schedule(settings, world.size, data.steps),
            classes=settings.classes,
            loss=partial(cross_entropy, label_smoothing=settings.label_smoothing),
            measure=settings.data == "fake",
            groups=split_decay,
            method=Ddp(),
            name="imagenet_resnet",
            identity={
                "network": settings.model,
                **{name: getattr(settings, name) for name in ("width", "norm", "classes")},
                **images,
            },
            details={"model": settings.model, **images},
        )


def make_data(world: World, settings: Settings, report: Reporter) -> tuple[FileData | FakeData, dict[str, object]]:
    """The batches, and what the result says of them."""
    seed = world.contract.seed
    if settings.data == "fake":
        data = FakeData(
            world, settings.batch_size, settings.steps, settings.classes, settings.side, seed, settings.channels_last
        )
        report.data_identity(made_up({"training images": settings.batch_size * settings.steps}))
        return data, {"decoding": False}
    folder = data_folder(world.contract)
    if settings.data == "generated":
        sizes = {"train": settings.training_images, "val": settings.validation_images}
        folder = generate(folder, settings.classes, sizes, settings.shorter, seed)
    images = load(folder, settings.classes, print)
    report.data_identity(images.identity if settings.data == "imagenet" else made_up(images.identity.counts))
    files = FileData(
        world,
        images,
        settings.batch_size,
        seed,
        side=settings.side,
        shorter=settings.shorter,
        least_crop=settings.least_crop,
        loaders=settings.loaders,
        draft=settings.draft,
        channels_last=settings.channels_last,
    )
    return files, {
        "decoding": "draft" if settings.draft else "full",
        "images": [len(images.training), len(images.validation)],
    }


def check(settings: Settings, workers: int) -> None:
    """Raises TaskUsageError for what does not go together, before anything is opened or loaded."""
    check_settings(settings)
    make_schedule(settings, workers, 1)
    if settings.data == "generated" and min(settings.training_images, settings.validation_images) < settings.classes:
        raise TaskUsageError(
            f"{settings.training_images} and {settings.validation_images} images are too few for"
            f" {settings.classes} classes",
            f"--set classes={min(settings.training_images, settings.validation_images)}, or more images",
        )
    if not settings.model.startswith("resnet") and (settings.width != 1 or settings.norm != "batch"):
        raise TaskUsageError(
            f"width and norm are parameters of ResNets, and {settings.model} is as torchvision has it",
            "--set width=1 --set norm=batch, or --set model=resnet50",
        )
    if settings.model.startswith("inception") and settings.side < LEAST_INCEPTION_SIDE:
        raise TaskUsageError(f"images of {settings.side} pixels are too small for {settings.model}", "--set side=299")
    if settings.shorter < settings.side:
        raise TaskUsageError(
            f"the middle {settings.side} pixels cannot be cut out of images scaled to {settings.shorter}",
            f"--set shorter={settings.side * 8 // 7}",
        )


def check_batches(settings: Settings, least: int) -> None:
    """Small images are one pixel at the end of the network: a batch of one has no statistics then."""
    if least == 1 and settings.norm == "batch" and settings.side < SIDE_FOR_ONE:
        raise TaskUsageError(
            f"a rank has 1 image in a step: no batch statistics for images of {settings.side} pixels",
            f"--set norm=group, side={SIDE_FOR_ONE}, or another batch_size",
        )
