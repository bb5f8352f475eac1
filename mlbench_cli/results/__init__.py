"""Results of runs: archives, figures and comparisons, reports, the results site, and exports.

`archive` says what happened, `analysis` how results relate, and `report`, `figures` and `site` show it. Start at
`archive/judge.py` and `analysis/figures.py`.
"""
