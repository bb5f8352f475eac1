"""One page about a set of runs: what was run, on what, what came of it, and every figure with its numbers.

`collect` makes a `Report` of archives: plain data. `html` and `markdown` render it. The dashboard shows the same
figures.
"""
