"""The bookkeeping of every executor's KV blocks; the tensors stay in the executors."""
