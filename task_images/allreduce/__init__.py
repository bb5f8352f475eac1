"""The communication backends by themselves: how long an all-reduce takes, and the other collectives."""
