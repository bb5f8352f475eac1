"""What a rank asks of the rendezvous' store, and how that grows with the number of ranks.

    .venv/bin/python -m benchmarks.store_requests [--ranks 8 64 256]

Ranks are threads of this process, and the store counts: rank 0 has one store for all of them. Counted are the meeting
of the ranks, the wait for loading, and the addresses for the network's measurement, twice. Printed: the most of any
rank, and the mean.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

# As a script the repository is not on the path; with -m it is.
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.unit.task_images.store_requests import count


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 256])
    for size in parser.parse_args(arguments).ranks:
        found = count(size)
        most = Counter(requests for requests, _ in found)
        print(
            f"{size:5d} ranks: at most {max(most)} requests of a rank, {sum(n * k for n, k in most.items()) / size:.1f}"
            f" on average, {sum(sent for _, sent in found) / size / 1024:.1f} KiB each"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
