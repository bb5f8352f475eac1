"""The identity of a run's data: counts, a digest of the decoded data, and whether they are the official ones."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import numpy.typing as npt

# Published means were computed in single precision, so their seventh digits differ.
MEAN_TOLERANCE = 2e-6


@dataclass(frozen=True)
class DataIdentity:
    """The data's identity in the result event.

    counts     part -> number of samples (or words, or sentence pairs), as used
    digest     "sha256:HEX" of the decoded data; None for generated data
    official   True: the published data set; False: other data; None: unknown
    reason     why the data are not, or not known to be, the official ones; None if they are
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    digest: str | None = None
    official: bool | None = None
    reason: str | None = "the task does not report which data it trained on"

    def to_dict(self) -> dict[str, object]:
        """The entry of the result event."""
        return {**asdict(self), "counts": dict(self.counts)}


def digest_arrays(*arrays: npt.NDArray[np.generic]) -> str:
    """ "sha256:HEX" of the shapes, types and values of `arrays`."""
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(f"{array.dtype.str} {array.shape}\n".encode())
        sha.update(np.ascontiguousarray(array).view(np.uint8).data)
    return f"sha256:{sha.hexdigest()}"


def made_up(counts: Mapping[str, int]) -> DataIdentity:
    """The identity of generated data."""
    return DataIdentity(counts, None, False, "the data were generated")


def find_other_means(images: npt.NDArray[np.uint8], means: Sequence[float]) -> str | None:
    """Describe how the channel means of images [n, channels, height, width] (bytes) differ from the published `means`
    (from 0 to 1); None if they do not."""
    sums = images.sum(axis=(0, 2, 3), dtype=np.int64)
    found = sums / (255 * (images.size // images.shape[1]))
    if np.allclose(found, means, rtol=0, atol=MEAN_TOLERANCE):
        return None
    there, published = (", ".join(f"{mean:.6f}" for mean in some) for some in (found, means))
    return f"the mean of their pixels is {there} instead of {published}"


def compare_data(
    counts: Mapping[str, int],
    expected: Mapping[str, int],
    digest: str | None,
    official_digest: str | None = None,
    find_difference: Callable[[], str | None] | None = None,
) -> DataIdentity:
    """Compare data with the published counts and, if known, the published digest. If the counts match,
    `find_difference` looks for other differences."""
    off = [f"{counts.get(part, 0)} {part} instead of {number}" for part, number in expected.items()
           if counts.get(part, 0) != number]  # fmt: skip
    if off:
        kind = "a part of the official data" if _is_part(counts, expected) else "not the official data"
        return DataIdentity(counts, digest, False, f"{kind}: {', '.join(off)}")
    if official_digest is not None and digest != official_digest:
        return DataIdentity(counts, digest, False, "not the official data: their digest differs")
    if find_difference is not None and (difference := find_difference()) is not None:
        return DataIdentity(counts, digest, False, f"not the official data: {difference}")
    return DataIdentity(counts, digest, True, None)


def _is_part(counts: Mapping[str, int], expected: Mapping[str, int]) -> bool:
    return all(0 < counts.get(part, 0) <= number for part, number in expected.items())
