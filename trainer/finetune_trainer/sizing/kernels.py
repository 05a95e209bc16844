"""Decide which attention kernels a GPU supports.

`model.kernels` chooses by it, and `fit` counts the scores that a kernel would avoid.
"""

from collections.abc import Iterable
from enum import StrEnum

_FIRST_CAPABILITY = (8, 0)
"""Compute capability (Ampere) that flash attention and Triton need."""


class Kernel(StrEnum):
    """Implementations of attention."""

    VARLEN = "varlen"
    FLEX = "flex"
    MODEL = "model"


def gpu_fault(kernel: Kernel, precision: str, capability: tuple[int, int]) -> str | None:
    """Return why a kernel cannot run on a GPU in a precision, if it cannot."""
    if kernel is Kernel.MODEL:
        return None
    if kernel is Kernel.VARLEN and precision not in ("bf16", "fp16"):
        return f"flash attention computes in bf16 and fp16, not in {precision}"
    if kernel is Kernel.FLEX and precision == "fp64":
        return "it does not compute in fp64"
    if capability < _FIRST_CAPABILITY:
        return "this GPU has compute capability {}.{}, it needs 8.0".format(*capability)
    return None


def avoids_scores(
    kernels: Iterable[str], attention: str, precision: str, capability: tuple[int, int]
) -> bool:
    """Whether a kernel computes attention without storing scores.

    Args:
        kernels: Names of the kernels that support the model.
        attention: `spec.training.attention`.
        precision: Dtype of queries, keys and values.
        capability: Compute capability of the GPU.
    """
    if attention == Kernel.MODEL:
        return False
    return any(gpu_fault(Kernel(one), precision, capability) is None for one in kernels)
