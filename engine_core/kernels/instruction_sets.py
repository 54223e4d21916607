"""Which variant of the kernels a processor can run. Knows flags of processors and of compilers, nothing else."""

from dataclasses import dataclass
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One variant: what the processor must have (names of /proc/cpuinfo) and how it is compiled."""

    name: str
    cpu_flags: frozenset[str]
    compiler_flags: tuple[str, ...]


AVX2_CPU_FLAGS = frozenset({"avx2", "fma", "f16c"})
AVX2_COMPILER_FLAGS = ("-mavx2", "-mfma", "-mf16c")

INSTRUCTION_SETS: dict[str, InstructionSet] = {
    "avx512_vnni": InstructionSet(
        "avx512_vnni",
        AVX2_CPU_FLAGS | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
        (
            *AVX2_COMPILER_FLAGS,
            *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"),
            "-mprefer-vector-width=512",
        ),
    ),
    "avx2": InstructionSet("avx2", AVX2_CPU_FLAGS, AVX2_COMPILER_FLAGS),
}
"""Name → variant, the fastest first."""


def cpu_flags(cpu_info: Path = CPU_INFO) -> frozenset[str]:
    """Flags of the first processor; none where the system does not tell (not Linux, not x86)."""
    try:
        lines = cpu_info.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())


def best_instruction_set(flags: frozenset[str]) -> InstructionSet | None:
    """The fastest variant that a processor with these flags runs; None if it runs none."""
    return next((variant for variant in INSTRUCTION_SETS.values() if variant.cpu_flags <= flags), None)
