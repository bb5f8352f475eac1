"""Measures every node of a cluster, for `mlbench certify`: alone, in pairs and together, with fresh data on suspects.

Start with `task.py`, the plan that rank 0 drives. `node.py` is the process of a rank: it obeys rank 0 and keeps a child
(`measure.py`) that computes, and that is killed if it exceeds its limit, so that a device that hangs is one finding and
not the end of the run. `rules.py` is arithmetic that the judge of the certificate uses, too.
"""
