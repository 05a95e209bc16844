"""`ftctl`: the table of its commands, and the only place that turns an error into an exit code.

Each command is a function in a file of the same name, imported when it is called, so that
`ftctl --help` loads neither pydantic nor a backend.
"""

import shutil
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from finetune_operator import __version__
from finetune_operator.cli.output import OutputLostError, guard
from finetune_operator.errors import FineTuneError
from finetune_operator.extras import sentence

COMMANDS = {
    "init": "Write a manifest for a model and a data set.",
    "run": "Run a job on this machine and follow it.",
    "dev": "Serve a Kubernetes API with the operator on this machine.",
    "chat": "Converse with the base model and the trained one.",
    "preview": "Show the first rows as the trainer sees them.",
    "validate": "Print every problem of manifests.",
    "plan": "Forecast memory, speed and price on GPU sizes.",
    "render": "Print the exact request without sending it.",
    "top": "Show all jobs, or the ranks of one job.",
    "profile": "Record a profile of a running job.",
    "logs": "Print the log of one rank of a job.",
    "doctor": "Check this machine, a cluster or Azure ML.",
    "crd": "Print or write the CustomResourceDefinition.",
}
"""Summaries for `ftctl --help`; the help of a command is the docstring of its function."""
_WIDEST = 100  # longer lines are hard to read


class Command(TyperCommand):
    """A command whose help fits the terminal."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        _fit(formatter)
        super().format_help(ctx, formatter)


class LazyGroup(TyperGroup):
    """Shows placeholders in help and completion; imports the real command when it is called."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        _fit(formatter)
        super().format_help(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve the command that the first argument names, and import it."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            command = _load(name)
        return name, command, rest


def _fit(formatter: Any) -> None:
    """Wrap lines for the width of the terminal; names longer than a third have their own line."""
    formatter.width = min(shutil.get_terminal_size().columns, _WIDEST)
    formatter.write_dl = partial(formatter.write_dl, col_max=formatter.width // 3)


def _load(name: str) -> Any:
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, cls=Command)(getattr(import_module(f"finetune_operator.cli.{name}"), name))
    return typer.main.get_command(single)


def _listed_only() -> None:
    """Serve as a placeholder of a command in help; `LazyGroup` never calls it."""


def _version(is_asked: bool) -> None:
    if is_asked:
        print(f"ftctl {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")
    ] = False,
) -> None:
    """Declare the options of `ftctl` itself; each has a callback."""


def _make_app() -> typer.Typer:
    root = typer.Typer(
        name="ftctl",
        cls=LazyGroup,
        help="Fine-tune language models from one manifest.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        # Tables of rich cut words in a narrow terminal, and docstrings keep their line breaks.
        rich_markup_mode=None,
    )
    root.callback()(_options)
    for name, summary in COMMANDS.items():
        root.command(name, short_help=summary)(_listed_only)
    return root


app = _make_app()


def main() -> None:
    """Run `ftctl`; a `FineTuneError` prints its message to standard error and exits with 1."""
    out = guard()
    try:
        code = _run()
        sys.stdout.flush()
    except OutputLostError as error:
        out.drop()
        error.report()
        code = error.code
    sys.exit(code)


def _program() -> str:
    """Return the name that the user typed: `kubectl ftjob` for a plugin of kubectl."""
    name = Path(sys.argv[0]).name
    return name.replace("-", " ", 1) if name.startswith("kubectl-") else "ftctl"


def _run() -> Any:
    try:
        app(prog_name=_program())
    except SystemExit as end:  # click exits this way
        return end.code
    # An OSError means that the current folder was removed, or that a name is too long.
    except (FineTuneError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        named = next((word for word in sys.argv[1:] if word in COMMANDS), "")
        if (message := sentence(f"{_program()} {named}".strip(), error)) is None:
            raise
        print(message, file=sys.stderr)
        return 1
    return 0
