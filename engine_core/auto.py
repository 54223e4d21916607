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
    if config.device not in ("auto", "cpu") or (config.dtype, config.attention) != ("auto", "auto"):
        from engine_core.reference import load_torch

        return load_torch(config, progress)
    from engine_core.native import load as load_native

    try:
        return load_native(config, progress)
    except (KernelsUnavailableError, UnsupportedModelError) as reason:
        log.warning("running the reference engine, which is several times slower: %s", reason)
    from engine_core.reference import load as load_reference  # torch takes seconds to import

    return load_reference(config, progress)
