"""CIFAR-10 in both forms in which its authors publish it (https://www.cs.toronto.edu/~kriz/cifar.html), or its like.

The data folder, or one of PLACES in it, may hold an archive (cifar-10-binary.tar.gz, cifar-10-python.tar.gz; without
.gz, as some browsers leave it), or its files, as in its folder cifar-10-batches-bin or cifar-10-batches-py. If there is
none, the binary archive is downloaded.
"""

import io
import pickle
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from task_images.cache import Arrays, Say, cached_arrays, data_folder, writable_folder
from task_images.cifar10_resnet20 import CifarSettings
from task_images.contract import Contract, EnvironmentUnfitError
from task_images.data import Bytes, Labels
from task_images.fetch import Archive, fetch
from task_images.images import named_folders, synthetic_images
from task_images.report import DataIdentity, compare_data, find_other_means, made_up

CLASSES, CHANNELS, SIDE = 10, 3, 32
PIXELS = CHANNELS * SIDE * SIDE
OFFICIAL = {"training images": 50_000, "validation images": 10_000}
OFFICIAL_MEANS = (0.4913997, 0.4821583, 0.4465311)  # of the training images' channels
# Per channel, of the training images, as the original benchmark has them.
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)

PLACES = r"data|cifar[-_]?10(?!0).*"  # and not CIFAR-100
TRAINING = [f"data_batch_{number}" for number in range(1, 6)]
VALIDATION = ["test_batch"]
BATCHES = {*TRAINING, *VALIDATION}
BINARY = Archive(
    "cifar-10-binary.tar.gz",
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    170_052_171,
    "md5:c32a1d4ab5d03f1284b67883e8d87530",
)
PYTHON = Archive(
    "cifar-10-python.tar.gz",
    "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    170_498_071,
    "md5:c58f30108f718f92721af3b95e74349a",
)
FORM = 1


class Cifar(NamedTuple):
    """Images [n, 3, 32, 32] of bytes and labels [n] from 0 to 9, mapped read-only."""

    training: tuple[Bytes, Labels]
    validation: tuple[Bytes, Labels]
    digest: str | None = None  # of the decoded images and labels; None if they were generated

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of images by part."""
        return {"training images": len(self.training[1]), "validation images": len(self.validation[1])}

    @property
    def identity(self) -> DataIdentity:
        """Counts and digest held against the official data."""
        if self.digest is None:
            return made_up(self.counts)
        find_difference = partial(find_other_means, self.training[0], OFFICIAL_MEANS)
        return compare_data(self.counts, OFFICIAL, self.digest, find_difference=find_difference)


def load_images(wanted: CifarSettings, contract: Contract) -> Cifar:
    """The images that the parameters ask for. Raises what `load` raises."""
    if wanted.data == "synthetic":
        sizes = {"training": wanted.training_images, "validation": wanted.validation_images}
        parts = [synthetic_images(size, CLASSES, SIDE, contract.seed, part) for part, size in sizes.items()]
        return Cifar(parts[0], parts[1])
    return load(data_folder(contract), print)


def load(folder: Path, say: Say, archives: tuple[Archive, Archive] = (BINARY, PYTHON)) -> Cifar:
    """The data set in `folder`, downloaded and converted by the first rank of the machine that comes.

    Raises EnvironmentUnfitError naming the file that is damaged, DownloadError if a download fails.
    """

    def build() -> Arrays:
        found = _find(folder, archives)
        if not found:
            cache = writable_folder(folder)
            say(f"{archives[0].name}: downloading {archives[0].bytes / 1e6:.0f} MB to {cache}")
            found = [fetch(archives[0], cache, say)]
        for source in found[:-1]:
            try:
                return read_checked(source)
            except EnvironmentUnfitError as error:  # of a folder that an interrupted extraction left, for example
                say(str(error))
        return read_checked(found[-1])

    def read_checked(source: Path) -> Arrays:
        for archive in archives:
            if archive.name == source.name:
                fetch(archive, source.parent, say)
        return read(source)

    arrays, entry = cached_arrays(folder, "cifar10", FORM, lambda: _sources(folder, archives), build)
    training, validation = ((arrays[f"{part}_images"], arrays[f"{part}_labels"]) for part in ("training", "validation"))
    return Cifar(training, validation, entry.digest)  # type: ignore[arg-type]


def validation_arrays(folder: Path) -> tuple[Bytes, Labels]:
    """Images [n, 3, 32, 32] of bytes and labels [n] of the validation set. Raises as `load`."""
    return load(folder, print).validation


def read(source: Path) -> Arrays:
    """Training and validation images and labels from an archive or from the folder that is in it."""
    found = dict(_files(source))
    arrays: Arrays = {}
    for part, names in (("training", TRAINING), ("validation", VALIDATION)):
        missing = [name for name in names if name not in found]
        if missing:
            raise EnvironmentUnfitError(
                f"{source} has no {missing[0]}",
                f"Delete {source}, so that the data set is downloaded again, or put its archive beside it.",
            )
        batches = [found[name] for name in names]
        arrays[f"{part}_images"] = np.concatenate([images for images, _ in batches]).reshape(-1, CHANNELS, SIDE, SIDE)
        arrays[f"{part}_labels"] = np.concatenate([labels for _, labels in batches])
    return arrays


def _sources(folder: Path, archives: tuple[Archive, Archive]) -> list[Path]:
    found = _find(folder, archives)
    return [path for source in found for path in ([source] if source.is_file() else _batches(source))]


def _find(folder: Path, archives: tuple[Archive, Archive]) -> list[Path]:
    """The folders and archives with the data set, in the order in which they are tried."""
    places = list(named_folders(folder, PLACES))
    names = [name for archive in archives for name in (archive.name, archive.name.removesuffix(".gz"))]
    packed = [place / name for place in places for name in names]
    return [*filter(_batches, places), *filter(Path.is_file, packed)]


def _batches(folder: Path) -> list[Path]:
    """The files of the data set in a folder, which may not exist."""
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in files if path.stem in BATCHES and path.is_file())


def _files(source: Path) -> Iterator[tuple[str, tuple[Bytes, Labels]]]:
    """Name without ending, and contents, of every batch in `source`."""
    try:
        if source.is_dir():
            for path in _batches(source):
                yield path.stem, _parse(f"{path}", path.name, path.read_bytes())
            return
        with tarfile.open(source, "r:*") as archive:
            for member in archive:
                name = Path(member.name)
                file = archive.extractfile(member) if member.isfile() and name.stem in BATCHES else None
                if file is not None:
                    yield name.stem, _parse(f"{name} in {source}", name.name, file.read())
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise EnvironmentUnfitError(f"{source} cannot be read: {error}", "Download the data set again.") from None


def _parse(where: str, name: str, raw: bytes) -> tuple[Bytes, Labels]:
    images, labels = _parse_binary(where, raw) if name.endswith(".bin") else _parse_python(where, raw)
    if not len(labels) or labels.min() < 0 or labels.max() >= CLASSES:
        raise EnvironmentUnfitError(f"{where} has no labels from 0 to {CLASSES - 1}", "Download the data set again.")
    return images, labels


def _parse_binary(where: str, raw: bytes) -> tuple[Bytes, Labels]:
    """Records of one byte for the label and 3072 for the image: red, green and blue planes, row by row."""
    if len(raw) % (1 + PIXELS):
        raise EnvironmentUnfitError(
            f"{where} has {len(raw)} bytes, not a multiple of {1 + PIXELS}", "It is truncated; download it again."
        )
    records = np.frombuffer(raw, np.uint8).reshape(-1, 1 + PIXELS)
    return records[:, 1:], records[:, 0].astype(np.int64)


def _parse_python(where: str, raw: bytes) -> tuple[Bytes, Labels]:
    """A pickled dictionary: "data" [n, 3072] of bytes, "labels" a list of n numbers; Python 2 wrote these as bytes."""
    try:
        batch = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
        images, labels = (batch.get(name, batch.get(name.encode())) for name in ("data", "labels"))
        labels = np.array(labels, np.int64)
        fits = isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.shape == (len(labels), PIXELS)
    except Exception as error:  # a damaged pickle may raise anything
        raise EnvironmentUnfitError(f"{where} cannot be read: {error}"[:300], "Download the data set again.") from None
    if not fits:
        raise EnvironmentUnfitError(f"{where} does not hold one image of {PIXELS} bytes per label")
    return images, labels


class _Unpickler(pickle.Unpickler):
    """Numpy arrays and plain data only: a pickle can otherwise run anything."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}:
            return super().find_class(module, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return super().find_class("numpy._core.multiarray" if _NUMPY_2 else "numpy.core.multiarray", name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


_NUMPY_2 = int(np.__version__.split(".")[0]) >= 2


def prepare_data(folder: Path, parameters: Mapping[str, object]) -> DataIdentity:
    """Fetch and convert the images, once for all runs."""
    return load(folder, print).identity
