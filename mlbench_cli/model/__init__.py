"""The types that all other packages use: runs and their specs, goals, networks, clusters' details and findings.

Plain types with behavior; nothing here reads or writes. Start at `run.py` and `spec.py`.
"""
