"""Errors of the engine: what a person must know when a model cannot be run.

ModelError                 the model cannot be loaded
├── ModelFileError         missing, truncated or corrupt file
├── UnsupportedModelError  an architecture or a tensor type that no engine here runs
└── OutOfMemoryError       the KV pool or the weights do not fit
"""


class ModelError(Exception):
    """The model cannot be loaded; the message says why and what to do."""


class ModelFileError(ModelError):
    """The file is missing, truncated or corrupt."""


class UnsupportedModelError(ModelError):
    """The file is fine, but its architecture or a tensor type is not supported."""


class OutOfMemoryError(ModelError):
    """Weights or KV pool do not fit into the memory allowed."""
