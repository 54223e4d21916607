"""One accelerator: weights, KV tensors, sampling. Runs the plan it is given."""
