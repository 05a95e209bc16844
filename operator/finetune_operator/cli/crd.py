"""`ftctl crd`: the CustomResourceDefinition as text, for kubectl and for `crds/`."""

from pathlib import Path
from typing import Annotated

import typer

from finetune_operator.errors import FineTuneError


def crd(
    write: Annotated[
        Path | None,
        typer.Option("--write", "-o", metavar="FILE", help="Write here instead of printing."),
    ] = None,
) -> None:
    """Print the CustomResourceDefinition of FineTuneJob, or write it to a file.

    Apply it with: ftctl crd | kubectl apply -f -
    """
    from finetune_operator.api.crd import crd_yaml

    text = crd_yaml()
    if write is None:
        typer.echo(text, nl=False)
        return
    try:
        write.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FineTuneError(f"{write} cannot be written ({error.strerror})") from error
    typer.echo(f"wrote {write}", err=True)
