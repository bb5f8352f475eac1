"""Flip every single bit of a small archive and see whether `verify` finds it.

    python benchmarks/bit_flips.py [ARCHIVE.zip] [--every N]

Without an archive one is made: two ranks, a few metrics, a goal that was reached. Prints flips tried and found and the
time per check beside that of reading and hashing the same bytes; exit code 1 if a single flip was missed.
"""

import argparse
import hashlib
import io
import os
import sys
import tempfile
import time
from multiprocessing import Pool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlbench_cli.results.archive.files import pack
from mlbench_cli.results.archive.verify import verify_zip
from tests.unit.results.runs import sealed_run


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "archive", type=Path, nargs="?", help="a zip that verifies; small, since all its bits are tried"
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try only each Nth bit")
    options = parser.parse_args()
    data = options.archive.read_bytes() if options.archive else small_archive()
    if problems := verify_zip(io.BytesIO(data)).problems:
        print(f"the archive is damaged already: {problems[0]}")
        return 1
    bits = range(0, 8 * len(data), options.every)
    processes = os.cpu_count() or 1
    share = -(-len(bits) // (8 * processes))
    started = time.perf_counter()
    with Pool(processes) as pool:
        parts = pool.starmap(missed_flips, [(data, bits[at : at + share]) for at in range(0, len(bits), share)])
    seconds = time.perf_counter() - started
    missed = [position for part in parts for position in part]
    whole, hashing = duration(lambda: verify_zip(io.BytesIO(data))), duration(lambda: hashlib.sha256(data).digest())
    print(f"archive          {len(data)} bytes, SHA-256 {hashlib.sha256(data).hexdigest()[:16]}")
    print(f"flips tried      {len(bits)}")
    print(f"flips found      {len(bits) - len(missed)}")
    each = 1e3 * seconds * processes / len(bits)
    print(f"time             {seconds:.1f} s in {processes} processes, {each:.2f} ms a flip")
    print(f"whole archive    {1e3 * whole:.3f} ms to verify, {whole / hashing:.0f} times a bare SHA-256 of it")
    if missed:
        print(f"missed           bits {missed[:20]}")
    return 1 if missed else 0


def small_archive() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        sealed_run(Path(folder) / "run", workers=2)
        pack(Path(folder) / "run", Path(folder) / "run.zip")
        return (Path(folder) / "run.zip").read_bytes()


def missed_flips(data: bytes, bits: range) -> list[int]:
    """Those of `bits` whose flip `verify` does not find."""
    flipped = bytearray(data)
    missed = []
    for position in bits:
        flipped[position >> 3] ^= 1 << (position & 7)
        if not verify_zip(io.BytesIO(flipped)).problems:
            missed.append(position)
        flipped[position >> 3] ^= 1 << (position & 7)
    return missed


def duration(action) -> float:  # type: ignore[no-untyped-def]
    """The quickest of twenty, in seconds."""
    times = []
    for _ in range(20):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return min(times)


if __name__ == "__main__":
    sys.exit(main())
