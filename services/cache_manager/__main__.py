"""`python -m services.cache_manager`: run one cache_manager."""

import sys
from collections.abc import Sequence

from services.cache_manager.service import CacheManagerService
from services.cache_manager.settings import Settings
from services.runtime.service import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal; returns the exit code."""
    return run("cache_manager", Settings, CacheManagerService, argv)


if __name__ == "__main__":
    sys.exit(main())
