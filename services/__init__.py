"""The services of the pipeline: one package each, plus `runtime` (what all of them share), `supervisor` and `cli`."""
