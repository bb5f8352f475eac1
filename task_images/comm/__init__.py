"""Communication strategies: how ranks combine their gradients or weights. Start at `base.Strategy`, the interface that
training loops use."""
