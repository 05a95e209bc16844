"""Read the settings of a run that generation depends on, from the README of its export.

`__main__` and `models` use them.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from finetune_trainer.chat.placement import Precision
from finetune_trainer.config import (
    CheckpointConfig,
    DataConfig,
    DatasetSource,
    JobRef,
    LoraSettings,
    MethodConfig,
    ModelConfig,
    OutputConfig,
    TrainConfig,
    TrainingConfig,
)
from finetune_trainer.export.model_card import settings_in

# The base of this method is loaded in the precision of the training, and not quantised.
_PLAIN = MethodConfig(type="lora", lora=LoraSettings())


@dataclass(frozen=True)
class RunSettings:
    """Settings of the run of an export.

    Attributes:
        method: Method with which the base was loaded.
        precision: Precision of its weights; None if the export does not record it.
        add_tokens: Tokens that the run has added.
    """

    method: MethodConfig = _PLAIN
    precision: Precision | None = None
    add_tokens: tuple[str, ...] = ()

    @classmethod
    def of_export(cls, folder: Path) -> Self:
        """Return the settings that an export records; defaults if its README is not ours."""
        card = folder / "README.md"
        known = (
            settings_in(card.read_text(encoding="utf-8", errors="replace"))
            if card.is_file()
            else {}
        )
        try:
            method = MethodConfig.model_validate(known["method"])
            chosen = {key: known["training"][key] for key in ("precision", "optimizer")}
            training = _training(**chosen)
            added = tuple(map(str, known["model"]["addTokens"]))
        except (KeyError, TypeError, ValidationError):
            return cls()
        precision = training.precision
        if training.optimizer == "adamw8bit":
            precision = "bf16"
        elif method.type == "full" and precision != "fp64":
            precision = "fp32"  # trained parameters are fp32
        return cls(method if method.type == "qlora" else _PLAIN, precision, added)

    def of(self, voice: str) -> Self:
        """Return the settings to load the base, or an exported model, which is not quantised."""
        return self if voice == "base" else replace(self, method=_PLAIN)

    def train_config(self, model: ModelConfig, precision: Precision) -> TrainConfig:
        """Return the configuration with which a run loads `model`; it names no other files."""
        return TrainConfig(
            job=JobRef(name="chat", uid=""),
            model=model,
            data=DataConfig(train=DatasetSource(path=""), cache_dir=""),
            method=self.method,
            training=_training(precision=precision),
            checkpoint=CheckpointConfig(dir="", enabled=False),
            output=OutputConfig(dir="", format="merged"),
            run_dir="",
            termination_path="",
        )


def _training(**settings: str) -> TrainingConfig:
    required = {"globalBatchSize": 1, "maxSteps": 1, "learningRate": 1.0}
    return TrainingConfig.model_validate({**required, **settings})
