import pytest

from engine_core.kernels import binding
from engine_core.kernels.binding import load_library
from engine_core.kernels.build import KernelsUnavailableError
from engine_core.kernels.instruction_sets import best_instruction_set, cpu_flags

AVX2 = {"avx2", "fma", "f16c"}
ICE_LAKE = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (ICE_LAKE, "avx512_vnni"),
        (ICE_LAKE - {"avx512_vnni"}, "avx2"),
        (AVX2, "avx2"),
        (AVX2 - {"fma"}, None),
        (set(), None),
    ],
)
def test_the_fastest_variant_that_the_processor_has_is_chosen(flags, name):
    variant = best_instruction_set(frozenset(flags))
    assert (variant and variant.name) == name


def test_flags_are_read_from_the_first_processor(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor : 0\nflags\t\t: fpu avx2 fma\nprocessor : 1\nflags : sse\n")
    assert cpu_flags(path) == {"fpu", "avx2", "fma"}
    assert cpu_flags(tmp_path / "missing") == frozenset()


def test_a_processor_without_them_gets_a_clear_refusal(monkeypatch):
    monkeypatch.setattr(binding, "cpu_flags", lambda: frozenset({"sse2"}))
    with pytest.raises(KernelsUnavailableError, match="use the reference engine"):
        load_library()
    with pytest.raises(KernelsUnavailableError, match="none of the instruction sets"):
        load_library(instruction_set="avx2")
