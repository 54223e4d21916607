"""Continuous batching: decides which sequences run in each step of the executors it holds a lease on."""
