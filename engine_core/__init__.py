"""engine_core: everything between a batch of token rows and the tokens sampled from it.

Owns the model's weights, the KV tensors, attention, sampling and the native kernels of one accelerator. Knows nothing
of requests, queues, leases or the bus: the caller says which rows to run, at which positions, in which blocks.

Start at `engine.py` (the interface and the table of engines), then `batch.py` (what goes in and out).
"""
