"""Deployments for faults: one of single instances, and one where tokenizer, scheduler and executor have a double."""

import random
from collections.abc import AsyncIterator

import pytest

from tests.faults.deployment import ECHO, REPLICAS, Deployment


@pytest.fixture
async def single(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    """One instance of each service: what dies must come back."""
    async with Deployment(tmp_path_factory.mktemp("single"), ECHO) as deployment:
        yield deployment


@pytest.fixture
async def doubled(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    """Two of each that may be several: what is away is replaced, and comes back as a zombie."""
    async with Deployment(tmp_path_factory.mktemp("doubled"), ECHO, REPLICAS) as deployment:
        yield deployment


@pytest.fixture
def randomness() -> random.Random:
    """Moments differ from run to run."""
    return random.Random()
