"""Train one system once, as its own users would start it; a process of its own for every run.

    python systems.py SYSTEM FOLDER

FOLDER holds task.json (see `Task`), the rows, and receives adapter/ and result.json. `trainer.py`
starts it; the peak memory is measured there, from outside.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SYSTEMS = ("ours", "trl_default", "trl_tuned", "hf_trainer")
LORA = {"r": 8, "alpha": 16}


@dataclass(frozen=True)
class Task:
    """What every system is given.

    Attributes:
        model: Folder of the base model.
        method: `lora`, `qlora` or `full`.
        shape: `chat` (prompt and completion, of any length) or `uniform` (rows of `pack_tokens`).
        rows: Number of rows in rows.jsonl; each is seen once.
        rows_per_step: Rows of one optimizer step without packing.
        pack_tokens: Length of a pack, and of a uniform row.
        device: `cpu` or `cuda`.
        precision: `bf16` or `fp32`.
    """

    model: str
    shape: str
    rows: int
    rows_per_step: int
    pack_tokens: int
    seed: int
    learning_rate: float
    threads: int
    device: str
    precision: str
    method: str = "lora"

    @classmethod
    def read(cls, folder: Path) -> "Task":
        """Read FOLDER/task.json."""
        return cls(**json.loads((folder / "task.json").read_text()))

    def write(self, folder: Path) -> None:
        """Write FOLDER/task.json."""
        (folder / "task.json").write_text(json.dumps(asdict(self), indent=2))


def train_ours(task: Task, folder: Path) -> dict[str, Any]:
    """Run `python -m finetune_trainer` on the rows, in this process's place."""
    from finetune_trainer.config import TrainConfig

    is_chat = task.shape == "chat"
    config = {
        "job": {"name": "bench", "uid": f"bench-{task.seed}"},
        "world": {"device": task.device, "threads_per_process": task.threads},
        "model": {"path": task.model},
        "data": {
            "train": {"path": str(folder / "rows.jsonl")},
            "format": "chat" if is_chat else "text",
            "max_seq_len": task.pack_tokens,
            "long_rows": "truncate",
            "packing": is_chat,
            "cache_dir": str(folder / "cache"),
        },
        "method": _method(task),
        "training": {
            "global_batch_size": 1 if is_chat else task.rows_per_step,
            "micro_batch_size": 1 if is_chat else task.rows_per_step,
            "epochs": 1,
            "learning_rate": task.learning_rate,
            "schedule": "constant",
            "precision": task.precision,
            "seed": task.seed,
        },
        "checkpoint": {"dir": str(folder / "checkpoints"), "every_steps": 1_000_000, "keep": 1},
        "output": {
            "dir": str(folder / "adapter"),
            "format": "merged" if task.method == "full" else "adapter",
        },
        "telemetry": {"metrics_port": 0},
        "run_dir": str(folder / "run"),
        "termination_path": str(folder / "termination.json"),
    }
    path = folder / "config.json"
    path.write_text(TrainConfig.model_validate(config).to_json())
    _run_main(path)
    (journal,) = folder.glob("run/logs/*/rank-0.jsonl")
    events = map(json.loads, journal.read_text().splitlines())
    steps = [event for event in events if event["event"] == "step"]
    return {
        "seconds": sum(step["seconds"] for step in steps),
        "steps": len(steps),
        "tokens": sum(step["tokens"] for step in steps),
        "loss": steps[-1]["loss"],
        "isolates_documents": True,
    }


def _method(task: Task) -> dict[str, Any]:
    if task.method == "full":
        return {"type": "full"}
    quantization = {"quantization": "nf4"} if task.method == "qlora" else {}
    return {"type": task.method, "lora": LORA, **quantization}


def _run_main(config: Path) -> None:
    import subprocess

    subprocess.run([sys.executable, "-m", "finetune_trainer", str(config)], check=True)


def train_trl(task: Task, folder: Path, *, is_tuned: bool) -> dict[str, Any]:
    """Run `SFTTrainer`: all of its defaults, or packed, unrecomputed and on a base like ours."""
    import torch
    from datasets import load_dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(task.threads)
    tuning: dict[str, Any] = {"per_device_train_batch_size": task.rows_per_step}
    model: Any = task.model
    if task.method == "qlora":
        model = _base(task)
    if is_tuned:
        tuning = {
            "per_device_train_batch_size": 1,
            "packing": True,
            "packing_strategy": "bfd",
            "max_length": task.pack_tokens,
            "gradient_checkpointing": False,
        }
        model = _base(task)
    rows = load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train")
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**_arguments(task, folder), **tuning),
        train_dataset=rows.map(_as_messages, remove_columns=rows.column_names),
        peft_config=None if task.method == "full" else _lora(LoraConfig),
    )
    watch = _Calls(trainer.model)
    done = trainer.train()
    trainer.save_model(str(folder / "adapter"))
    return {
        "seconds": done.metrics["train_runtime"],
        "steps": done.global_step,
        "loss": done.training_loss,
        "isolates_documents": watch.isolates_documents() if is_tuned else True,
    }


def train_hf(task: Task, folder: Path) -> dict[str, Any]:
    """Run `transformers.Trainer` on uniform rows, on the same base as ours."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoTokenizer, Trainer, TrainingArguments

    torch.set_num_threads(task.threads)
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    texts = [json.loads(line)["text"] for line in (folder / "rows.jsonl").open()]
    tokens = [tokenizer(text)["input_ids"][: task.pack_tokens] for text in texts]
    rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in tokens])
    model = _base(task)
    if task.method != "full":
        model = get_peft_model(model, _lora(LoraConfig))
    arguments = TrainingArguments(
        per_device_train_batch_size=task.rows_per_step, **_arguments(task, folder)
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    done = trainer.train()
    return {
        "seconds": done.metrics["train_runtime"],
        "steps": done.global_step,
        "tokens": sum(map(len, tokens)),
        "loss": done.training_loss,
        "isolates_documents": True,
    }


def _arguments(task: Task, folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "output"),
        "num_train_epochs": 1,
        "learning_rate": task.learning_rate,
        "lr_scheduler_type": "constant",
        "bf16": task.precision == "bf16",
        "use_cpu": task.device == "cpu",
        "seed": task.seed,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": task.device != "cpu",
    }


def _base(task: Task) -> Any:
    """Load the base as ours does: frozen in `precision` or NF4, in fp32 where all is trained."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    is_narrow = task.method != "full" and task.precision == "bf16"
    options: dict[str, Any] = {"dtype": torch.bfloat16 if is_narrow else torch.float32}
    if task.method == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    return AutoModelForCausalLM.from_pretrained(task.model, **options)


def _lora(factory: Any) -> Any:
    return factory(
        task_type="CAUSAL_LM",
        r=LORA["r"],
        lora_alpha=LORA["alpha"],
        lora_dropout=0.0,
        target_modules="all-linear",
    )


def _as_messages(row: dict[str, str]) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "completion": [{"role": "assistant", "content": row["completion"]}],
    }


class _Calls:
    """Remembers how a trainer called its model first, to see whether documents were isolated."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._first: dict[str, Any] | None = None
        model.register_forward_pre_hook(self._keep, with_kwargs=True)

    def isolates_documents(self) -> bool:
        """Change the first document of the first batch: the last one's loss must not move."""
        import torch

        assert self._first is not None, "the model was never called"
        call = dict(self._first, labels=self._first["labels"].clone())
        starts = (call["position_ids"][0] == 0).nonzero().flatten().tolist()
        call["labels"][0, : starts[-1]] = -100
        changed = dict(call, input_ids=call["input_ids"].clone())
        changed["input_ids"][0, : starts[1]] = 5
        with torch.no_grad():
            before, after = (self._model(**one).loss for one in (call, changed))
        return bool(torch.equal(before, after))

    def _keep(self, _: Any, __: tuple[Any, ...], call: dict[str, Any]) -> None:
        self._first = self._first or dict(call)


def main() -> None:
    """Train the system named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    folder, task = arguments.folder.absolute(), Task.read(arguments.folder)
    if arguments.system == "ours":
        result = train_ours(task, folder)
    elif arguments.system == "hf_trainer":
        result = train_hf(task, folder)
    else:
        result = train_trl(task, folder, is_tuned=arguments.system == "trl_tuned")
    (folder / "result.json").write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
