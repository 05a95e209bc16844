"""Batch size, optimizer, schedule and precision: `spec.training`."""

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
    """Number format of forward and backward pass; trained parameters are stored in fp32."""

    AUTO = "auto"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class Optimizer(StrEnum):
    """Optimizer of the trained parameters."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw8bit"


class Attention(StrEnum):
    """Implementation of attention within the documents of a pack."""

    VARLEN = "varlen"
    FLEX = "flex"
    MODEL = "model"


class EarlyStopping(ApiModel):
    """Stop when the held-out loss no longer decreases."""

    patience: Annotated[int, Field(ge=1, le=1000)] = 3
    """Number of evaluations without improvement before training stops."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """Minimum decrease of the held-out loss that counts as an improvement."""


class TrainingSpec(ApiModel):
    """Batch size, steps, learning rate and precision."""

    global_batch_size: Annotated[int, Field(ge=1, le=1_048_576)]
    """Sequences (packs, if packing) per optimizer step, over all ranks."""
    micro_batch_size: Annotated[
        Annotated[int, Field(ge=1, le=65_536)] | Literal["auto"],
        Rule("type(self) == int || self == 'auto'", "must be a whole number or auto"),
    ] = "auto"
    """Sequences per forward pass and rank; auto chooses by the memory of the GPUs, at most 16,384
    tokens."""
    max_seq_length: Annotated[int, Field(ge=8, le=1_048_576)] = 2048
    """Maximum length of a sequence in tokens; also the length of a pack."""
    epochs: Annotated[float, Field(le=10_000), ABOVE_ZERO] | None = None
    """Passes over the data set; set exactly one of epochs and maxSteps."""
    max_steps: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Number of optimizer steps; set exactly one of epochs and maxSteps."""
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
    """Warm-up as a share of all steps if below 1, else as a number of steps."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Decoupled weight decay of AdamW (arXiv:1711.05101)."""
    dropout: Annotated[float, Field(ge=0, le=0.9)] | None = None
    """Dropout of the layers of the base model; absent means the setting of the model."""
    max_grad_norm: Annotated[float, Field(ge=0, le=1e9)] = 1.0
    """Maximum global norm of the gradients; 0 disables clipping."""
    precision: Precision = Precision.AUTO
    """bf16, fp16 (with loss scaling, for GPUs without bf16 such as V100 and T4) or fp32; auto is
    bf16 with adamw8bit and on GPUs that have it, fp16 on other GPUs, and fp32 on a CPU."""
    optimizer: Optimizer | None = None
    """adamw stores parameters and both moments in fp32, 12 bytes per parameter. adamw8bit stores
    parameters in bf16, with stochastic rounding, and moments in 8 bits, 4 bytes per parameter; only
    for full fine-tuning in bf16 with ddp or fsdp. Absent means adamw."""
    compile: bool | None = None
    """Compile each decoder layer with torch.compile: a minute or more at the start, then faster
    steps. Absent compiles on GPUs, with ddp and fsdp, if the model supports it."""
    attention: Attention | None = None
    """varlen: one kernel for all documents of a pack; flex: a kernel that torch compiles for the
    model, with support for soft caps; model: the implementation of the model, with a mask. Absent
    means the first that the model supports, with FlashAttention 3 or 4 for varlen if its package is
    installed."""
    deterministic: bool | None = None
    """Produce bitwise identical results in each run on the same GPUs, at a cost in speed. Otherwise
    the order of additions on a GPU may differ. A CPU is always deterministic."""
    collect_garbage_every_steps: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    """Number of steps between two garbage collections of Python, on all ranks at the same step,
    with none in between; 0 leaves it to Python. Absent chooses."""
    expandable_segments: bool | None = None
    """Let the CUDA allocator expand its segments, which wastes less memory; absent means true on
    GPUs."""
    check_memory: bool | None = None
    """Refuse to start if the computed peak exceeds the memory of a GPU. Absent means true; false
    starts anyway."""
    fused_head: bool | None = None
    """Compute the loss in the head of the model, in chunks, so that not all logits are in memory at
    once. Absent means true if the head is a plain linear layer; false computes all logits at
    once."""
    liger: bool = False
    """Use the fused Triton layers of liger-kernel; GPUs only."""
    float8: bool = False
    """float8 matrix products (torchao); full fine-tuning on Hopper or newer GPUs only."""
    seed: Annotated[int, Field(ge=0, le=INT32_MAX)] = 42
    """Seed of the order of rows, initialisation and dropout."""
    packing: bool | None = None
    """Pack several rows into one sequence, isolated from each other. Absent packs if the model can
    isolate them; true refuses other models."""
    eval_every_steps: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Number of steps between two evaluations; absent means before and after training."""
    early_stopping: EarlyStopping | None = None
    """Stop when the held-out loss no longer decreases."""

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
