"""Figures of runs, and relations between runs: series, statistics, comparisons, gates. Start at `figures.py`."""
