"""A page to look at a deployment: the live pipeline, its rates and latencies, and every recent request's waterfall."""
