"""What this machine remembers: the SQLite store of runs and clusters, run folders, and the folders of queues.

Start at `store.py`.
"""
