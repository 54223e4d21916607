"""kernels: the native CPU code of the engine, its build and its binding.

`source/` is C++ behind the plain C interface of `source/api.h`; `instruction_sets.py` says which variant this
processor runs, `build.py` compiles it, `binding.py` is the only Python that calls it. Knows nothing of files, engines
or requests.

In `source/`, from the bottom: simd (sixteen lanes with AVX-512 or AVX2) → quantise, packed (weights) → linear,
attention → team (threads) → model, step_plan, forward (one step of a Llama model) → api.
"""
