"""Where the tasks' data sets are published: addresses, sizes, digests and licenses.

`mlbench data prepare` fetches missing files. An unpublished size or digest is 0 or "": the digest of the first download
is then saved as NAME.sha256 and checked from then on. `source` is where address and digest are published. Data sets
that require an account are not fetched; their tasks explain how to import them.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from task_images.cache import Say, hold_lock
from task_images.fetch import Archive, fetch

_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary"
_METAMIND = "https://s3.amazonaws.com/research.metamind.io/wikitext"
_SMERITY = "https://wikitext.smerity.com"
_FINEWEB = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main"
_STATMT = "http://www.statmt.org"
_WMT = "http://data.statmt.org"
SHARDS = 103
LOCK = ".published.lock"
_SHARD_BYTES = 4 * 256 + 2 * 100_000_000  # except the last one


@dataclass(frozen=True)
class Published:
    """The files of one data set."""

    name: str
    license: str
    source: str
    archives: tuple[Archive, ...]

    @property
    def bytes(self) -> int:
        """The sum of the known sizes."""
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
_VOCABULARY = Archive(
    "vocab.txt",
    "https://huggingface.co/bert-base-uncased/resolve/86b5e0934494bd15c9632b12f734a8a67f723594/vocab.txt",
    231_508,
    "sha256:07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
)


def _wikitext(name: str, size: int, digest: str) -> Archive:
    """An archive of WikiText. The first address does not work everywhere, so the author's and an archived copy
    follow."""
    address = f"{_METAMIND}/{name}"
    return Archive(
        name, address, size, digest, (f"{_SMERITY}/{name}", f"https://web.archive.org/web/2020id_/{address}")
    )


WIKITEXT2 = Published(
    "WikiText-2",
    "CC BY-SA 3.0",
    "address and MD5: torchtext; size: Hugging Face datasets",
    (_wikitext("wikitext-2-v1.zip", 4_475_746, "md5:542ccefacc6c27f945fb54453812b3cd"),),
)
WIKITEXT103 = Published(
    "WikiText-103 and BERT's vocabulary",
    "CC BY-SA 3.0 (text), Apache-2.0 (vocabulary)",
    "text: Hugging Face datasets state address, size and SHA-256; vocabulary: bert-base-uncased, pinned by its commit",
    (
        _wikitext(
            "wikitext-103-raw-v1.zip",
            191_984_949,
            "sha256:91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
        ),
        _VOCABULARY,
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
_COMMON_CRAWL = Archive(
    "training-parallel-commoncrawl.tgz",
    f"{_STATMT}/wmt13/training-parallel-commoncrawl.tgz",
    918_311_367,
    "sha256:c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
)
WMT16 = Published(
    "WMT16 English-German",
    "no license is stated; free for research (statmt.org)",
    "addresses: statmt.org, as the scripts of GNMT use them; sizes and digests: TensorFlow Datasets, GluonNLP"
    " (Europarl), sacreBLEU (development sets)",
    (
        Archive(
            "de-en.tgz",
            f"{_STATMT}/europarl/v7/de-en.tgz",
            197_785_698,
            "sha1:53bb5408d22977c89284bd755717e6bbb5b12bc5",
        ),
        _COMMON_CRAWL,
        Archive(
            "training-parallel-nc-v11.tgz",
            f"{_WMT}/wmt16/translation-task/training-parallel-nc-v11.tgz",
            75_178_032,
            "sha256:cfe8ab047e05043476e498ee765c98e939c7b7d6d294e856344c84476b619d6a",
        ),
        Archive("dev.tgz", f"{_WMT}/wmt16/translation-task/dev.tgz", 0, "md5:4a3dc2760bb077f4308cce96b06e6af6"),
    ),
)
WMT17 = Published(
    "WMT17 English-German",
    "no license is stated; free for research (statmt.org)",
    "addresses: tensor2tensor and fairseq; sizes and digests: TensorFlow Datasets, sacreBLEU (test sets)",
    (
        Archive(
            "training-parallel-nc-v12.tgz",
            f"{_WMT}/wmt17/translation-task/training-parallel-nc-v12.tgz",
            168_591_139,
            "sha256:2b45f30ef1d550d302fd17dd3a5cbe19134ccc4c2cf50c2dae534aee600101a2",
        ),
        _COMMON_CRAWL,
        Archive(
            "training-parallel-europarl-v7.tgz",
            f"{_STATMT}/wmt13/training-parallel-europarl-v7.tgz",
            657_632_379,
            "sha256:0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
        ),
        Archive("test-full.tgz", f"{_STATMT}/wmt14/test-full.tgz", 0, "md5:a8cd784e006feb32ac6f3d9ec7eb389a"),
    ),
)


def is_begun(folder: Path) -> bool:
    """Whether a data set was fetched into `folder`, completely or partly."""
    return (folder / LOCK).exists()


def fetch_published(published: Published, folder: Path, say: Say, names: Sequence[str] = ()) -> list[Path]:
    """Fetch the missing files of a data set (or those of `names`) into `folder`, and check all files.

    First prints sizes, license and digests. Raises the errors of `fetch`.
    """
    wanted = [archive for archive in published.archives if not names or archive.name in names]
    missing = [archive for archive in wanted if not (folder / archive.name).exists()]
    if missing:
        size = sum(archive.bytes for archive in missing)
        unknown = sum(not archive.bytes for archive in missing)
        about = f"{size / 1e9:.1f} GB" if size else ""
        about += f"{' and ' if size and unknown else ''}{f'{unknown} of unknown size' if unknown else ''}"
        say(f"{published.name}: {len(missing)} files to download ({about}); license: {published.license}")
        for archive in missing[:8]:
            digest = archive.digest or "no published digest; that of the downloaded file is recorded"
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
