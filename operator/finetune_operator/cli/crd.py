"""`ftctl crd`: print the CustomResourceDefinitions, for kubectl and for `crds/`."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from finetune_operator.errors import FineTuneError


class Format(StrEnum):
    """Formats of the definitions."""

    CRD = "crd"
    JSONSCHEMA = "jsonschema"


def crd(
    form: Annotated[
        Format,
        typer.Option(
            "--format", help="crd for the API server, jsonschema for editors and other tools."
        ),
    ] = Format.CRD,
    write: Annotated[
        Path | None,
        typer.Option("--write", "-o", metavar="FOLDER", help="Write one file per kind."),
    ] = None,
) -> None:
    """Print the definitions of FineTuneJob and FineTuneProfile, or write them.

    Apply them with: ftctl crd | kubectl apply -f -

    With --format jsonschema, print one JSON schema for both kinds, or write one for each kind. An
    editor finds the schema by a comment in the first line of a manifest, which the reference shows.
    """
    if write is not None:
        _write(_files(form), write)
    elif form is Format.CRD:
        typer.echo("".join(_files(form).values()), nl=False)
    else:
        from finetune_operator.api.json_schema import schema_of_both

        typer.echo(_json(schema_of_both()), nl=False)


def _files(form: Format) -> dict[str, str]:
    if form is Format.CRD:
        from finetune_operator.api.crd import crd_files

        return crd_files()
    from finetune_operator.api.json_schema import json_schemas

    return {name: _json(schema) for name, schema in json_schemas().items()}


def _json(schema: object) -> str:
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _write(files: dict[str, str], folder: Path) -> None:
    for name, text in files.items():
        file = folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise FineTuneError(f"{file} cannot be written ({error.strerror})") from error
        typer.echo(f"wrote {file}", err=True)
