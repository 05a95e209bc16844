"""Packages that a process has no use for, hidden from libraries that import whatever they find.

Called by a rank and by the preview before they import any of them. It holds for the whole process,
so nothing that runs several jobs may call it.
"""

import os
import sys
from pathlib import Path

from finetune_trainer.config import TrainConfig


def hide_unused(config: TrainConfig) -> None:
    """Hide the packages that this job does not need, as if they were not installed.

    peft imports bitsandbytes, which imports torch's compiler; transformers imports torchao, and
    DeepSpeed when it saves a model. What is imported already stays.
    """
    for package in unused_packages(config):
        _hide(package)


def hide_torch() -> None:
    """Let transformers have tokenizers and settings alone, in a third of the time."""
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # it would warn of what is hidden
    _hide("torch")


def unused_packages(config: TrainConfig) -> list[str]:
    """Return the optional packages that neither strategy nor weights of a job ask for."""
    unused = []
    if not config.strategy.type.startswith("zero"):
        unused.append("deepspeed")
    if not _may_be_quantised(config):
        unused.append("bitsandbytes")
        if not config.training.float8:
            unused.append("torchao")
    return unused


def _hide(package: str) -> None:
    # Python's own way to say that there is no such module; only the type knows nothing of it.
    sys.modules.setdefault(package, None)  # type: ignore[arg-type]


def _may_be_quantised(config: TrainConfig) -> bool:
    """Say whether weights are quantised, or may be, as those of a hub are not known yet."""
    if config.method.quantization != "none":
        return True
    try:
        settings = (Path(config.model.path) / "config.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return True  # loading the model reports why it cannot be read
    return '"quantization_config"' in settings
