"""The trainer's side of `ftctl init` within the process of a test."""

from collections.abc import Mapping
from typing import Any

from finetune_operator.cli.trainer_process import BASE
from finetune_operator.errors import FineTuneError
from finetune_trainer.config import ContractModel, InspectionRequest, TrainConfig
from finetune_trainer.errors import TrainerError
from finetune_trainer.inspection import inspect
from finetune_trainer.memory.read_base import read_base_of
from finetune_trainer.preview import preview


def ask_here(
    module: str, request: ContractModel, environ: Mapping[str, str], *arguments: str
) -> list[dict[str, Any]]:
    """Return the objects that the module of the trainer would print, like `trainer_lines`."""
    try:
        if isinstance(request, InspectionRequest):
            return [inspect(request).model_dump(mode="json", by_alias=True)]
        assert isinstance(request, TrainConfig), module
        if module == BASE:
            return [read_base_of(request).model_dump(mode="json")]
        return list(preview(request, int(arguments[1])))
    except TrainerError as error:
        raise FineTuneError(str(error)) from error
