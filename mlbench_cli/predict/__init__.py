"""Time and price of a run that was not made, from runs that were.

`measure` reads what an update took from archives; `predict` scales it to other numbers of workers, networks and
machines. Computation is measured, never modeled; communication follows each method's own formula
(`cost`), plus the overhead that the runs show beyond that formula.
"""
