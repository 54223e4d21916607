"""Faults injected into real processes under load: every stream must say what it says undisturbed, once.

`python -m tests.faults` runs the long form; `test_faults.py` a short one with the other tests.
"""
