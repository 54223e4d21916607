"""The executor's settings."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from services.runtime.settings import BUILTIN_BYTES, CommonSettings, ModelSettings, Section

ENGINES = ("auto", "native", "reference", "torch", "echo")


class ExecutorSettings(Section):
    """Which engine runs the model, and how much of the machine it takes."""

    engine: str = Field(
        default="auto",
        description="native (own CPU kernels), reference (plain torch in float32), torch (any device and number "
        "type), echo (no model), or auto: native where it runs, else reference",
    )
    replicas: int = Field(default=1, ge=1, le=64, description="instances that the supervisor starts")
    num_threads: int = Field(default=0, ge=0, le=1024, description="threads that compute; 0: one per core")
    kv_cache_bytes: int = Field(default=0, ge=0, description="memory for KV blocks, in bytes; 0: chosen by the engine")
    host_kv_cache_bytes: int = Field(
        default=0,
        ge=0,
        description="host memory for KV blocks that are evicted from the pool, in bytes: they are loaded again instead "
        "of being computed; 0: none",
    )
    num_blocks: int = Field(default=0, ge=0, description="KV blocks; 0: as many as kv_cache_bytes holds")
    num_host_blocks: int = Field(
        default=0, ge=0, description="KV blocks in host memory; 0: as many as host_kv_cache_bytes holds"
    )
    block_size: int = Field(default=16, ge=1, le=1024, description="tokens in one KV block")
    quantise: Literal["q8_0", "q4_0", "q4_1"] | None = Field(
        default=None,
        description="q8_0, q4_0 or q4_1: bring matrices of other types, such as floats, into blocks of 32 values when "
        "the model is loaded, as the native engine needs them; null: as they are in the file",
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = Field(
        default="auto",
        description="number type of keys and values: float32, bfloat16, float16, int8 (native only); auto: the "
        "engine's own",
    )
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$",
        description="where the torch engine computes: auto, cpu, cuda or cuda:NUMBER (CUDA: untested); the others run "
        "on the CPU",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="number type that the torch engine computes in: float32, bfloat16, float16; auto: bfloat16",
    )
    attention: Literal["auto", "tiled", "sdpa"] = Field(
        default="auto", description="attention kernel of the torch engine: tiled, sdpa (torch's own); auto: sdpa"
    )
    kernel_cache_dir: Path | None = Field(
        default=None,
        description="where the native kernels are kept when they had to be compiled at first use; null: "
        "~/.cache/natterjack/kernels",
    )
    append_forced_tokens: bool = Field(
        default=True,
        description="append tokens that a grammar forces without a step of their own; false: sample them as well",
    )
    step_time_s: float = Field(default=0.0, ge=0, description="engine echo: how long each step takes")
    vocab_size: int = Field(default=257, ge=2, description="engine echo: its tokens are below this")

    @field_validator("engine")
    @classmethod
    def _check_engine(cls, engine: str) -> str:
        if engine not in ENGINES:
            raise ValueError(f"the engines are {', '.join(ENGINES)}")
        return engine


class Settings(CommonSettings):
    """Everything that the executor reads."""

    executor: ExecutorSettings = ExecutorSettings()

    @model_validator(mode="after")
    def _check_model(self) -> "Settings":
        check_engine_has_model(self.model, self.executor)
        return self


def check_engine_has_model(model: ModelSettings, executor: ExecutorSettings) -> None:
    """Raise ValueError when the engine needs weights and the model source has none."""
    if model.source == BUILTIN_BYTES and executor.engine != "echo":
        raise ValueError(
            f"model.source {BUILTIN_BYTES!r} has no weights, so executor.engine must be 'echo', "
            f"not {executor.engine!r}; name a model file, or set executor.engine=echo"
        )
