"""Hide optional packages that a process does not use, because libraries would import them.

Called when a process starts, before any of these packages is imported. The effect lasts for
the life of the process, so a process that runs several jobs must not call it.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune_trainer.config import TrainConfig


def hide_unused(config: TrainConfig) -> None:
    """Hide the packages that this job does not need, as if they were not installed.

    peft imports bitsandbytes, which imports torch's compiler; transformers imports torchao, and
    DeepSpeed when it saves a model. Packages that are already imported stay.
    """
    for package in unused_packages(config):
        _hide(package)


def hide_torch() -> None:
    """Restrict transformers to tokenizers and settings; importing it takes a third of the time."""
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = (
        "1"  # transformers would warn that torch is missing
    )
    _hide("torch")


@contextmanager
def without_mark(package: str = "torch") -> Iterator[None]:
    """Remove the mark of a hidden package from `sys.modules` for the block.

    `datasets` imports each package that has an entry there.
    """
    is_hidden = package in sys.modules and sys.modules[package] is None
    if is_hidden:
        del sys.modules[package]
    try:
        yield
    finally:
        if is_hidden:
            _hide(package)


def unused_packages(config: TrainConfig) -> list[str]:
    """Return the optional packages that neither strategy nor weights of a job need."""
    unused = []
    if not config.strategy.type.startswith("zero"):
        unused.append("deepspeed")
    if not _may_be_quantised(config):
        unused.append("bitsandbytes")
        if not config.training.float8:
            unused.append("torchao")
    return unused


def _hide(package: str) -> None:
    # The documented way to make an import fail; the type of `sys.modules` does not include None.
    sys.modules.setdefault(package, None)  # type: ignore[arg-type]


def _may_be_quantised(config: TrainConfig) -> bool:
    """Whether weights are or may be quantised; weights of a hub are not downloaded yet."""
    if config.method.quantization != "none":
        return True
    try:
        settings = (Path(config.model.path) / "config.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return True  # loading the model reports why it cannot be read
    return '"quantization_config"' in settings
