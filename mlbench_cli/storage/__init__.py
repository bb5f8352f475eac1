"""Local state: the SQLite store of runs and clusters, and run folders.

Start at `store.py`.
"""
