"""The rows of the table: what each one trains, and what it is held against.

In order of worth, as a machine may be taken back before the last.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from finetune_trainer.config import TrainConfig

Changes = Mapping[str, Mapping[str, Any]]
Kind = Literal["gemm", "ours", "peer", "idle", "saving"]
FLOPS_PER_PARAMETER = {"lora": 4, "qlora": 4, "full": 6}
"""And token: frozen weights need no gradients of their own. Attention is left out."""
PEAK_FLOPS = 989e12
"""Dense bf16 of an H100 SXM and an H200 (NVIDIA's data sheets); MFU is held against it."""

STEPS, WARM_UP = 20, 5
"""Of a row, and those that do not count: kernels are chosen and compiled, the allocator settles."""

LORA = {"r": 16, "alpha": 32}
DEFAULTS: Changes = {
    "training": {
        "compile": True,
        "attention": "fastest",
        "collect_garbage_every_steps": 50,
        "expandable_segments": True,
    },
    "strategy": {"type": "ddp"},
}
"""What a manifest that says nothing of them gets on a GPU."""
NO_CHECKPOINT: Changes = {"checkpoint": {"enabled": False}}
FSDP: Changes = {
    "strategy": {"type": "fsdp", "prefetch": 1},
    # A run with one rank is refused, unless it goes on with what is left of a larger one.
    "checkpoint": {"enabled": False, "is_continued": True},
}


@dataclass(frozen=True)
class Aim:
    """A bound on a figure of a row.

    Attributes:
        figure: Its name in the row's result.
        bound: By a word in the device's name; "" is any.
        is_most: A greater figure misses it; else a smaller one does.
    """

    figure: str
    bound: Mapping[str, float]
    is_most: bool = False

    def of(self, device: str) -> float | None:
        """Return the bound for the device of this name, where there is one."""
        return next((value for word, value in self.bound.items() if word in device), None)

    def is_met(self, device: str, found: float) -> bool:
        """Say whether the figure keeps to the bound of this device, which must have one."""
        bound = self.of(device)
        assert bound is not None, f"{self.figure} has no bound for {device}"
        return found <= bound if self.is_most else found >= bound


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        says: What is measured, for people.
        tokens: Of a micro-batch of one row.
        changes: Sections of the trainer's configuration, beside `DEFAULTS`.
        beside: The row that the speed is divided by.
        needs: A package for GPUs without which the row is left out.
    """

    name: str
    says: str
    kind: Kind = "ours"
    shape: str = "8b"
    method: str = "lora"
    tokens: int = 4096
    changes: Changes = field(default_factory=dict)
    beside: str | None = None
    aims: tuple[Aim, ...] = ()
    needs: str | None = None


def _with(name: str, says: str, key: str, value: Any, *, needs: str | None = None) -> Row:
    """Return `lora-8b` with one setting of `spec.training` changed."""
    changes: Changes = {"training": {key: value}, **NO_CHECKPOINT}
    says = f"`lora-8b` with `{says}`"
    return Row(f"lora-8b-{name}", says, changes=changes, beside="lora-8b", needs=needs)


RECOMPUTED: Changes = {"strategy": {"activation_checkpointing": "full"}}
FAST = Aim("tokens_per_second", {"H200": 13_000, "H100": 12_000})
FAST_WITHOUT_FLASH_3 = Aim("tokens_per_second", {"H200": 11_700, "H100": 11_000})

ROWS: tuple[Row, ...] = (
    Row("gemm", "bf16 product of 8192 x 8192 matrices", kind="gemm"),
    Row("lora-8b", "8B LoRA r16, 1 x 4096", changes=NO_CHECKPOINT, aims=(FAST,)),
    Row(
        "peer-lora-8b",
        "the same by the tuned peer",
        kind="peer",
        beside="lora-8b",
        aims=(Aim("beside", {"": 1 / 1.10}, is_most=True), Aim("peak_beside", {"": 1})),
    ),
    Row(
        "full-8b",
        "8B full, adamw8bit, 1 x 4096, full recomputation, no checkpoint",
        method="full",
        changes={"training": {"optimizer": "adamw8bit"}, **RECOMPUTED, **NO_CHECKPOINT},
        aims=(Aim("peak_gib", {"": 60}, is_most=True),),
    ),
    Row(
        "qlora-8b",
        "8B QLoRA r16, 1 x 2048, full recomputation",
        method="qlora",
        tokens=2048,
        changes={**RECOMPUTED, **NO_CHECKPOINT},
        aims=(Aim("peak_gib", {"": 12}, is_most=True),),
    ),
    Row(
        "full-1b",
        "1B full, 1 x 4096",
        shape="1b",
        method="full",
        changes=NO_CHECKPOINT,
        aims=(Aim("mfu", {"": 0.45}),),
    ),
    Row(
        "lora-8b-16k",
        "8B LoRA r16, 1 x 16,384, full recomputation",
        tokens=16_384,
        changes={**RECOMPUTED, **NO_CHECKPOINT},
    ),
    Row(
        "idle-8b",
        "`lora-8b` under the profiler: the device between kernels",
        kind="idle",
        changes=NO_CHECKPOINT,
        aims=(Aim("idle_share", {"": 0.05}, is_most=True),),
    ),
    Row(
        "saving",
        "seconds that a save blocks the loop, over those of `torch.save`",
        kind="saving",
        aims=(Aim("blocking_ratio", {"": 0.35}, is_most=True),),
    ),
    _with("no-compile", "compile: false", "compile", False),
    _with("attention-model", "attention: model", "attention", "model"),
    _with("fixed-segments", "expandableSegments: false", "expandable_segments", False),
    _with("python-gc", "collectGarbageEverySteps: 0", "collect_garbage_every_steps", 0),
    _with("all-logits", "fusedHead: false", "fused_head", False),
    _with("deterministic", "deterministic: true", "deterministic", True),
    _with("liger", "liger: true", "liger", True, needs="liger-kernel"),
    Row(
        "lora-8b-fsdp",
        "`lora-8b` with fsdp, one rank",
        changes=FSDP,
        beside="lora-8b",
    ),
    Row(
        "lora-8b-fsdp-no-prefetch",
        "`lora-8b-fsdp` with `prefetch: 0`",
        changes={**FSDP, "strategy": {"type": "fsdp", "prefetch": 0}},
        beside="lora-8b-fsdp",
    ),
    Row(
        "lora-8b-fsdp-whole",
        "`lora-8b-fsdp` with `reshardAfterForward: false`",
        changes={
            **FSDP,
            "strategy": {"type": "fsdp", "prefetch": 1, "reshard_after_forward": False},
        },
        beside="lora-8b-fsdp",
    ),
    Row(
        "full-1b-8bit",
        "`full-1b` with `optimizer: adamw8bit`",
        shape="1b",
        method="full",
        changes={"training": {"optimizer": "adamw8bit"}, **NO_CHECKPOINT},
        beside="full-1b",
    ),
)


def aims_of(row: Row, *, has_flash_3: bool) -> tuple[Aim, ...]:
    """Return what the row is held against where FlashAttention 3 or 4 is there, or is not."""
    if has_flash_3:
        return row.aims
    return tuple(FAST_WITHOUT_FLASH_3 if aim is FAST else aim for aim in row.aims)


def config_of(row: Row, device: str, *, model: str, rows: str, folder: str) -> TrainConfig:
    """Return the trainer's configuration of a row that trains.

    Args:
        model: Folder of the model.
        rows: Path of the rows of text.
        folder: Where everything is written.
    """
    method: dict[str, Any] = {"type": row.method}
    if row.method != "full":
        method["lora"] = LORA
    if row.method == "qlora":
        method["quantization"] = "nf4"
    sections: dict[str, Any] = {
        "training": {
            "global_batch_size": 1,
            "max_steps": STEPS,
            "learning_rate": 1e-5,
            "schedule": "constant",
            "precision": "bf16",
        },
        "checkpoint": {"dir": f"{folder}/checkpoints", "every_steps": 1_000_000, "keep": 1},
        "strategy": {},
        "method": method,
    }
    for changes in (DEFAULTS, row.changes):
        for name, values in changes.items():
            sections[name] = {**sections[name], **values}
    return TrainConfig.model_validate(
        {
            **sections,
            "job": {"name": row.name, "uid": f"bench-{row.name}"},
            "world": {"device": device, "threads_per_process": 2},
            "model": {"path": model},
            "data": {
                "train": {"path": rows},
                "format": "text",
                "max_seq_len": row.tokens,
                "long_rows": "truncate",
                "packing": False,
                "cache_dir": f"{folder}/cache",
            },
            "output": {
                "dir": f"{folder}/output",
                "format": "merged" if row.method == "full" else "adapter",
            },
            "telemetry": {"metrics_port": 0},
            "run_dir": f"{folder}/run",
            "termination_path": f"{folder}/termination.json",
        }
    )
