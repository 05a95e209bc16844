"""`ftctl init`: write a manifest for a model and a data set, with a comment for each choice.

The trainer detects the format of the rows and measures their tokens in a separate process. What is
unclear is a question to the user; the manifest is written only if the trainer accepts every row.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from finetune_operator.api.v1alpha1.method import MethodType
from finetune_operator.cli.init_draft import Wish, drafted
from finetune_operator.cli.init_places import place_of
from finetune_operator.cli.trainer_process import trainer_lines
from finetune_operator.errors import FineTuneError
from finetune_trainer.config import ColumnMap

OPTIONS = {
    "spec.model.source": "--model",
    "spec.dataset.source": "--data",
    "spec.dataset.columns.": "--columns ",
}
"""Fields that the trainer names, by the option that sets them."""


def init(
    model: Annotated[
        str, typer.Option("--model", metavar="FOLDER|NAME", help="Base model, or its hub name.")
    ],
    data: Annotated[
        str,
        typer.Option("--data", metavar="FILE|FOLDER|NAME", help="Rows, or their hub name."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a new file.")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", min=0, max=64, help="GPUs to train on; default: all found here."),
    ] = None,
    method: Annotated[
        MethodType | None,
        typer.Option("--method", help="Default: lora, or qlora if only qlora fits."),
    ] = None,
    columns: Annotated[
        str,
        typer.Option("--columns", metavar="FIELD=COLUMN,…", help="Columns, if init asks for them."),
    ] = "",
) -> None:
    """Write a manifest for a model and a data set, with the reason of each choice.

    The format of the rows is detected. If the columns allow several readings, the message shows
    each with the option that chooses it, and the exit code is 1. Paths in the manifest are relative
    to FILE, and absolute on standard output. No file is overwritten.

    If LoRA does not fit into the memory of this machine's GPUs and QLoRA does, the method is qlora.
    A job that does not fit is written with a warning that names the cheapest change.
    """
    named = _columns(columns)
    base, rows = place_of(model, "--model"), place_of(data, "--data")
    if base.path is not None and not (base.path / "config.json").is_file():
        raise FineTuneError(
            f"--model {model} has no config.json; name a folder written by save_pretrained"
        )
    _refuse_output(output)
    try:
        text, warnings = drafted(
            Wish(base, rows, output, gpus, method, named), trainer_lines, os.environ
        )
    except FineTuneError as error:
        raise FineTuneError(_in_options(str(error))) from error
    for warning in warnings:
        typer.echo(f"warning: {_in_options(warning)}", err=True)
    if output is None:
        typer.echo(text, nl=False)
        return
    _write(output, text)
    typer.echo(f"wrote {output}\nCheck it: ftctl preview {output}\nRun it:   ftctl run {output}")


def _columns(text: str) -> ColumnMap:
    named: dict[str, str] = {}
    for pair in filter(None, text.split(",")):
        field, sign, column = pair.partition("=")
        if not sign or not column or field not in ColumnMap.model_fields or field in named:
            known = " or ".join(ColumnMap.model_fields)
            raise FineTuneError(
                f"--columns {pair} is not FIELD=COLUMN; FIELD is {known}, each once"
            )
        named[field] = column
    return ColumnMap(**named)


def _in_options(sentence: str) -> str:
    """Return a sentence of the trainer with the options of this command for fields."""
    for field, option in OPTIONS.items():
        sentence = sentence.replace(field, option)
    return sentence


def _refuse_output(output: Path | None) -> None:
    """Refuse a file that exists or cannot be written, before rows are read."""
    if output is None:
        return
    if os.path.lexists(output):
        raise FineTuneError(f"{output} exists, and init overwrites no file; choose another name")
    folder = output.parent
    if not folder.is_dir():
        raise FineTuneError(f"{output} cannot be written: {folder} is not a folder")
    if not os.access(folder, os.W_OK):
        raise FineTuneError(f"{output} cannot be written: {folder} is not writable")


def _write(output: Path, text: str) -> None:
    try:
        with output.open("x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:
                output.unlink()
                raise
    except FileExistsError as error:
        raise FineTuneError(f"{output} exists, and init overwrites no file") from error
    except OSError as error:
        raise FineTuneError(f"{output} cannot be written ({error.strerror})") from error
