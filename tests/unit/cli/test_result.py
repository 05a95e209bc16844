"""What `ftctl run` prints at the end."""

import ast
import io
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finetune_operator.cli.result import Outcome, change, loading_lines, print_outcome
from finetune_trainer.config import Progress, SampleAnswer


def printed(outcome: Outcome, width: int = 80) -> str:
    out = io.StringIO()
    print_outcome(Console(file=out, width=width), outcome, chat="ftctl chat job.yaml")
    return out.getvalue()


def outcome(**changes: Any) -> Outcome:
    progress = Progress(
        step=32,
        total_steps=32,
        eval_loss_before=2.105,
        eval_loss=1.415,
        tokens_per_second=1234,
        samples=(SampleAnswer(prompt="What is RAM?", before="A [bold]sheep", after="Memory"),),
    )
    values: dict[str, Any] = {
        "progress": progress,
        "model": Path("/m/out"),
        "is_adapter": True,
        "base": None,
    }
    return Outcome(**{**values, **changes})


def test_outcome_tells_what_changed_and_where_the_adapter_is() -> None:
    lines = [line.split() for line in printed(outcome()).splitlines()]

    assert ["held-out", "loss", "2.105", "→", "1.415", "(-32.8", "%)"] in lines
    assert ["tokens/s", "1,234"] in lines
    assert ["adapter", "/m/out"] in lines
    assert ["question", "What", "is", "RAM?"] in lines
    # An answer is text, never markup.
    assert ["before", "A", "[bold]sheep"] in lines
    assert ["after", "Memory"] in lines


def test_outcome_names_the_step_of_the_exported_weights() -> None:
    progress = Progress(step=7, total_steps=7, exported_step=5)
    lines = [line.split() for line in printed(outcome(progress=progress)).splitlines()]
    assert ["steps", "7", "of", "7;", "the", "model", "is", "of", "step", "5"] in lines


def test_outcome_without_held_out_rows_tells_the_training_loss() -> None:
    text = printed(outcome(progress=Progress(loss=1.5)))

    assert "training loss" in text
    assert "held-out" not in text


def test_outcome_names_the_command_that_shows_the_curves() -> None:
    folder = Path("/a run/" + "very-long-folder-name/" * 8)
    text = printed(outcome(curves=folder), width=40)
    [(command, shown)] = re.findall(r"curves +(.*) --logdir (.*)", text)
    assert shown == f"'{folder}'"
    done = subprocess.run([*shlex.split(command), "--help"], capture_output=True, text=True)
    assert "--logdir" in done.stdout, done.stderr
    assert "curves" not in printed(outcome())


def test_what_is_to_be_copied_is_never_wrapped() -> None:
    folder = Path("/a/" + "very-long-folder-name/" * 8)

    text = printed(outcome(model=folder), width=40)

    assert f'AutoTokenizer.from_pretrained("{folder}")' in text
    assert "Chat with it: ftctl chat job.yaml" in text.splitlines()
    assert ["adapter", str(folder)] in [line.split() for line in text.splitlines()]


@pytest.mark.parametrize(
    "folder", ["out", 'a "quoted" folder', "back\\slash", "ünï cödé"], ids=["plain", *"qbu"]
)
def test_loading_lines_are_three_lines_of_python_whatever_the_folder_is_called(
    folder: str,
) -> None:
    lines = loading_lines(folder, base=folder)

    tree = ast.parse("\n".join(lines))
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert len(lines) == 3
    assert strings == [folder] * 3


def test_an_adapter_of_a_hub_model_finds_its_base_by_itself() -> None:
    assert "load_adapter" not in loading_lines("out", base=None)[1]


def test_change_is_in_percent() -> None:
    assert change(2.0, 1.0) == "2.000 → 1.000 (-50.0 %)"
