"""`ChatConfig`: the models and options of `ftctl chat`."""

from typing import Annotated, Literal

from pydantic import Field

from finetune_trainer.config.contract_model import ContractModel
from finetune_trainer.config.inputs import ModelConfig


class ChatConfig(ContractModel):
    """Models that respond, and how; one JSON file for `python -m finetune_trainer.chat`."""

    trained: str = Field(description="Folder of an exported adapter or model.")
    base: ModelConfig | None = Field(
        None, description="Base model; None if only an exported whole model responds."
    )
    prompts: tuple[str, ...] = Field(
        (), description="Questions; without any they are read from standard input."
    )
    only: Literal["base", "trained"] | None = None
    max_new_tokens: Annotated[int, Field(ge=1)] = 512
    temperature: Annotated[float, Field(ge=0)] = Field(
        0.0, description="0 takes the most probable token."
    )
    system: str | None = Field(None, description="Text of the system turn.")
    parent_pid: int = Field(description="Process of ftctl; this process ends with it.")
