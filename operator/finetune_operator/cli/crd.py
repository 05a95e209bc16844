"""`ftctl crd`: print the CustomResourceDefinitions, for kubectl and for `crds/`."""

from pathlib import Path
from typing import Annotated

import typer

from finetune_operator.errors import FineTuneError


def crd(
    write: Annotated[
        Path | None,
        typer.Option(
            "--write", "-o", metavar="FOLDER", help="Write one file per definition to this folder."
        ),
    ] = None,
) -> None:
    """Print the CustomResourceDefinitions of FineTuneJob and FineTuneProfile, or write them.

    Apply them with: ftctl crd | kubectl apply -f -
    """
    from finetune_operator.api.crd import crd_files

    for name, text in crd_files().items():
        if write is None:
            typer.echo(text, nl=False)
            continue
        file = write / name
        try:
            write.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise FineTuneError(f"{file} cannot be written ({error.strerror})") from error
        typer.echo(f"wrote {file}", err=True)
