"""What is trained and how the ranks share it: `spec.method` and `spec.strategy`."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from finetune_operator.api.schema import ABOVE_ZERO, ApiModel, Rule
from finetune_operator.api.v1alpha1.inputs import Source


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


_NAME_ENDING = r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$"  # of a module; a pattern would match none


class LoraSpec(ApiModel):
    """Low-rank adapters (arXiv:2106.09685)."""

    r: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank of the adapters."""
    alpha: Annotated[float, Field(ge=0, le=65536), ABOVE_ZERO] = 32
    """Scale; the adapter adds alpha / r times its product."""
    dropout: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    """Dropout probability on the adapters' input."""
    target_modules: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256, pattern=_NAME_ENDING)]],
        Field(max_length=64),
    ] = Field([])
    """Module name endings to adapt, such as q_proj or mlp.down_proj, no patterns; empty means every
    linear layer but the head and the routers of experts."""
    rslora: bool = False
    """Scale by alpha / sqrt(r) instead of alpha / r, which keeps high ranks from learning slowly
    (arXiv:2312.03732)."""
    dora: bool = False
    """Train each weight's magnitude apart from its direction (arXiv:2402.09353); slower, often
    better at low ranks."""
    start_from: Source | None = None
    """URI of the folder of an adapter whose weights training begins with; absent begins with an
    adapter that changes nothing."""


class MethodSpec(ApiModel):
    """Full fine-tuning, LoRA or QLoRA."""

    type: MethodType = MethodType.LORA
    """full trains every parameter, lora trains adapters, qlora adapters over a quantized base."""
    lora: LoraSpec | None = None
    """Adapter settings of lora and qlora; absent means the defaults."""
    quantization: Quantization | None = None
    """Storage of the frozen base: nf4 is 4-bit with double quantisation (arXiv:2305.14314), int8
    8-bit; absent means nf4 for qlora, else none."""
    freeze: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=512)]], Field(max_length=64)
    ] = Field([])
    """Shell patterns of parameter names that full fine-tuning leaves as they are, such as
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


_ABSOLUTE = Rule(
    "self.startsWith('/')",
    "must be an absolute path, because each rank starts in a folder of its own; start it with /",
)


class StrategySpec(ApiModel):
    """The parallel strategy."""

    type: StrategyType = StrategyType.AUTO
    """auto lets the planner choose; ddp replicates, fsdp shards (FSDP2), zero1 to zero3 are
    DeepSpeed's stages."""
    offload: Offload = Offload.NONE
    """Optimizer state (optimizer), parameters as well (cpu), or both on disk (nvme, zero3 only).
    zero1 and zero2 take optimizer, fsdp takes cpu, zero3 takes any."""
    nvme_path: Annotated[str, Field(min_length=1, max_length=4096), _ABSOLUTE] | None = None
    """Folder on each node's fast disk for the files of offload nvme."""
    replicas: Annotated[int, Field(ge=1, le=4096)] = 1
    """HSDP, fsdp only: so many groups of ranks each hold the whole model, and shard it within the
    group; usually the number of nodes."""
    reshard_after_forward: bool | None = None
    """fsdp only: free a layer's gathered parameters between forward and backward; absent decides by
    free memory."""
    reduce_each_micro_batch: bool | None = None
    """fsdp only: reduce gradients after each micro-batch, which takes more time, and no memory for
    whole gradients of 4 bytes a parameter; absent does so where these do not fit."""
    prefetch: Annotated[int, Field(ge=0, le=8)] | None = None
    """fsdp only: layers gathered ahead of the one that computes; 0 leaves it to torch, absent
    chooses."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.AUTO
    """Recompute activations to save memory: none, selective (keeps what is slow to compute), full,
    or auto."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs that share each layer."""
    pipeline_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Stages the layers are divided into."""

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
