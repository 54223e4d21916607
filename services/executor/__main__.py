"""`python -m services.executor`: run one executor."""

import sys
from collections.abc import Sequence

from services.executor.service import ExecutorService
from services.executor.settings import Settings
from services.runtime.service import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal; returns the exit code."""
    return run("executor", Settings, ExecutorService, argv)


if __name__ == "__main__":
    sys.exit(main())
