"""Trained parameters and parallelism: `spec.method` and `spec.strategy`."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from finetune_operator.api.schema import ABOVE_ZERO, ApiModel, Rule
from finetune_operator.api.v1alpha1.inputs import Source


class MethodType(StrEnum):
    """Set of trained parameters."""

    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


class Quantization(StrEnum):
    """Storage format of the frozen base model."""

    NONE = "none"
    NF4 = "nf4"
    INT8 = "int8"


_NAME_ENDING = r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$"  # not a pattern


class LoraSpec(ApiModel):
    """Low-rank adapters (arXiv:2106.09685)."""

    r: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank of the adapters."""
    alpha: Annotated[float, Field(ge=0, le=65536), ABOVE_ZERO] = 32
    """Scale: the adapter adds alpha / r times its product."""
    dropout: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    """Dropout probability on the input of the adapters."""
    target_modules: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256, pattern=_NAME_ENDING)]],
        Field(max_length=64),
    ] = Field([])
    """Endings of module names to adapt, such as q_proj or mlp.down_proj; patterns are not
    supported. Empty means every linear layer except the head and the routers of experts."""
    rslora: bool = False
    """Scale by alpha / sqrt(r) instead of alpha / r, so that high ranks do not learn slowly
    (arXiv:2312.03732)."""
    dora: bool = False
    """Train the magnitude of each weight separately from its direction (arXiv:2402.09353); slower,
    often better at low ranks."""
    start_from: Source | None = None
    """URI of the folder of an adapter from whose weights training starts; absent starts from an
    adapter without effect."""


class MethodSpec(ApiModel):
    """Full fine-tuning, LoRA or QLoRA."""

    type: MethodType = MethodType.LORA
    """full trains every parameter, lora trains adapters, qlora trains adapters over a quantized
    base."""
    lora: LoraSpec | None = None
    """Adapter settings of lora and qlora; absent means the defaults."""
    quantization: Quantization | None = None
    """Storage of the frozen base model: nf4 is 4-bit with double quantisation (arXiv:2305.14314),
    int8 is 8-bit; absent means nf4 for qlora, else none."""
    freeze: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=512)]], Field(max_length=64)
    ] = Field([])
    """Shell patterns of the names of parameters that full fine-tuning does not train, such as
    model.embed_tokens.*."""

    cel_rules = (
        Rule(
            "self.type != 'full' || !has(self.lora)",
            "has no effect with method type full; remove it or use type lora",
            field="lora",
        ),
        Rule(
            "!has(self.quantization) || (self.type == 'qlora') == (self.quantization != 'none')",
            "does not match the method type: qlora requires nf4 or int8, full and lora none; "
            "remove it",
            field="quantization",
        ),
        Rule(
            "!has(self.freeze) || self.type == 'full' || size(self.freeze) == 0",
            "has no effect with adapters, which freeze the whole base; remove it or use type full",
            field="freeze",
        ),
    )


class StrategyType(StrEnum):
    """Distribution of the model over the ranks."""

    AUTO = "auto"
    DDP = "ddp"
    FSDP = "fsdp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"


class Offload(StrEnum):
    """State that is offloaded from GPU memory."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    CPU = "cpu"
    NVME = "nvme"


class ActivationCheckpointing(StrEnum):
    """Activations that are recomputed in the backward pass."""

    AUTO = "auto"
    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


_ABSOLUTE = Rule(
    "self.startsWith('/')",
    "must be an absolute path, because each rank starts in a folder of its own; start it with /",
)


class StrategySpec(ApiModel):
    """The parallel strategy."""

    type: StrategyType = StrategyType.AUTO
    """auto chooses ddp or fsdp by the memory of the GPUs; ddp replicates, fsdp shards (FSDP2),
    zero1 to zero3 are DeepSpeed's stages."""
    offload: Offload = Offload.NONE
    """State to offload: optimizer state (optimizer), also parameters (cpu), or both to disk (nvme,
    zero3 only). zero1 and zero2 support optimizer, fsdp supports cpu, zero3 supports all."""
    nvme_path: Annotated[str, Field(min_length=1, max_length=4096), _ABSOLUTE] | None = None
    """Folder on a fast disk of each node for the files of offload nvme."""
    replicas: Annotated[int, Field(ge=1, le=4096)] = 1
    """HSDP, fsdp only: number of groups of ranks. Each group holds the whole model and shards it
    within the group; usually the number of nodes."""
    reshard_after_forward: bool | None = None
    """fsdp only: free the gathered parameters of a layer between forward and backward; absent
    decides by free memory."""
    reduce_each_micro_batch: bool | None = None
    """fsdp only: reduce gradients after each micro-batch, which takes more time but saves the
    memory of whole gradients, 4 bytes per parameter; absent does so if they do not fit."""
    prefetch: Annotated[int, Field(ge=0, le=8)] | None = None
    """fsdp only: number of layers to gather ahead of the current layer; 0 leaves it to torch,
    absent chooses."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.AUTO
    """Recompute activations to save memory: none, selective (retains activations that are slow to
    compute), full, or auto, which chooses by the memory of the GPUs."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of GPUs that share each layer."""
    pipeline_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of stages into which the layers are divided."""

    cel_rules = (
        Rule(
            "self.offload == 'none' || !(self.type in ['ddp', 'auto'])",
            "has no effect with strategy type ddp, which auto may choose; use type fsdp or zero1 "
            "to zero3, or remove it",
            field="offload",
        ),
        Rule(
            "self.offload != 'nvme' || self.type in ['zero3', 'ddp', 'auto']",
            "requires strategy type zero3; use that type, or another offload",
            field="offload",
        ),
        Rule(
            "self.offload != 'cpu' || !(self.type in ['zero1', 'zero2'])",
            "has no effect with zero1 and zero2, which do not shard parameters; use offload "
            "optimizer, or type zero3",
            field="offload",
        ),
        Rule(
            "self.offload != 'optimizer' || self.type != 'fsdp'",
            "is not supported with fsdp, which offloads parameters and optimizer together; use "
            "offload cpu",
            field="offload",
        ),
        Rule(
            "self.offload != 'nvme' || has(self.nvmePath)",
            "requires nvmePath, the folder for its files; set nvmePath",
            field="offload",
        ),
        Rule(
            "!has(self.nvmePath) || self.offload == 'nvme'",
            "has no effect without offload nvme; remove it",
            field="nvmePath",
        ),
        Rule(
            "self.replicas == 1 || self.type == 'fsdp'",
            "has an effect only with strategy type fsdp; remove it",
            field="replicas",
        ),
        Rule(
            "!has(self.reshardAfterForward) || self.type == 'fsdp'",
            "has an effect only with strategy type fsdp; remove it",
            field="reshardAfterForward",
        ),
        Rule(
            "!has(self.reduceEachMicroBatch) || self.type == 'fsdp'",
            "has an effect only with strategy type fsdp; remove it",
            field="reduceEachMicroBatch",
        ),
        Rule(
            "!has(self.prefetch) || self.type == 'fsdp'",
            "has an effect only with strategy type fsdp; remove it",
            field="prefetch",
        ),
    )
