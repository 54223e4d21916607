"""`python -m services.scheduler`: run one scheduler."""

import sys
from collections.abc import Sequence

from services.runtime.service import run
from services.scheduler.service import SchedulerService
from services.scheduler.settings import Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal; returns the exit code."""
    return run("scheduler", Settings, SchedulerService, argv)


if __name__ == "__main__":
    sys.exit(main())
