"""Decoder pretraining. Read `task` first."""
