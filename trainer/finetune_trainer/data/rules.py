"""Versions of the rules by which rows become tokens.

Each entry of the token cache is named by its version. A new run uses the current rules. A run that
has a checkpoint keeps the rules that its tokens come from, because a step number means the same
data only with the same tokens (`run_data`).
"""

from enum import IntEnum


class Rules(IntEnum):
    """A version of the rules; increase the last one if the same rows would give other arrays."""

    RELEASE_0_1_0 = 5
    CURRENT = 6
