"""BERT pretraining. Read `task` first."""
