"""How long to wait before a restart, and when to give up. Plain arithmetic; the clock is an argument."""

from collections import deque

from services.supervisor.settings import RestartSettings


class Backoff:
    """Counts one instance's restarts within a sliding window."""

    def __init__(self, settings: RestartSettings) -> None:
        self._settings = settings
        self._restarts: deque[float] = deque()

    def next_pause_s(self, now_s: float) -> float | None:
        """Return the pause before the restart that is due at `now_s`, None when there were too many."""
        while self._restarts and now_s - self._restarts[0] > self._settings.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self._settings.limit:
            return None
        pause_s = min(self._settings.max_s, self._settings.initial_s * 2.0 ** len(self._restarts))
        self._restarts.append(now_s)
        return pause_s

    @property
    def num_recent(self) -> int:
        """Restarts within the window."""
        return len(self._restarts)
