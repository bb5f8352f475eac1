"""ResNet-20 on scikit-learn's handwritten digits: the official image classification in half a minute, on real data.

Synchronous SGD with Nesterov momentum, warm-up of log2 k epochs, plateau. The 1797 digits (8x8 pixels, 17 shades, 10
classes) are beside this file.
"""

import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from task_images.classification import check_settings, train_classifier
from task_images.contract import Contract
from task_images.data import ArrayData, Prepare, lasting_generator, numpy_generator, seed_all
from task_images.parameters import (
    ClassifierSettings,
    HoldOutSettings,
    PlateauSettings,
    Task,
    parameter,
    read_parameters,
)
from task_images.report import DataIdentity, compare_data, digest_arrays, training_session
from task_images.resnet import check_depth, resnet
from task_images.schedules import follow_plateaus, log2_warmup


@dataclass(frozen=True)
class Settings(PlateauSettings, ClassifierSettings, HoldOutSettings):
    """Parameters of the task, with the preset `spec` as defaults."""

    depth: int = parameter(20, "layers of the ResNet, 6n+2", min=8, max=1202)
    batch_size: int = parameter(32, "samples per rank and step", min=1, max=1437)
    learning_rate: float = parameter(
        0.0025,
        "learning rate of one worker; k workers warm up to k times this rate in log2 k epochs",
        min=0,
        max=100,
    )
    plateau_patience: int = 4
    plateau_threshold: float = 0.001
    shift: int = parameter(1, "maximum shift of images in training, in pixels", min=0, max=4)
    validation_share: float = parameter(0.2, "share of every class held out for validation", min=0.01, max=0.9)
    goal_full: float = 98.0
    goal_light: float = 90.0


TASK = Task(
    settings=Settings,
    number="1a",
    title="ResNet-20 on handwritten digits",
    measured_on=["CPU"],
    method={"own": "bsp"},
    goal={"metric": "Prec@1", "comparison": ">=", "wording": "{threshold}% Top 1 Validation Accuracy"},
    data="the 1797 real digits of scikit-learn (8x8 pixels), which come with the task",
    presets={
        # The protocol of all throughput presets; no goal.
        "throughput": {
            "blocks": 10,
        },
        "tiny": {
            "depth": 8,
            "batch_size": 64,
            "epochs": 20,
            "learning_rate": 0.01,
            "goal_full": 80.0,
            "goal_light": 50.0,
        },
    },
)


FILE = Path(__file__).with_name("digits.csv.gz")  # a copy of scikit-learn's, byte for byte
OFFICIAL = {"images": 1797}
DIGEST = "sha256:56e38d568bde388182522aae20690b6414f4b4ed307db0d5058f9d5af5d0a399"
SIDE = 8
CHANNELS = 3

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


class Split(NamedTuple):
    """Images [n, 8, 8] with mean 0 and deviation 1 over the training images; labels [n] from 0 to 9."""

    training: tuple[Floats, Labels]
    validation: tuple[Floats, Labels]


def load_split(seed: int, validation_share: float, hold_out: float = 0.0) -> Split:
    """The digits, cut by `seed` so that every class gives `validation_share` of its images to the validation set.

    With `hold_out` that set is left out, and every class gives that share of its other images instead.
    """
    images, labels = _load()
    generator = numpy_generator(seed, "split")
    trains, validates = np.zeros(len(labels), dtype=bool), np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        held, rest = np.split(members, [round(validation_share * len(members))])
        if hold_out:
            held, rest = np.split(rest, [max(1, round(hold_out * len(rest)))])
        validates[held], trains[rest] = True, True
    mean, deviation = images[trains].mean(), images[trains].std()
    images = (images - mean) / deviation
    return Split((images[trains], labels[trains]), (images[validates], labels[validates]))


def identify() -> DataIdentity:
    """Whether these are the digits of scikit-learn."""
    images, labels = _load()
    return compare_data({"images": len(labels)}, OFFICIAL, digest_arrays(images, labels), DIGEST)


def _load() -> tuple[Floats, Labels]:
    with gzip.open(FILE, "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    return table[:, :-1].reshape(-1, SIDE, SIDE), table[:, -1].astype(np.int64)


def as_channels(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Images [n, 8, 8] -> [n, 3, 8, 8], the gray channel three times, for models of color images."""
    return images.unsqueeze(1).expand(-1, CHANNELS, -1, -1), labels


def make_shift(pixels: int, generator: torch.Generator) -> Prepare:
    """Augmentation: move every image by up to `pixels` in both directions, the background moving in.

    Digits are no digits any more when they are mirrored, and at 8x8 a crop would lose strokes.
    """

    def prepare(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        number, width = len(images), 2 * pixels + 1
        background = float(images.min())
        padded = torch.nn.functional.pad(images, (pixels,) * 4, value=background)
        offset = torch.randint(width, (2, number, 1), generator=generator)
        rows = offset[0] + torch.arange(SIDE)
        columns = offset[1] + torch.arange(SIDE)
        sample = torch.arange(number)
        moved = padded[sample[:, None, None], rows[:, :, None], columns[:, None, :]]
        return as_channels(moved, labels)

    return prepare


def prepare_data(folder: Path, parameters: Mapping[str, object]) -> DataIdentity:
    """The digits are part of the task: only looked at."""
    return identify()


def main(contract: Contract) -> None:
    """Split the digits by the seed and train ResNet on them to the goal."""
    settings = read_parameters(Settings, contract.parameters)
    check_settings(settings)
    check_depth(settings.depth)
    training, validation = load_split(contract.seed, settings.validation_share, settings.hold_out)
    with training_session(contract, "scikit-learn digits") as (world, report):
        report.data_identity(identify())
        seed_all(contract.seed)
        train_classifier(
            world,
            report,
            settings,
            model=resnet(settings.depth, channels=CHANNELS),
            data=ArrayData(
                world,
                training,
                validation,
                settings.batch_size,
                contract.seed,
                prepare_training=make_shift(
                    settings.shift, lasting_generator(contract.seed, "augmentation", world.rank)
                ),
                prepare_validation=as_channels,
            ),
            schedule=follow_plateaus(
                settings, settings.learning_rate, settings.learning_rate * world.size, log2_warmup(world.size)
            ),
        )
