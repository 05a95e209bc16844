"""This trainer, HF `Trainer` and TRL `SFTTrainer` side by side: one interleaved run, one report.

    python tests/benchmarks/trainer.py [--seeds 3] [--rows 256] [--out docs/benchmarks]

Every system gets the same model, rows, precision, optimizer and number of threads, trains in a
process of its own, and takes its turn in an order that rotates with the seed. Nothing is taken
from an earlier run. Without a GPU it is the quickstart's model and dialogues.
"""

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from systems import LORA, Task

HERE = Path(__file__).parent
QUICKSTART = HERE.parent.parent / "examples" / ".quickstart"
CHAT_SYSTEMS = ("ours", "trl_default", "trl_tuned")
UNIFORM_PAIRS = 5
UNIFORM_ROWS = 48
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
Result = dict[str, Any]


def main() -> None:
    """Run everything and write trainer.md and trainer.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--uniform-pairs", type=int, default=UNIFORM_PAIRS)
    parser.add_argument("--checkpoint-mib", type=int, default=768)
    parser.add_argument("--model", type=Path, default=QUICKSTART / "model")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default=_native_precision())
    parser.add_argument("--out", type=Path, default=HERE.parent.parent / "docs" / "benchmarks")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        measured = measure(options, Path(folder))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "trainer.json").write_text(json.dumps(measured, indent=2) + "\n")
    (options.out / "trainer.md").write_text(page(measured))
    print(page(measured))


def measure(options: argparse.Namespace, folder: Path) -> Result:
    """Return the ratios that the report is about, and every single run they are made from."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    task = Task(
        model=str(options.model.absolute()),
        shape="chat",
        rows=options.rows,
        rows_per_step=8,
        pack_tokens=0,
        seed=0,
        learning_rate=1e-3,
        threads=min(2, os.cpu_count() or 1),
        device=device,
        precision=options.precision,
    )
    chat = measure_chat(task, options.seeds, folder)
    uniform = measure_uniform(task, options.uniform_pairs, folder)
    saving = json.loads(
        _run("saving.py", str(_fresh(folder / "saving")), str(options.checkpoint_mib), "5")
    )
    return {
        **{name: spread(values) for name, values in ratios(chat, uniform).items()},
        "checkpoint_blocking_ratio_torch_save": spread(saving),
        "runs": {"chat": chat, "uniform": uniform},
        "checkpoint_mib": options.checkpoint_mib,
        "precision": options.precision,
        "versions": {name: version(name) for name in PACKAGES},
        "commit": _output("git", "-C", str(HERE), "rev-parse", "HEAD"),
        "machine": machine(device),
    }


def _native_precision() -> str:
    """Return bf16 where it is computed as such: a CPU that emulates it compares the emulations."""
    if torch.cuda.is_available():
        return "bf16"
    features = torch.cpu.get_capabilities()
    return "bf16" if features.get("avx512_bf16") or features.get("amx_bf16") else "fp32"


def measure_chat(task: Task, seeds: int, folder: Path) -> list[Result]:
    """Train every system on the same dialogues once a seed; the order rotates."""
    everything = (QUICKSTART / "train.jsonl").read_text().splitlines()
    rounds = []
    for seed in range(seeds):
        rows = random.Random(seed).sample(everything, task.rows)
        packed = replace(task, seed=seed, pack_tokens=_tokens_of_a_step(task, rows))
        order = CHAT_SYSTEMS[seed % 3 :] + CHAT_SYSTEMS[: seed % 3]
        results = {name: train(name, packed, rows, folder / f"{name}-{seed}") for name in order}
        adapters = [str(folder / f"{name}-{seed}" / "adapter") for name in CHAT_SYSTEMS]
        losses = json.loads(
            _run("heldout.py", task.model, str(QUICKSTART / "eval.jsonl"), *adapters)
        )
        tokens = results["ours"]["tokens"]
        for name, adapter in zip(CHAT_SYSTEMS, adapters, strict=True):
            results[name] |= {
                "tokens": tokens,  # of the same rows, whoever trains on them
                "tokens_per_second": tokens / results[name]["seconds"],
                "heldout_loss": losses[adapter],
            }
        rounds.append({"seed": seed, "base_loss": losses["base"], "pack": packed.pack_tokens})
        rounds[-1] |= results
    return rounds


def measure_uniform(task: Task, pairs: int, folder: Path) -> list[Result]:
    """Train ours and HF Trainer on rows of one length, in pairs; who begins alternates."""
    from pydoc_data.topics import topics

    words = " ".join(topics.values()).split()
    texts = [" ".join(words[start : start + 400]) for start in range(0, len(words) - 400, 400)]
    rows = [json.dumps({"text": text}) for text in texts[:UNIFORM_ROWS]]
    rounds = []
    for seed in range(pairs):
        uniform = replace(task, shape="uniform", seed=seed, pack_tokens=256, rows_per_step=2)
        uniform = replace(uniform, rows=len(rows))
        order = ("ours", "hf_trainer") if seed % 2 else ("hf_trainer", "ours")
        results = {n: train(n, uniform, rows, folder / f"uniform-{n}-{seed}") for n in order}
        for result in results.values():
            result["tokens_per_second"] = result["tokens"] / result["seconds"]
        rounds.append({"seed": seed} | results)
    return rounds


def train(system: str, task: Task, rows: list[str], folder: Path) -> Result:
    """Train one system once; return its result and the peak memory of its largest process."""
    _fresh(folder)
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    task.write(folder)
    log = folder / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "systems.py"), system, str(folder)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{system} failed:\n{log.read_text()[-4000:]}")
    result: Result = json.loads((folder / "result.json").read_text())
    result["peak_memory_bytes"] = usage.ru_maxrss * 1024
    print(f"{system} seed {task.seed} {task.shape}: {result['seconds']:.1f} s", flush=True)
    return result


def ratios(chat: list[Result], uniform: list[Result]) -> dict[str, list[float]]:
    """Return every published ratio, one value a round."""

    def of(rounds: list[Result], key: str, one: str, other: str) -> list[float]:
        return [each[one][key] / each[other][key] for each in rounds]

    return {
        "useful_tokens_per_second_ratio_trl_default": of(
            chat, "tokens_per_second", "ours", "trl_default"
        ),
        "useful_tokens_per_second_ratio_trl_tuned": of(
            chat, "tokens_per_second", "ours", "trl_tuned"
        ),
        "uniform_tokens_per_second_ratio_hf_trainer": of(
            uniform, "tokens_per_second", "ours", "hf_trainer"
        ),
        "peak_memory_ratio_trl_default": of(chat, "peak_memory_bytes", "ours", "trl_default"),
        "heldout_loss_ratio_trl_default": of(chat, "heldout_loss", "ours", "trl_default"),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Return median, least and greatest."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def machine(device: str) -> Result:
    """Describe what the figures were measured on."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return {"cpu": model, "cores": os.cpu_count(), "gpu": gpu, "python": platform.python_version()}


def page(measured: Result) -> str:
    """Return the report for people, as Markdown."""
    chat, uniform = measured["runs"]["chat"], measured["runs"]["uniform"]
    where = measured["machine"]
    lines = [
        "# The trainer beside HF Trainer and TRL",
        "",
        "Written by `make bench-trainer`; every figure is of that one run. Systems take turns, "
        "each run is a process of its own.",
        "",
        f"Machine: {where['cpu']}, {where['cores']} cores, {where['gpu'] or 'no GPU'}; Python "
        f"{where['python']}, computing in {measured['precision']}, "
        + ", ".join(f"{name} {number}" for name, number in measured["versions"].items())
        + f"; commit {measured['commit'][:12]}.",
        "",
        "| ratio, ours / theirs | median | min | max |",
        "|---|---:|---:|---:|",
    ]
    for name, value in measured.items():
        if isinstance(value, dict) and "median" in value:
            cells = " | ".join(f"{value[key]:.3f}" for key in ("median", "min", "max"))
            lines.append(f"| `{name}` | {cells} |")
    lines += [
        "",
        "## Dialogues",
        "",
        f"{len(chat)} seeds, SmolLM2-135M-Instruct, LoRA r {LORA['r']} on all linear layers, "
        f"{measured['precision']}, AdamW at a constant 1e-3, one epoch. TRL's defaults pad 8 rows "
        "and recompute activations; tuned, TRL packs (`bfd`), recomputes nothing and keeps the "
        "base in that precision. A useful token is one of a row, never padding.",
        "",
        "| seed | system | steps | useful tokens/s | peak memory, MiB | held-out loss | isolates |",
        "|---:|---|---:|---:|---:|---:|---|",
    ]
    for each in chat:
        for name in CHAT_SYSTEMS:
            run = each[name]
            lines.append(
                f"| {each['seed']} | {name} | {run['steps']} | {run['tokens_per_second']:.0f} | "
                f"{run['peak_memory_bytes'] / 2**20:.0f} | {run['heldout_loss']:.3f} | "
                f"{'yes' if run['isolates_documents'] else 'no'} |"
            )
    means = {
        name: statistics.mean(each[name]["heldout_loss"] for each in chat) for name in CHAT_SYSTEMS
    }
    lines += [
        "",
        f"Held-out loss of the base model {chat[0]['base_loss']:.3f}; mean over the seeds: "
        + ", ".join(f"{name} {value:.3f}" for name, value in means.items())
        + f"; ours is {means['ours'] / means['trl_default']:.3f} times that of TRL's defaults.",
        "",
        "## Rows of one length",
        "",
        f"{len(uniform)} pairs, {UNIFORM_ROWS} rows of 256 tokens, 2 a step, every token labelled.",
        "",
        "| pair | ours, tokens/s | HF Trainer, tokens/s |",
        "|---:|---:|---:|",
    ]
    lines += [
        f"| {each['seed']} | {each['ours']['tokens_per_second']:.0f} | "
        f"{each['hf_trainer']['tokens_per_second']:.0f} |"
        for each in uniform
    ]
    lines += [
        "",
        "## Checkpoints",
        "",
        f"Seconds the loop is blocked by a save of {measured['checkpoint_mib']} MiB, over those of "
        "a `torch.save` of the same state to the same disk, synced; five rounds in turn.",
    ]
    return "\n".join(lines) + "\n"


def _tokens_of_a_step(task: Task, rows: list[str]) -> int:
    """Return the length of a pack that holds `rows_per_step` rows of average length."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(task.model)
    lengths = []
    for row in map(json.loads, rows):
        messages = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["completion"]},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        lengths.append(len(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return max(max(lengths), round(task.rows_per_step * statistics.mean(lengths)))


def _run(script: str, *arguments: str) -> str:
    return _output(sys.executable, str(HERE / script), *arguments)


def _output(*command: str) -> str:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip().splitlines()[-1]


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    main()
