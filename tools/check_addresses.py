"""Check the addresses of the data sets: `python -m tools.check_addresses [--megabytes 200]`, or `make addresses`.

Each address in the tables of the tasks is asked for the beginning of its file. Sizes are compared with the table. Files
with a published digest and at most so many megabytes are fetched, and their digests compared. Prints a line for each
address. The exit code is 1 if a file has no correct address. For the nightly workflow, where there is a network.
"""

import argparse
import hashlib
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

from task_images.cifar10_resnet20.data import BINARY, PYTHON
from task_images.fetch import Archive
from task_images.mnist.data import ARCHIVES as MNIST
from task_images.published import EPSILON, FINEWEB, WIKITEXT2, WIKITEXT103, WMT16, WMT17

TIMEOUT = 60.0
BLOCK = 1 << 20


def all_archives() -> list[Archive]:
    """Every file that `mlbench data prepare` fetches; of FineWeb's shards the first, second and last."""
    shards = FINEWEB.archives
    tables = (EPSILON, WIKITEXT2, WIKITEXT103, WMT16, WMT17)
    published = [archive for each in tables for archive in each.archives]
    found = (BINARY, PYTHON, *MNIST, *published, shards[0], shards[1], shards[-1])
    return list({archive.url: archive for archive in found}.values())


def find_problem(archive: Archive, address: str, limit: int) -> str:
    """What is wrong with an address; empty if nothing is. At most `limit` bytes are fetched for the digest."""
    request = urllib.request.Request(address, headers={"User-Agent": "mlbench", "Accept-Encoding": "identity"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            size = int(response.headers.get("Content-Length") or 0)
            if archive.bytes and size != archive.bytes:
                return f"{size} bytes instead of {archive.bytes}"
            algorithm, _, expected = archive.digest.partition(":")
            if not expected or not 0 < size <= limit:
                return "" if response.read(1) else "the file is empty"
            digest = hashlib.new(algorithm)
            while block := response.read(BLOCK):
                digest.update(block)
            return "" if digest.hexdigest() == expected else f"{algorithm} {digest.hexdigest()} instead of {expected}"
    except (OSError, ValueError, urllib.error.URLError) as error:
        return f"no answer: {' '.join(str(getattr(error, 'reason', None) or error).split())[:200]}"


def check(archive: Archive, limit: int) -> Iterator[tuple[str, str]]:
    """(address, problem) of the addresses of a file, up to the first one that is right."""
    for address in archive.addresses:
        problem = find_problem(archive, address, limit)
        yield address, problem
        if not problem:
            return


def main(argv: list[str]) -> int:
    """Exit code: 1 if a file cannot be downloaded from any of its addresses, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200, help="largest file that is fetched for its digest")
    given = parser.parse_args(argv)
    missing = 0
    for archive in all_archives():
        found = list(check(archive, given.megabytes * 1_000_000))
        for address, problem in found:
            print(f"{problem or 'ok'}: {address}", flush=True)
        missing += bool(found[-1][1])
    print(f"{missing} files without a right address" if missing else "every file has a right address")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
