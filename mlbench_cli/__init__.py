"""mlbench: from "no cluster" to a verified distributed-training benchmark result with one command line."""

from mlbench_cli.isolation import find_own_packages_first

__version__ = "4.0.0"

find_own_packages_first()
