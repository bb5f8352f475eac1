"""Local state: the SQLite store of runs and clusters, run folders, and queue folders.

Start at `store.py`.
"""
