"""What rows are measured on: DEVICE; prints JSON.

A program of its own, so that whoever starts the rows holds nothing of the device's memory.
"""

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from measured import machine

PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "torchao",
    "liger-kernel",
    "trl",
    "triton",
)
FLASH_3_AND_4 = ("flash_attn_interface", "flash_attn.cute")


def card(device: str) -> dict[str, Any]:
    """Return the device's name, its memory and what software runs on it."""
    found: dict[str, Any] = {"name": "CPU", "memory_gib": None}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found = {"name": properties.name, "memory_gib": properties.total_memory / 2**30}
    return {
        **found,
        **machine(),
        "versions": dict(filter(lambda one: one[1], ((x, _version(x)) for x in PACKAGES))),
        "flash_3_and_4": [name for name in FLASH_3_AND_4 if _is_there(name)],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it
        return False


if __name__ == "__main__":
    print(json.dumps(card(sys.argv[1])))
