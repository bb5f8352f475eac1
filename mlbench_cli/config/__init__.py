"""Paths of mlbench, the config file, and hints for optional packages.

`settings.py` has the paths, `file.py` the config file.
"""
