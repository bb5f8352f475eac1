"""How far `mlbench predict` is off, on runs that it has not seen.

    python -m benchmarks.predict [FOLDER]

Groups the archives of FOLDER (default: results/archives) by task, method, workers and network. Each group is predicted
from each other group with the same method on another network or with another number of workers; a run with one worker,
which has no method, predicts all-reduce. Prints predicted and measured seconds of an update, and how many are within
their interval.
"""

import math
import sys
from collections import defaultdict
from itertools import permutations
from pathlib import Path
from statistics import fmean, median

from mlbench_cli.errors import UsageError
from mlbench_cli.model.network import parse_network
from mlbench_cli.predict.model import Link, Measured, measure, predict
from mlbench_cli.results.archive.verify import open_verified

Setting = tuple[str, str, int, str]


def read(folder: Path) -> dict[Setting, list[Measured]]:
    """The groups of runs in a folder, by task, method, ranks and network ("" if it was not shaped)."""
    groups: dict[Setting, list[Measured]] = defaultdict(list)
    for path in sorted(folder.glob("*.zip")):
        with open_verified(path) as archive:
            try:
                one = measure(archive.run, archive.result, archive.environment)
            except UsageError:
                continue
            network = str(archive.run["spec"].get("network") or "")
            place = str(archive.run["spec"]["cluster_kind"])
            groups[(f"{one.task} on {place}", one.method.name, one.ranks, network)].append(one)
    return groups


def main() -> None:
    """Predict each group from each other, and print the errors."""
    groups = read(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("results/archives"))
    errors, within = [], 0
    print(f"{'from':34} {'to':34} {'predicted':>10} {'measured':>10} {'error':>7}  basis")
    for (source, known), (target, held_out) in permutations(groups.items(), 2):
        is_alike = source[1] == target[1] or source[2] == 1
        if source[0] != target[0] or not is_alike or target[2] < source[2] or (source[2] == 1 and target[1] != "bsp"):
            continue
        link = Link.of_shape(parse_network(target[3])) if target[3] else held_out[0].link
        found = predict(known, target[2], link)
        measured = fmean(one.computing + one.exposed for one in held_out)
        error = found.update_seconds / measured - 1
        errors.append(abs(math.log(found.update_seconds / measured)))
        within += found.low_seconds <= measured <= found.high_seconds
        words = [" ".join(str(part) for part in setting[1:] if part) for setting in (source, target)]
        print(
            f"{words[0]:34} {words[1]:34} {1e3 * found.update_seconds:7.1f} ms {1e3 * measured:7.1f} ms {error:+7.0%}"
            f"  {found.basis.value}"
        )
    typical = math.exp(median(errors)) - 1
    print(f"{len(errors)} predictions: median error {typical:.0%}, {within} within their interval")


if __name__ == "__main__":
    main()
