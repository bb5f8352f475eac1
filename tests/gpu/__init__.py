"""What only a real NVIDIA GPU can show; one GPU is enough. Without one all of it is skipped.

    python -m pytest tests/gpu -n 4

Two ranks share the GPU by gloo; NCCL refuses to, so it is tried with one rank.
"""
