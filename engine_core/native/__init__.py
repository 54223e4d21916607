"""native: the fast CPU engine. Quantised weights as they are in the file, int8 activations, one native call per step.

`loading.py` turns a file into a model in native memory, `step_arrays.py` rows into arrays, `engine.py` arrays into
tokens.
"""

from engine_core.native.loading import check, load

__all__ = ["check", "load"]
