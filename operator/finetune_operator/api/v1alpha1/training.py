"""The optimizer's view: `spec.training`."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from finetune_operator.api.schema import ABOVE_ZERO, ApiModel, Rule

INT32_MAX = 2**31 - 1


class Schedule(StrEnum):
    """Shape of the learning rate after warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class Precision(StrEnum):
    """Number format of forward and backward; trained parameters are kept in fp32."""

    AUTO = "auto"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class Optimizer(StrEnum):
    """What updates the trained parameters."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw8bit"


class Attention(StrEnum):
    """What computes attention inside the documents of a pack."""

    VARLEN = "varlen"
    FLEX = "flex"
    MODEL = "model"


class EarlyStopping(ApiModel):
    """Stop when the held-out loss no longer falls."""

    patience: Annotated[int, Field(ge=1, le=1000)] = 3
    """Evaluations without improvement before training stops."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """Fall of the held-out loss that counts as an improvement."""


class TrainingSpec(ApiModel):
    """Batch, steps, learning rate, precision."""

    global_batch_size: Annotated[int, Field(ge=1, le=1_048_576)]
    """Sequences (packs, when packing) an optimizer step averages over, all ranks."""
    micro_batch_size: Annotated[
        Annotated[int, Field(ge=1, le=65_536)] | Literal["auto"],
        Rule("type(self) == int || self == 'auto'", "must be a whole number or auto"),
    ] = "auto"
    """Sequences of one forward pass on one rank, or auto."""
    max_seq_length: Annotated[int, Field(ge=8, le=1_048_576)] = 2048
    """Longest sequence, in tokens; also the length of a pack."""
    epochs: Annotated[float, Field(le=10_000), ABOVE_ZERO] | None = None
    """Passes over the data set; exactly one of epochs and maxSteps."""
    max_steps: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Optimizer steps; exactly one of epochs and maxSteps."""
    learning_rate: Annotated[float, Field(le=10), ABOVE_ZERO]
    """Peak learning rate, a number such as 2e-4."""
    schedule: Schedule = Schedule.COSINE
    """Learning rate after warm-up: constant, linear or cosine to 0."""
    warmup: Annotated[
        float,
        Field(ge=0, le=INT32_MAX),
        Rule(
            "self < 1.0 || double(int(self)) == self",
            "must be a whole number of steps, or a share of all steps below 1",
        ),
    ] = 0.0
    """Share of all steps when below 1, else a count of steps."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Decoupled weight decay of AdamW (arXiv:1711.05101)."""
    dropout: Annotated[float, Field(ge=0, le=0.9)] | None = None
    """Dropout of the model's own layers; absent keeps the model's setting."""
    max_grad_norm: Annotated[float, Field(ge=0, le=1e9)] = 1.0
    """Gradients are scaled down to this global norm; 0 turns it off."""
    precision: Precision = Precision.AUTO
    """bf16, fp16 (with loss scaling, for GPUs without bf16 such as V100 and T4) or fp32; auto is
    bf16 on a GPU and with adamw8bit, and fp32 on a CPU."""
    optimizer: Optimizer | None = None
    """adamw keeps parameters and both moments in fp32, 12 bytes a parameter; adamw8bit keeps
    parameters in bf16, rounded stochastically, and moments in 8 bits, 4 bytes a parameter. That is
    for full fine-tuning in bf16 with ddp or fsdp. Absent means adamw."""
    compile: bool | None = None
    """Compile each decoder layer with torch.compile: a minute or more at the start, faster steps
    after it. Absent does so on GPUs, with ddp and fsdp, where the model allows it."""
    attention: Attention | None = None
    """varlen: one kernel for all documents of a pack; flex: a kernel that torch compiles for this
    model, which knows soft caps; model: the model's own, with a mask. Absent takes the first that
    can serve, and FlashAttention 3 or 4 for varlen where its package is installed."""
    deterministic: bool | None = None
    """The same bits in each run on the same GPUs, at a cost in speed; without it a GPU may add up
    in another order. A CPU always gives the same bits."""
    collect_garbage_every_steps: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    """Python's garbage is collected after every so many steps, on all ranks at once, and never
    between; 0 leaves it to Python. Absent chooses."""
    expandable_segments: bool | None = None
    """Let CUDA's allocator grow its segments, which wastes less memory; absent does so on GPUs."""
    check_memory: bool | None = None
    """Refuse to start where the computed peak is more than a GPU has, as is done where this is
    absent; false starts all the same."""
    fused_head: bool | None = None
    """Compute the loss in the model's head, in chunks, so that not all logits exist at once, as is
    done where this is absent and the head is a plain layer; false computes all of them at once."""
    liger: bool = False
    """Use the fused Triton layers of liger-kernel; GPUs only."""
    float8: bool = False
    """float8 matrix products (torchao); full fine-tuning on Hopper or newer GPUs only."""
    seed: Annotated[int, Field(ge=0, le=INT32_MAX)] = 42
    """Seed of order, initialisation and dropout."""
    packing: bool | None = None
    """Put several rows into one sequence, isolated from each other; absent does so where the model
    keeps them apart, true refuses a model that does not."""
    eval_every_steps: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Evaluate every so many steps; absent means before and after training."""
    early_stopping: EarlyStopping | None = None
    """Stop when the held-out loss no longer falls."""

    cel_rules = (
        Rule(
            "!has(self.optimizer) || self.optimizer == 'adamw' || "
            "self.precision in ['auto', 'bf16']",
            "keeps parameters in bf16; use precision bf16, or optimizer adamw",
            field="optimizer",
        ),
        Rule(
            "has(self.epochs) != has(self.maxSteps)", "must set exactly one of epochs and maxSteps"
        ),
        Rule(
            "!has(self.earlyStopping) || has(self.evalEverySteps)",
            "has no effect without evalEverySteps; set evalEverySteps",
            field="earlyStopping",
        ),
        Rule(
            "self.warmup < 1.0 || !has(self.maxSteps) || self.warmup <= double(self.maxSteps)",
            "must be at most maxSteps; reduce it",
            field="warmup",
        ),
    )
