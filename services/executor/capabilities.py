"""From settings to what an engine is built from, and what this machine would make of them. Loads no model, no bus."""

from pathlib import Path

from engine_core.engine import EngineConfig, check_engine
from engine_core.errors import ModelError
from engine_core.limits import usable_cores
from services.executor.settings import ExecutorSettings
from services.runtime.model_source import ModelSourceError, cached
from services.runtime.settings import ModelSettings


def engine_config(model: ModelSettings, executor: ExecutorSettings, model_path: Path | None) -> EngineConfig:
    """Return what the engine is built from."""
    return EngineConfig(
        model_path=model_path,
        block_size=executor.block_size,
        num_blocks=executor.num_blocks,
        kv_cache_bytes=executor.kv_cache_bytes,
        host_kv_cache_bytes=executor.host_kv_cache_bytes,
        num_host_blocks=executor.num_host_blocks,
        max_model_len=model.max_model_len,
        num_threads=executor.num_threads,
        step_time_s=executor.step_time_s,
        vocab_size=executor.vocab_size,
        quantise=executor.quantise,
        device=executor.device,
        dtype=executor.dtype,
        kv_dtype=executor.kv_dtype,
        attention=executor.attention,
        kernel_cache_dir=executor.kernel_cache_dir,
    )


def check_machine(model: ModelSettings, executor: ExecutorSettings) -> list[str]:
    """Return what an executor on this machine would run, and what is worth knowing about it, in sentences.

    The model is looked at when it is here already; nothing is downloaded. Raises ValueError with what an executor would
    refuse, and what to do.
    """
    try:
        path = None if executor.engine == "echo" else cached(model)
        engine = check_engine(executor.engine, engine_config(model, executor, path))
    except (ModelError, ModelSourceError) as error:
        raise ValueError(str(error)) from None
    told = [f"An executor on this machine would run {engine}."]
    if path is None and executor.engine != "echo":
        told.append("The model is not downloaded yet, so whether this engine can run it was not checked.")
    if executor.num_threads > (cores := usable_cores()):
        told.append(f"executor.num_threads is {executor.num_threads}, but this machine has {cores} cores for it.")
    return told
