"""The memory that a model and a training step need, as arithmetic on shapes.

Needs pydantic alone, so that the operator can use it. `memory.read_base` reads a model; all other
code computes from its `BaseShape`.
"""
