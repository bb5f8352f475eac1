"""mlbench: from "no cluster" to a verified distributed-training benchmark result with one command line."""

__version__ = "4.0.0"
