"""Training settings: method, batch, steps, learning rate and precision.

Sections of `TrainConfig`; rules across sections are checked there.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from finetune_trainer.config.contract_model import ContractModel

FEW_STEPS = 10
"""A run with fewer optimizer steps gets a warning."""


class LoraSettings(ContractModel):
    """Low-rank adapters (arXiv:2106.09685): W + (alpha / r) B A."""

    r: Annotated[int, Field(ge=1)] = 16
    alpha: Annotated[float, Field(gt=0)] = 32
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: tuple[str, ...] = Field(
        (), description="Module name endings; empty: all linear layers except head and routers."
    )
    rslora: bool = Field(False, description="Scale by alpha / sqrt(r) (arXiv:2312.03732).")
    dora: bool = Field(False, description="Train magnitudes separately (arXiv:2402.09353).")
    start_from: str | None = Field(
        None, description="Folder of an adapter with the initial weights."
    )


class MethodConfig(ContractModel):
    """Trained parameters: all of them, or adapters (`lora` is then set)."""

    type: Literal["full", "lora", "qlora"] = "lora"
    lora: LoraSettings | None = None
    quantization: Literal["none", "nf4", "int8"] = Field(
        "none",
        description="Storage of the frozen base; nf4 is 4-bit with double quantisation "
        "(arXiv:2305.14314).",
    )
    freeze: tuple[str, ...] = Field(
        (),
        description="Shell patterns of parameter names that full fine-tuning does not change.",
    )

    @model_validator(mode="after")
    def _settings_go_with_their_type(self) -> Self:
        if (self.type == "full") != (self.lora is None):
            raise ValueError(
                "spec.method.lora goes with spec.method.type lora and qlora, and only with them"
            )
        if (self.type == "qlora") != (self.quantization != "none"):
            raise ValueError(
                "spec.method.quantization goes with spec.method.type qlora, and only with it"
            )
        if self.freeze and self.type != "full":
            raise ValueError(
                "spec.method.freeze has no effect with adapters, which freeze the whole base; "
                "remove it or use spec.method.type full"
            )
        return self


class EarlyStopping(ContractModel):
    """Stop when the held-out loss no longer falls."""

    patience: Annotated[int, Field(ge=1)] = Field(
        description="Evaluations without improvement before training stops."
    )
    min_delta: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Fall of the held-out loss that counts as an improvement."
    )


class TrainingConfig(ContractModel):
    """Batch, steps, learning rate, precision and other settings of training."""

    global_batch_size: Annotated[int, Field(ge=1)] = Field(
        description="Sequences (packs, when packing) that an optimizer step averages over."
    )
    micro_batch_size: Annotated[int, Field(ge=1)] = Field(
        1, description="Sequences of one forward pass on one rank."
    )
    epochs: Annotated[float, Field(gt=0)] | None = None
    max_steps: Annotated[int, Field(ge=1)] | None = None
    learning_rate: Annotated[float, Field(gt=0)]
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Share of all steps when below 1, else a count of steps."
    )
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    max_grad_norm: Annotated[float, Field(ge=0)] = Field(1.0, description="0 turns clipping off.")
    precision: Literal["bf16", "fp16", "fp32", "fp64"] = Field(
        "fp32",
        description="Number format of forward and backward; trained parameters are fp32 (fp64 with "
        "fp64, which shows whether a difference exceeds rounding; bf16 with adamw8bit).",
    )
    optimizer: Literal["adamw", "adamw8bit"] = Field(
        "adamw", description="adamw8bit: bf16 parameters with stochastic rounding, 8-bit moments."
    )
    compile: bool = Field(False, description="Compile each decoder layer with torch.compile.")
    is_compile_asked: bool = Field(
        False, description="Set in the manifest: a model that cannot be compiled is refused."
    )
    attention: Literal["fastest", "varlen", "flex", "model"] = Field(
        "fastest", description="How documents are separated; fastest: the fastest possible way."
    )
    deterministic: bool = Field(False, description="Bitwise reproducible runs; cuda only.")
    collect_garbage_every_steps: Annotated[int, Field(ge=0)] = Field(
        0, description="Steps between collections of Python's garbage; 0 leaves it to Python."
    )
    expandable_segments: bool = Field(False, description="Setting of CUDA's allocator.")
    check_memory: bool = Field(True, description="Refuse a start that cannot fit; cuda only.")
    fused_head: bool = Field(True, description="Compute the loss in the head, chunk by chunk.")
    liger: bool = Field(False, description="Use liger-kernel's Triton layers; GPU only.")
    float8: bool = Field(False, description="float8 matrix products (torchao); full, Hopper only.")
    seed: Annotated[int, Field(ge=0)] = 42
    eval_every_steps: Annotated[int, Field(ge=1)] | None = None
    early_stopping: EarlyStopping | None = None

    @model_validator(mode="after")
    def _steps_of_warmup_are_whole(self) -> Self:
        if self.warmup >= 1 and not self.warmup.is_integer():
            raise ValueError(
                f"spec.training.warmup {self.warmup} is neither a share of the steps (below 1) nor "
                f"a whole number of them; use {int(self.warmup)} or {int(self.warmup) + 1}"
            )
        return self

    @model_validator(mode="after")
    def _epochs_xor_max_steps(self) -> Self:
        if (self.epochs is None) == (self.max_steps is None):
            raise ValueError(
                "exactly one of spec.training.epochs and spec.training.maxSteps must be set"
            )
        return self
