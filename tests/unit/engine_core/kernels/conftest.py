"""The kernels of every instruction set that this processor has, as functions over numpy arrays."""

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_core.kernels.binding import CacheKind, load_library
from engine_core.kernels.instruction_sets import INSTRUCTION_SETS, cpu_flags

Floats = NDArray[np.float32]
AVAILABLE = [name for name, variant in INSTRUCTION_SETS.items() if variant.cpu_flags <= cpu_flags()]
BLOCK = 32


@dataclass(frozen=True)
class Sequence:
    """Queries, keys and values of one sequence: [tokens, heads, head_dim]."""

    queries: Floats
    keys: Floats
    values: Floats


@dataclass(frozen=True)
class Kernels:
    library: ctypes.CDLL

    def quantise(self, x: Floats) -> tuple[NDArray[np.int8], Floats]:
        """x [m, k] → int8 [m, k] and scales [m, k / 32]."""
        m, k = x.shape
        q, scale = np.empty((m, k), np.int8), np.empty((m, k // BLOCK), np.float32)
        x = np.ascontiguousarray(x)
        self.library.nj_quantise(m, k, x.ctypes.data, q.ctypes.data, scale.ctypes.data)
        return q, scale

    def multiply(self, file_type: int, tensor: NDArray[np.uint8], columns: int, x: Floats, threads: int = 1) -> Floats:
        """x [m, k] times the transpose of a tensor of `columns` rows → [m, columns]."""
        m, k = x.shape
        x, y = np.ascontiguousarray(x), np.empty((m, columns), np.float32)
        status = self.library.nj_multiply(
            file_type, m, columns, k, tensor.ctypes.data, x.ctypes.data, y.ctypes.data, threads
        )
        assert status == 0
        return y

    def attend(
        self,
        kind: CacheKind,
        sequence: Sequence,
        table: list[int],
        *,
        block_size: int = 16,
        first: int = 0,
        group: int = 1,
    ) -> Floats:
        """Attend from position `first` on, `group` positions at a time → [tokens, heads, head_dim]; zero before."""
        tokens, heads, head_dim = sequence.queries.shape
        out, blocks = np.zeros_like(sequence.queries), np.array(table, np.int32)
        arrays = [np.ascontiguousarray(a) for a in (sequence.queries, sequence.keys, sequence.values)]
        status = self.library.nj_attend(
            *(kind, heads, sequence.keys.shape[1], head_dim, block_size, tokens, first, group),
            *(blocks.ctypes.data, int(blocks.max()) + 1),
            *(*(array.ctypes.data for array in arrays), out.ctypes.data),
        )
        assert status == 0
        return out

    def elementwise(self, name: str, x: Floats) -> Floats:
        """`nj_exp2` or `nj_silu` of x, whose length is a multiple of 16."""
        y = np.empty_like(x)
        getattr(self.library, name)(len(x), x.ctypes.data, y.ctypes.data)
        return y


def kernels_of(instruction_set: str) -> Kernels:
    return Kernels(load_library(instruction_set=instruction_set))


@pytest.fixture(scope="session", params=AVAILABLE or [pytest.param(None, marks=pytest.mark.skip("no AVX2"))])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_of(request.param)


@pytest.fixture(scope="session")
def all_kernels() -> list[Kernels]:
    """Every variant that runs here."""
    return [kernels_of(name) for name in AVAILABLE]


@pytest.fixture(scope="session")
def make_sequence() -> type[Sequence]:
    return Sequence
