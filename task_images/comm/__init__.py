"""How ranks agree on an update. One module per strategy; `base.Strategy` is what a training loop sees of them."""
