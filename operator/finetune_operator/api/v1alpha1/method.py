"""What is trained and how the ranks share it: `spec.method` and `spec.strategy`."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from finetune_operator.api.schema import ABOVE_ZERO, ApiModel, Rule


class MethodType(StrEnum):
    """Which parameters are trained."""

    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


class Quantization(StrEnum):
    """How the frozen base is stored."""

    NONE = "none"
    NF4 = "nf4"
    INT8 = "int8"


class LoraSpec(ApiModel):
    """Low-rank adapters (arXiv:2106.09685)."""

    r: Annotated[int, Field(ge=1, le=1024)] = Field(16, description="Rank of the adapters.")
    alpha: Annotated[float, Field(ge=0, le=65536), ABOVE_ZERO] = Field(
        32, description="Scale; the adapter adds alpha / r times its product."
    )
    dropout: Annotated[float, Field(ge=0, le=0.9)] = Field(
        0.0, description="Dropout probability on the adapters' input."
    )
    target_modules: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=64)
    ] = Field(
        [], description="Module name endings to adapt; empty means every linear layer but the head."
    )


class MethodSpec(ApiModel):
    """Full fine-tuning, LoRA or QLoRA."""

    type: MethodType = Field(
        MethodType.LORA,
        description="full trains every parameter, lora trains adapters, qlora adapters over a "
        "quantized base.",
    )
    lora: LoraSpec | None = Field(
        None, description="Adapter settings of lora and qlora; absent means the defaults."
    )
    quantization: Quantization | None = Field(
        None, description="Storage of the frozen base; absent means nf4 for qlora, else none."
    )

    cel_rules = (
        Rule(
            "self.type != 'full' || !has(self.lora)",
            "has no effect with method type full; remove it or use type lora",
            field="lora",
        ),
        Rule(
            "!has(self.quantization) || (self.type == 'qlora') == (self.quantization != 'none')",
            "does not fit the method: qlora needs nf4 or int8, full and lora need none; remove it",
            field="quantization",
        ),
    )


class StrategyType(StrEnum):
    """How the ranks share one model."""

    AUTO = "auto"
    DDP = "ddp"
    FSDP = "fsdp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"


class Offload(StrEnum):
    """What leaves the GPU's memory."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    CPU = "cpu"
    NVME = "nvme"


class ActivationCheckpointing(StrEnum):
    """Which activations are computed again in the backward pass."""

    AUTO = "auto"
    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class StrategySpec(ApiModel):
    """The parallel strategy."""

    type: StrategyType = Field(
        StrategyType.AUTO,
        description="auto lets the planner choose; ddp replicates, fsdp shards (FSDP2), zero1 to "
        "zero3 are DeepSpeed's stages.",
    )
    offload: Offload = Field(
        Offload.NONE,
        description="Optimizer state (optimizer), parameters as well (cpu), or both on disk "
        "(nvme, zero3 only).",
    )
    activation_checkpointing: ActivationCheckpointing = Field(
        ActivationCheckpointing.AUTO,
        description="Recompute activations to save memory: none, selective, full, or auto.",
    )
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="GPUs that share each layer."
    )
    pipeline_parallel: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="Stages the layers are divided into."
    )

    cel_rules = (
        Rule(
            "self.offload != 'nvme' || self.type == 'zero3'",
            "needs strategy type zero3",
            field="offload",
        ),
        Rule(
            "self.offload == 'none' || self.type in ['fsdp', 'zero1', 'zero2', 'zero3', 'auto']",
            "has no effect with strategy type ddp; use fsdp or zero1 to zero3, or remove it",
            field="offload",
        ),
    )
