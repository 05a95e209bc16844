"""Configurations whose memory is traced and computed; as a program it prints the table of them."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from finetune_trainer.sizing.peak import Peak, step_peak
from support.memory.memory_trace import Traced, allocated_step, by_sdpa, trace_step

ONE_B = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
EIGHT_B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
FSDP = {"type": "fsdp", "reshard_after_forward": True, "reduce_each_micro_batch": True}
KEEPING = {**FSDP, "reduce_each_micro_batch": False}


@dataclass(frozen=True)
class Setup:
    """One configuration of the table; `layers` fewer than the model has keep a test short."""

    name: str
    shape: dict[str, Any]
    method: str
    recompute: str = "none"
    micro_batches: int = 1
    tokens: int = 4096
    ranks: int = 1
    layers: int | None = None
    strategy: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)

    def settings(self) -> LlamaConfig:
        """Return the model's configuration."""
        layers = self.layers or self.shape["num_hidden_layers"]
        return LlamaConfig(**{**self.shape, "num_hidden_layers": layers})

    def changes(self) -> dict[str, Any]:
        """Return the arguments of `train_config`."""
        is_full = self.method == "full"
        method: dict[str, Any] = {"type": self.method, **({} if is_full else {"lora": {"r": 16}})}
        if self.method == "qlora":
            method["quantization"] = "nf4"
        return {
            "world": {"nproc_per_node": self.ranks},
            "method": method,
            "output": {"format": "merged" if is_full else "adapter"},
            "strategy": {
                "type": "ddp",
                **self.strategy,
                "activation_checkpointing": self.recompute,
            },
            "training": {
                "precision": "bf16",
                "global_batch_size": self.micro_batches * self.ranks,
                **self.training,
            },
        }


IN_8_BITS = {"optimizer": "adamw8bit"}
SETUPS = [
    Setup("1B LoRA", ONE_B, "lora"),
    Setup("1B LoRA, selective, 2 micro-batches", ONE_B, "lora", "selective", 2),
    Setup("8B LoRA", EIGHT_B, "lora"),
    Setup("8B LoRA, full, 4 micro-batches", EIGHT_B, "lora", "full", 4),
    Setup("1B QLoRA, 2 micro-batches", ONE_B, "qlora", micro_batches=2, tokens=2048),
    Setup("8B QLoRA, full", EIGHT_B, "qlora", "full", tokens=2048),
    Setup("1B full", ONE_B, "full"),
    Setup("1B full, selective, 2 micro-batches", ONE_B, "full", "selective", 2),
    Setup("1B full, full, 4 micro-batches", ONE_B, "full", "full", 4),
    Setup("8B full in 8 bits, full", EIGHT_B, "full", "full", training=IN_8_BITS),
    Setup(
        "8B full on FSDP of 8, full, 2 micro-batches",
        EIGHT_B,
        "full",
        "full",
        2,
        ranks=8,
        strategy=FSDP,
    ),
    Setup(
        "1B full on FSDP of 8, whole gradients, 2 micro-batches",
        ONE_B,
        "full",
        micro_batches=2,
        ranks=8,
        strategy=KEEPING,
    ),
]
SHORT = [
    Setup("LoRA", ONE_B, "lora", layers=4),
    Setup("QLoRA, full, accumulation", EIGHT_B, "qlora", "full", 2, tokens=2048, layers=2),
    Setup("full, selective", ONE_B, "full", "selective", layers=4),
    Setup("all logits", ONE_B, "full", layers=4, training={"fused_head": False}),
    Setup("in 8 bits, full", EIGHT_B, "full", "full", layers=2, training=IN_8_BITS),
    Setup("FSDP of 8", ONE_B, "full", "full", 2, ranks=8, layers=4, strategy=FSDP),
    Setup("FSDP of 8, untied", EIGHT_B, "full", "full", 2, ranks=8, layers=2, strategy=FSDP),
    Setup("FSDP of 8, untied, LoRA", EIGHT_B, "lora", "full", ranks=8, layers=2, strategy=FSDP),
]
TINY = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
REAL = [
    Setup("LoRA", TINY, "lora", tokens=512),
    Setup("LoRA, full", TINY, "lora", "full", tokens=512),
    Setup("full", TINY, "full", micro_batches=2, tokens=512),
    Setup("full, full", TINY, "full", "full", tokens=512),
]


def compare(setup: Setup, folder: Path) -> tuple[Traced, Peak]:
    """Return what the trace and the formula say."""
    traced = trace_step(folder, setup.settings(), tokens=setup.tokens, **setup.changes())
    return traced, step_peak(traced.shape, traced.config, tokens=setup.tokens)


def print_table() -> None:
    """Print trace and formula of every configuration, in GiB."""
    gib = 2**30
    print("| configuration | static | by formula | peak | by formula | off | highest moment |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for setup in SETUPS:
            traced, peak = compare(setup, Path(folder))
            sizes = (traced.at_rest, peak.static, traced.peak, peak.nbytes)
            cells = " | ".join(f"{size / gib:.2f}" for size in sizes)
            off = f"{100 * (peak.nbytes / traced.peak - 1):+.1f} %"
            print(f"| {setup.name} | {cells} | {off} | {peak.moment} |", flush=True)
        for setup in REAL:
            settings, tokens, changes = setup.settings(), setup.tokens, setup.changes()
            traced = trace_step(Path(folder), settings, tokens=tokens, as_on=by_sdpa, **changes)
            real = allocated_step(Path(folder), settings, tokens=tokens, **changes)
            print(
                f"real step, {setup.name}: trace {traced.peak / 2**20:.1f} MiB, allocator "
                f"{real.peak / 2**20:.1f} MiB ({100 * (traced.peak / real.peak - 1):+.1f} %)"
            )


if __name__ == "__main__":
    print_table()
