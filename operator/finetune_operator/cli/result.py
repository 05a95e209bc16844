"""Print the result of a Complete job for `ftctl run`: the losses, and how to use the model."""

import json
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from finetune_operator.cli.run_directories import shown_path
from finetune_trainer.config import Progress, SampleAnswer


@dataclass(frozen=True)
class Outcome:
    """The outcome of a Complete job.

    Attributes:
        progress: The last report of rank 0.
        model: Folder of the exported model.
        is_adapter: Whether the folder holds an adapter, which needs its base model.
        base: Local folder of the base model of an adapter; None if it is on the hub.
        num_tokens: Size of the vocabulary with the tokens that an adapter adds; None without any.
        curves: Folder of the TensorBoard files; None if there are none.
    """

    progress: Progress
    model: Path
    is_adapter: bool
    base: Path | None
    num_tokens: int | None = None
    curves: Path | None = None


def loading_lines(model: str, base: str | None, num_tokens: int | None = None) -> tuple[str, ...]:
    """Return lines of Python that load the model and its tokenizer.

    An adapter of a hub model records the name of its base. An adapter of a local folder records
    the public name of that base for other machines, so the lines name the folder. transformers
    cannot load an adapter with `num_tokens`, the size of a vocabulary with added tokens, so peft
    does; a base with fewer rows is extended first.
    """
    library = "from transformers import AutoModelForCausalLM, AutoTokenizer"
    tokenizer = f"tokenizer = AutoTokenizer.from_pretrained({_quoted(model)})"
    if num_tokens is not None and base is None:
        auto = "AutoPeftModelForCausalLM"
        load = f"model = {auto}.from_pretrained({_quoted(model)})"
        return f"from peft import {auto}", "from transformers import AutoTokenizer", load, tokenizer
    if base is None:
        load = f"model = AutoModelForCausalLM.from_pretrained({_quoted(model)})"
        return library, load, tokenizer
    load = f"model = AutoModelForCausalLM.from_pretrained({_quoted(base)})"
    if num_tokens is None:
        return library, f"{load}; model.load_adapter({_quoted(model)})", tokenizer
    rows = f"max({num_tokens}, model.get_input_embeddings().num_embeddings)"
    resize = f"model.resize_token_embeddings({rows}, mean_resizing=False)"
    adapt = f"model = PeftModel.from_pretrained(model, {_quoted(model)})"
    return "from peft import PeftModel", library, load, resize, adapt, tokenizer


def print_outcome(console: Console, outcome: Outcome, *, chat: str) -> None:
    """Print the losses, the samples, the folder, and how to use the model.

    `chat` is the command that starts a conversation with it.
    """
    for label, value in _figures(outcome):
        # No table is used, because it would wrap a long path that users copy.
        console.print(Text.assemble((f"{label:<16}", "dim"), value), soft_wrap=True)
    for sample in outcome.progress.samples:
        console.print()
        console.print(_sample_table(sample))
    console.print(Text(f"\nChat with it: {chat}"), soft_wrap=True)
    console.print("\nLoad it with:\n")
    base = shown_path(outcome.base) if outcome.base else None
    for line in loading_lines(shown_path(outcome.model), base, outcome.num_tokens):
        # The lines are neither wrapped nor indented, so that they can be copied.
        console.print(Text(line), soft_wrap=True)


def _quoted(text: str) -> str:
    """Write a Python string in double quotes; the escapes of JSON are valid in Python."""
    return json.dumps(text, ensure_ascii=False)


def _figures(outcome: Outcome) -> list[tuple[str, str]]:
    progress = outcome.progress
    rows = []
    if progress.eval_loss is not None and progress.eval_loss_before is not None:
        rows.append(("held-out loss", change(progress.eval_loss_before, progress.eval_loss)))
    elif progress.loss is not None:
        rows.append(("training loss", f"{progress.loss:.3f}"))
    if progress.total_steps is not None:
        steps = f"{progress.step} of {progress.total_steps}"
        if progress.exported_step is not None:
            steps += f"; the model is of step {progress.exported_step}"
        rows.append(("steps", steps))
    if progress.tokens_per_second is not None:
        rows.append(("tokens/s", f"{progress.tokens_per_second:,.0f}"))
    rows.append(("adapter" if outcome.is_adapter else "model", shown_path(outcome.model)))
    if outcome.curves is not None:
        folder = shlex.quote(shown_path(outcome.curves))
        rows.append(("curves", f"{_tensorboard()} --logdir {folder}"))
    return rows


def _tensorboard() -> str:
    """Return the command; as a tool of its own, ftctl does not put TensorBoard on the path."""
    if shutil.which("tensorboard"):
        return "tensorboard"
    return f"{shlex.quote(sys.executable)} -m tensorboard.main"


def change(before: float, after: float) -> str:
    """Format a loss before and after training, with the difference in percent."""
    percent = f" ({(after / before - 1) * 100:+.1f} %)" if before else ""
    return f"{before:.3f} → {after:.3f}{percent}"


def _sample_table(sample: SampleAnswer) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("question", Text(sample.prompt, style="bold"))
    table.add_row("before", Text(sample.before or "-"))
    table.add_row("after", Text(sample.after or "-", style="green"))
    return table
