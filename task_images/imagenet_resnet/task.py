"""Image classification on ImageNet as the field runs it: large batches, linear scaling of the rate, gradual warm-up."""

from functools import partial

from torch.nn.functional import cross_entropy

from task_images.cache import data_folder, made_up
from task_images.classification import check_settings, train_classifier
from task_images.contract import Contract
from task_images.errors import TaskUsageError
from task_images.imagenet_resnet import Settings
from task_images.imagenet_resnet.data import FakeData, FileData, generate
from task_images.imagenet_resnet.folders import load
from task_images.imagenet_resnet.schedule import make_schedule
from task_images.methods.ddp import Ddp
from task_images.models.imagenet import imagenet_model
from task_images.models.inception import LEAST_SIDE
from task_images.parameters import read_parameters
from task_images.report import Reporter
from task_images.seeds import seed_all
from task_images.train import split_decay
from task_images.world import World, training_session

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
    ddp = Ddp(bucket=f"{settings.bucket_mb}MiB") if settings.reduction == "ddp" else None
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
            groups=None if settings.decay_all else split_decay,
            method=ddp,
            name="imagenet_resnet",
            identity={
                "network": settings.model,
                **{name: getattr(settings, name) for name in ("width", "norm", "classes")},
                **images,
            },
            details={"model": settings.model, **images},
            closing=data.facts,
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
        decoders=settings.decoders,
    )
    return files, {
        "decoding": "draft" if settings.draft else "full",
        "images": [len(images.training), len(images.validation)],
    }


def check(settings: Settings, workers: int) -> None:
    """Raises TaskUsageError for what does not go together, before anything is opened or loaded."""
    check_settings(settings)
    make_schedule(settings, workers, 1)
    if settings.decoders == "processes" and not settings.loaders:
        raise TaskUsageError("decoders=processes needs --set loaders above 0", "--set loaders=4")
    if settings.data == "generated" and min(settings.training_images, settings.validation_images) < settings.classes:
        raise TaskUsageError(
            f"{settings.training_images} and {settings.validation_images} images are too few for"
            f" {settings.classes} classes",
            f"--set classes={min(settings.training_images, settings.validation_images)}, or more images",
        )
    if settings.model.startswith("inception") and settings.side < LEAST_SIDE:
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
