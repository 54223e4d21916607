"""`python -m services.tokenizer`: run one tokenizer."""

import sys
from collections.abc import Sequence

from services.runtime.service import run
from services.tokenizer.service import TokenizerService
from services.tokenizer.settings import Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal; returns the exit code."""
    return run("tokenizer", Settings, TokenizerService, argv)


if __name__ == "__main__":
    sys.exit(main())
