"""Background tasks that must not fail unnoticed: the first failure cancels the block and comes out of it.

Like `asyncio.TaskGroup`, but the tasks end with the block, and neither a failure nor the block's own
exception is wrapped in a group.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Minders:
    """Tasks that live as long as the `async with` block."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._parent: asyncio.Task[Any] | None = None
        self._failure: BaseException | None = None
        self._has_cancelled = False
        self._is_closing = False

    async def __aenter__(self) -> "Minders":
        self._parent = asyncio.current_task()
        return self

    def create_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or task.exception() is None or self._failure is not None:
            return
        self._failure = task.exception()
        if self._parent is not None and not self._is_closing:
            self._has_cancelled = True
            self._parent.cancel()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        is_ours = isinstance(error, asyncio.CancelledError) and self._has_cancelled
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        except asyncio.CancelledError:
            is_ours = self._has_cancelled
            if not is_ours:
                raise
        if self._has_cancelled and self._parent is not None:
            is_ours = self._parent.uncancel() == 0 and is_ours
        if self._failure is not None and (is_ours or error is None):
            raise self._failure from None
