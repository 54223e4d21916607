"""A discrete-event run of the real router, planner, block pools and prefix index over many executors, without a bus.

    python -m tests.bench.simulation [--executors 1000] [--requests 100000] [--json FILE]

It lies here and not behind `natterjack bench`, because it is made of three services' insides, which no service may
import, and because it answers a developer's questions: what a decision costs, and how good it is at sizes that no test
machine has. Time is simulated; only the costs of decisions are measured.
"""
