"""`python -m services.executor`: run one executor."""

import os
import sys
from collections.abc import Sequence

from services.executor.settings import Settings
from services.runtime.service import run

OPENMP_WAITS = {"OMP_WAIT_POLICY": "passive"}
"""How torch's threads wait for one another: asleep. Spinning, the default, takes the cores from the other services and
from the thread that is waited for: with both cores busy, a step of the reference engine took eight times as long."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal; returns the exit code."""
    for name, value in OPENMP_WAITS.items():
        os.environ.setdefault(name, value)
    from services.executor.service import ExecutorService  # torch loads OpenMP, which reads the environment only then

    return run("executor", Settings, ExecutorService, argv)


if __name__ == "__main__":
    sys.exit(main())
