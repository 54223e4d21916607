"""`natterjack`, and `python -m services.cli`."""

import os
import signal


def main() -> None:
    """Run the command line; until a command handles Ctrl-C itself, it ends the process at once and quietly."""
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    from services.cli.app import app

    app()


if __name__ == "__main__":
    main()
