"""Pretraining of language models: the code shared by gpt_pretraining and bert_pretraining.

plan         the batch of each rank, checked before any process group exists
model        activation checkpointing, initial values and the choice of attention
tokens       text and token files -> fixed windows of tokens, in an order that depends only on seed and step
pretraining  a task as a subclass, from the contract to the result: corpus, model, passes, validation, checkpoints
"""
