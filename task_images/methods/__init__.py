"""How ranks agree on an update: a method is a class in one file. Start reading at `base.Method.step`.

`catalog` finds methods by name, for ranks and for the command line; `check` is the self-check before a training.
No file here imports torch before it is used, because the command line reads them all.
"""
