"""Chooses the engine: the native one where its kernels can run this model on this machine, else the reference.

Who asks for an accelerator, or for a number type or attention kernel by name, gets the torch engine; nobody else does.
The choice is visible: a warning says why, and the engine's name is in the registry and in `natterjack status`.
"""

import logging

from engine_core.engine import Engine, EngineConfig, Progress
from engine_core.errors import UnsupportedModelError
from engine_core.kernels.build import KernelsUnavailableError

log = logging.getLogger(__name__)


def load(config: EngineConfig, progress: Progress) -> Engine:
    """Load the best engine that can run the model; raises ModelError when none can."""
    if needs_torch(config):
        from engine_core.reference import load_torch

        return load_torch(config, progress)
    from engine_core.native import load as load_native

    try:
        return load_native(config, progress)
    except (KernelsUnavailableError, UnsupportedModelError) as reason:
        log.warning("running the reference engine, which is several times slower: %s", reason)
    from engine_core.reference import load as load_reference  # torch takes seconds to import

    return load_reference(config, progress)


def check(config: EngineConfig) -> str:
    """What `load` would choose, for a person. Raises ModelError when it would find nothing that can run."""
    if needs_torch(config):
        from engine_core.reference import check_torch

        return check_torch(config)
    from engine_core.native import check as check_native

    try:
        return check_native(config)
    except (KernelsUnavailableError, UnsupportedModelError) as reason:
        from engine_core.reference import check as check_reference

        return f"{check_reference(config)}, which is several times slower than the native one: {reason}"


def needs_torch(config: EngineConfig) -> bool:
    """Tell whether something is asked for that only the torch engine has."""
    return config.device not in ("auto", "cpu") or (config.dtype, config.attention) != ("auto", "auto")
