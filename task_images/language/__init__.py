"""Pretraining of language models: the code shared by gpt_pretraining and bert_pretraining.

layout       the mesh of ranks (data, replicas, tensor parallel), checked before any process group exists
parallel     a model spread over ranks by that layout (FSDP2, HSDP, tensor parallel), initial weights, its updates
tokens       text and token files -> fixed windows of tokens, in an order that depends only on seed and step
pretraining  a task as a subclass, from the contract to the result: corpus, model, passes, validation, checkpoints
"""
