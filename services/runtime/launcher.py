"""What a child process runs before its own program, so that it can never outlive its parent.

Run as a script, isolated and with the standard library only, for a quick start: it asks the kernel for
SIGKILL at the parent's death, checks that the parent has not died already, lowers its priority and becomes
the program. Knows nothing of what it starts. The parent puts it into a session of its own, so that the
terminal's Ctrl-C reaches only the parent, which then stops its children in order.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def wrap(argv: Sequence[str], *, nice: int = 0) -> list[str]:
    """Return the argument list that starts `argv` through this script, as a child of the calling process."""
    ours = [sys.executable, "-I", "-S", __file__, "--nice", str(nice), "--parent", str(os.getpid()), "--"]
    return [*ours, *argv]


def main(argv: Sequence[str]) -> None:
    """Become the program after `--`; exit 1 when the parent is gone, 127 when the program cannot be run."""
    _, nice, _, parent, _, *program = argv
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit(1)
    if int(nice):
        os.nice(int(nice))
    try:
        os.execvp(program[0], program)  # noqa: S606 (an argument list, no shell)
    except OSError as error:
        print(f"cannot run {program[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
