"""`python -m services.console`: run one console."""

import sys
from collections.abc import Sequence

from services.console.service import ConsoleService
from services.console.settings import Settings
from services.runtime.service import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console until a signal stops it; return the exit code."""
    return run("console", Settings, ConsoleService, argv)


if __name__ == "__main__":
    sys.exit(main())
