"""Background tasks whose failure must come out of the block."""

import asyncio

import pytest

from services.supervisor.minders import Minders


class Broken(Exception):
    pass


async def fail_after(seconds: float) -> None:
    await asyncio.sleep(seconds)
    raise Broken


async def test_a_failure_cancels_the_block_and_comes_out_unwrapped():
    with pytest.raises(Broken):
        async with Minders() as minders:
            minders.create_task(fail_after(0.01))
            await asyncio.sleep(60)
    await asyncio.sleep(0)  # the cancellation has been used up


async def test_the_blocks_own_exception_comes_out_unwrapped():
    with pytest.raises(ValueError, match="own"):
        async with Minders() as minders:
            minders.create_task(asyncio.sleep(60))
            raise ValueError("own")


async def test_tasks_end_with_the_block():
    async with Minders() as minders:
        task = minders.create_task(asyncio.sleep(60))
    assert task.cancelled()


async def test_a_failure_at_the_very_end_of_the_block_comes_out():
    with pytest.raises(Broken):
        async with Minders() as minders:
            task = minders.create_task(fail_after(0.0))
            while not task.done():
                await asyncio.sleep(0)


async def test_a_cancellation_from_outside_stays_a_cancellation():
    async def body() -> None:
        async with Minders() as minders:
            minders.create_task(fail_after(0.05))
            await asyncio.sleep(60)

    task = asyncio.create_task(body())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_failure_while_closing_after_the_blocks_own_exception_is_not_preferred():
    async def stubborn() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise Broken

    with pytest.raises(ValueError, match="own"):
        async with Minders() as minders:
            minders.create_task(stubborn())
            await asyncio.sleep(0)
            raise ValueError("own")
