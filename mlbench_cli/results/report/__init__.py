"""The report: one page about a set of runs, with settings, machines, results and all figures with their numbers.

`collect` turns archives into a `Report` of plain data; `html` and `markdown` render it. The dashboard shows the same
figures.
"""
