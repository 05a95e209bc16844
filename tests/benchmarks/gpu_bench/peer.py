"""The tuned peer: TRL with Liger where both can be had, else HF Trainer compiled.

    python -m gpu_bench.peer MODEL ROWS DEVICE TOKENS STEPS OUT

Rows are of full length, so that every row is a pack. It gets what ours gets: LoRA r16 on all linear
layers, a frozen base in bf16, one row a step, fused AdamW, no recomputation.
"""

import json
import sys
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from gpu_bench.rows import LORA, WARM_UP
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback
from transformers import TrainingArguments as Arguments


def can_have_liger(device: str) -> bool:
    """Say whether TRL and Liger's Triton kernels are here, and a device for them."""
    return device == "cuda" and all(find_spec(name) for name in ("trl", "liger_kernel", "triton"))


class _Clock(TrainerCallback):  # type: ignore[misc]
    """Marks the end of each step on the device."""

    def __init__(self, device: str) -> None:
        self._device, self._ends = device, list[Any]()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called by the trainer."""
        if self._device == "cpu":
            self._ends.append(time.perf_counter())
            return
        self._ends.append(torch.cuda.Event(enable_timing=True))
        self._ends[-1].record()

    def step_seconds(self) -> list[float]:
        """Return the seconds of the steps after the warm-up, once the device has made them."""
        kept = self._ends[WARM_UP - 1 :]
        if self._device == "cpu":
            return [other - one for one, other in pairwise(kept)]
        torch.cuda.synchronize()
        return [one.elapsed_time(other) / 1000 for one, other in pairwise(kept)]


def tokenized(model: str, rows: Path, tokens: int) -> Dataset:
    """Return the rows cut to `tokens` tokens, each of them a label."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [json.loads(line)["text"] for line in rows.open()]
    ids = [tokenizer(text)["input_ids"][:tokens] for text in texts]
    return Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])


def arguments(device: str, steps: int, folder: Path) -> dict[str, Any]:
    """Return what both trainers are told."""
    return {
        "output_dir": str(folder / "output"),
        "per_device_train_batch_size": 1,
        "max_steps": steps,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "bf16": True,
        "use_cpu": device == "cpu",
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": False,
        "logging_nan_inf_filter": False,  # it waits for the device at each step
        "logging_steps": steps,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": device != "cpu",
    }


def main() -> None:
    """Train, and write OUT."""
    model, rows, device, tokens, steps, out = sys.argv[1:]
    path, told = Path(out), arguments(sys.argv[3], int(steps), Path(out).parent)
    data, clock = tokenized(model, Path(rows), int(tokens)), _Clock(device)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=LORA["r"],
        lora_alpha=LORA["alpha"],
        target_modules="all-linear",
    )
    if can_have_liger(device):
        from trl import SFTConfig, SFTTrainer

        system = "TRL + Liger"
        config = SFTConfig(**told, max_length=int(tokens), use_liger_kernel=True)
        trainer: Any = SFTTrainer(base, config, train_dataset=data, peft_config=lora)
    else:
        # A CPU compiles for minutes what it runs in seconds.
        backend = "inductor" if device == "cuda" else "aot_eager"
        system = f"HF Trainer, compiled ({backend})"
        compiled = Arguments(**told, torch_compile=True, torch_compile_backend=backend)
        trainer = Trainer(get_peft_model(base, lora), compiled, train_dataset=data)
    trainer.add_callback(clock)
    trainer.train()
    result: dict[str, Any] = {"system": system, "step_seconds": clock.step_seconds()}
    if device == "cuda":
        result["at_end"] = {"peak_allocated_bytes": torch.cuda.max_memory_allocated()}
    path.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
