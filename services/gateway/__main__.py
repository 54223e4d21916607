"""`python -m services.gateway`: run one gateway."""

import sys
from collections.abc import Sequence

from services.gateway.service import GatewayService
from services.gateway.settings import Settings
from services.runtime.service import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gateway until a signal stops it; return the exit code."""
    return run("gateway", Settings, GatewayService, argv)


if __name__ == "__main__":
    sys.exit(main())
