"""`ftctl preview`: show the first rows as the trainer will see them.

The trainer's code prepares the rows in a separate process; `ftctl` never imports the trainer.
"""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from finetune_operator.api.paths import show_count
from finetune_operator.cli.hub import without_silent_hub
from finetune_operator.cli.target import BackendOption, FileArgument, open_target
from finetune_operator.cli.trainer_process import PREVIEW, config_of, trainer_lines
from finetune_trainer.config import DataReport

_READ = ("spec.backend.type", "spec.model", "spec.dataset")


def preview(
    file: FileArgument,
    rows: Annotated[int, typer.Option(min=1, max=1000, help="Rows to show.")] = 3,
    backend: BackendOption = None,
) -> None:
    """Show the first rows as the trainer will see them: decoded, with the label tokens marked.

    Label tokens, which the loss is computed on, are green on a terminal and in [[ ]] elsewhere.
    """
    target = without_silent_hub(open_target(file, backend, runs_here=True))
    # Other problems do not matter: a preview reads these inputs, writes a cache, and never trains.
    found = target.backend.check_inputs(target.job)
    target.refuse(one for one in found if not one.path or one.path.startswith(_READ))
    console = Console(highlight=False, soft_wrap=True)
    config, environ = config_of(target), target.context.environ
    for line in trainer_lines(PREVIEW, config, environ, "--rows", str(rows)):
        if "report" in line:
            for sentence in _summary(line, config.data.eval_share):
                console.print(sentence)
        else:
            console.print(_row(line, is_terminal=console.is_terminal))


def _row(line: dict[str, Any], *, is_terminal: bool) -> Text:
    facts = f"{line['where']}: {show_count(line['tokens'], 'token')}, "
    facts += show_count(line["label_tokens"], "label")
    if line["truncated"]:
        facts += f", truncated from {'more than ' * line['is_cut']}{line['row_tokens']}"
    elif line["sequences"] != 1:
        facts += f", {line['sequences']} sequences"
    text = Text.assemble((facts, "bold"), "\n")
    for sequence in line["pieces"]:
        for piece, is_label in sequence:
            if not is_label:
                text.append(piece, style="dim")
            elif is_terminal:
                text.append(piece, style="green")
            else:
                text.append(f"[[{piece}]]")
        text.rstrip()
        text.append("\n")
    return text


def _summary(line: dict[str, Any], eval_share: float | None) -> list[str]:
    train = DataReport.model_validate(line["report"])
    sentences = ["train: " + _counts(train)]
    if "eval_report" in line:
        held_out = DataReport.model_validate(line["eval_report"])
        sentences.append("eval: " + _counts(held_out))
        if eval_share is not None:
            total = show_count(train.rows + held_out.rows, "row")
            sentences.append(f"evalShare {eval_share:g} holds out {held_out.rows:,} of {total}")
    sentences.append(
        f"{show_count(line['total_steps'], 'optimizer step')}; maxSeqLength {line['max_seq_len']}"
    )
    if line["unread_columns"]:
        sentences.append(f"columns that are not read: {', '.join(line['unread_columns'])}")
    reports = [
        DataReport.model_validate(line[key]) for key in ("report", "eval_report") if key in line
    ]
    warnings = [*(one for report in reports for one in report.warnings), *line["warnings"]]
    sentences += [f"warning: {warning}" for warning in warnings]
    return sentences


def _counts(report: DataReport) -> str:
    facts = [
        show_count(report.rows, "row"),
        show_count(report.sequences, "sequence"),
        show_count(report.tokens, "token"),
        show_count(report.label_tokens, "label"),
        f"{report.truncated_rows:,} truncated",
        f"{report.split_rows:,} split",
        f"{report.rows_without_labels:,} without labels",
    ]
    if report.packs:
        facts.append(f"{show_count(report.packs, 'pack')}, {report.fill_ratio:.0%} full")
    return ", ".join(facts)
