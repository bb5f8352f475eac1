"""The catalog: tasks and their parameters, data files, images and the provenance of code.

Start at `catalog.py`.
"""
