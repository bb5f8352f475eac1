"""The report: one page about a set of runs, with settings, machines, results and all figures with their numbers.

`facts` turns archives into a dict of plain values, `finding` chooses what the title is about, and the templates put
both into words, as a page or as Markdown (`render`). The dashboard uses the same templates.
"""
