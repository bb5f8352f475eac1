"""Where the data sets of the tasks are published: the one table of addresses, sizes, digests and licenses.

`mlbench data prepare` fetches what a task lacks. A size or digest that no source of ours states is 0 or "": the digest
of what arrived is then written beside the file, NAME.sha256, and held against it from then on. `source` says who states
address and digest. Data sets whose license asks for an account are not fetched; their tasks say how to import them.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from task_images.harness.cache import Say, hold_lock
from task_images.harness.datasets import Archive, fetch

_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary"
_METAMIND = "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip"
_FINEWEB = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main"
_STATMT = "http://www.statmt.org"
_WMT = "http://data.statmt.org"
SHARDS = 103
LOCK = ".published.lock"
_SHARD_BYTES = 4 * 256 + 2 * 100_000_000  # but for the last one


@dataclass(frozen=True)
class Published:
    """The files of one data set."""

    name: str
    license: str
    source: str
    archives: tuple[Archive, ...]

    @property
    def bytes(self) -> int:
        """The sum of the sizes that are known."""
        return sum(archive.bytes for archive in self.archives)


EPSILON = Published(
    "epsilon",
    "no license is stated; from the PASCAL large scale learning challenge 2008",
    "address: LIBSVM data sets; SHA-256: as pinned by public loaders of scikit-learn users",
    (
        Archive(
            "epsilon_normalized.bz2",
            f"{_LIBSVM}/epsilon_normalized.bz2",
            0,
            "sha256:aff916d4f97f18d286558ca088d2a9f7e1fcee9376539a5aa6ef5b7ef9dfa978",
        ),
        Archive(
            "epsilon_normalized.t.bz2",
            f"{_LIBSVM}/epsilon_normalized.t.bz2",
            0,
            "sha256:cb299295ad11e200696eaa3050f5d8cf700eaa9c65e6aa859bda959f8669458b",
        ),
    ),
)
WIKITEXT2 = Published(
    "WikiText-2",
    "CC BY-SA 3.0",
    "address and MD5: torchtext; the address no longer answers everywhere, so the Internet Archive's copy is next",
    (
        Archive(
            "wikitext-2-v1.zip",
            _METAMIND,
            0,
            "md5:542ccefacc6c27f945fb54453812b3cd",
            mirrors=(f"https://web.archive.org/web/2020id_/{_METAMIND}",),
        ),
    ),
)
FINEWEB = Published(
    "FineWeb-10B as tokens of GPT-2",
    "ODC-By 1.0",
    "address: modded-nanogpt; sizes follow from the form of llm.c's shards; no digests are published",
    (
        Archive("fineweb_val_000000.bin", f"{_FINEWEB}/fineweb_val_000000.bin", _SHARD_BYTES, ""),
        *(
            Archive(name, f"{_FINEWEB}/{name}", _SHARD_BYTES if number < SHARDS else 0, "")
            for number in range(1, SHARDS + 1)
            for name in [f"fineweb_train_{number:06d}.bin"]
        ),
    ),
)
WMT16 = Published(
    "WMT16 English-German",
    "no license is stated; free for research (statmt.org)",
    "addresses: statmt.org, as the scripts of GNMT use them; no digests are published",
    (
        Archive("de-en.tgz", f"{_STATMT}/europarl/v7/de-en.tgz", 0, ""),
        Archive("training-parallel-commoncrawl.tgz", f"{_STATMT}/wmt13/training-parallel-commoncrawl.tgz", 0, ""),
        Archive("training-parallel-nc-v11.tgz", f"{_WMT}/wmt16/translation-task/training-parallel-nc-v11.tgz", 0, ""),
        Archive("dev.tgz", f"{_WMT}/wmt16/translation-task/dev.tgz", 0, ""),
    ),
)
WMT17 = Published(
    "WMT17 English-German",
    "no license is stated; free for research (statmt.org)",
    "addresses: tensor2tensor and fairseq; no digests are published",
    (
        Archive("training-parallel-nc-v12.tgz", f"{_WMT}/wmt17/translation-task/training-parallel-nc-v12.tgz", 0, ""),
        Archive("training-parallel-commoncrawl.tgz", f"{_STATMT}/wmt13/training-parallel-commoncrawl.tgz", 0, ""),
        Archive("training-parallel-europarl-v7.tgz", f"{_STATMT}/wmt13/training-parallel-europarl-v7.tgz", 0, ""),
        Archive("test-full.tgz", f"{_STATMT}/wmt14/test-full.tgz", 0, ""),
    ),
)


def is_begun(folder: Path) -> bool:
    """Whether a data set was fetched into `folder`, or an interrupted command has begun to."""
    return (folder / LOCK).exists()


def fetch_published(published: Published, folder: Path, say: Say, names: Sequence[str] = ()) -> list[Path]:
    """Fetch the files of a data set (or those of `names`) that are not in `folder`, and check all of them.

    Says first what is fetched: sizes, license, digests. Raises what `fetch` raises.
    """
    wanted = [archive for archive in published.archives if not names or archive.name in names]
    missing = [archive for archive in wanted if not (folder / archive.name).exists()]
    if missing:
        size = sum(archive.bytes for archive in missing)
        unknown = sum(not archive.bytes for archive in missing)
        about = f"{size / 1e9:.1f} GB" if size else ""
        about += f"{' and ' if size and unknown else ''}{f'{unknown} of unknown size' if unknown else ''}"
        say(f"{published.name}: {len(missing)} files to fetch ({about}); license: {published.license}")
        for archive in missing[:8]:
            digest = archive.digest or "no published digest; that of what arrives is recorded"
            say(f"  {archive.url} ({digest})")
        if len(missing) > 8:
            say(f"  and {len(missing) - 8} more")
    with hold_lock(folder / LOCK, say):
        return [_fetch_one(archive, folder, say) for archive in wanted]


def _fetch_one(archive: Archive, folder: Path, say: Say) -> Path:
    record = folder / f"{archive.name}.sha256"
    if not archive.digest and record.is_file():
        known = record.read_text("ascii").split()[0]
        archive = Archive(archive.name, archive.url, archive.bytes, f"sha256:{known}", archive.mirrors)
    path = fetch(archive, folder, say)
    if not archive.digest:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        record.write_text(f"{digest}  {archive.name}\n", "ascii")
        say(f"{archive.name}: {path.stat().st_size} bytes, SHA-256 {digest} (recorded, no published one)")
    return path
