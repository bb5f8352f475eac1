"""Figures over several results: series, statistics, comparisons."""
