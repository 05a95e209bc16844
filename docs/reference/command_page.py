"""Write `ftctl.md` from the commands of the CLI; `generate` calls it.

It reads the declared options, not the help, whose form depends on the versions of typer and click.
"""

import inspect
from collections.abc import Callable
from enum import StrEnum
from importlib import import_module
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo, OptionInfo, ParameterInfo

from field_table import escaped
from finetune_operator.cli.app import COMMANDS

_HEAD = """\
# ftctl

Generated from the commands in `finetune_operator/cli`; `make generate` writes it.

`ftctl --version` prints the version, `ftctl --install-completion` sets up completion in your
shell, and `ftctl COMMAND --help` prints the text below. Installed beside kubectl, the same commands
are `kubectl ftjob COMMAND`.
"""


def page() -> str:
    """Return the reference of the commands as Markdown."""
    index = [f"| [`ftctl {name}`](#ftctl-{name}) | {text} |" for name, text in COMMANDS.items()]
    parts = [_HEAD, "| Command | Purpose |", "|---|---|", *index, ""]
    for name in COMMANDS:
        command = getattr(import_module(f"finetune_operator.cli.{name}"), name)
        parts += _section(name, command)
    return "\n".join(parts)


def _section(name: str, command: Callable[..., None]) -> list[str]:
    """Return the lines of a command: usage, description, arguments and options."""
    hints = get_type_hints(command, include_extras=True)
    arguments, options, usage = list[str](), list[str](), [f"ftctl {name} [OPTIONS]"]
    for parameter in inspect.signature(command).parameters.values():
        info, type_ = _declared(hints[parameter.name])
        if info.hidden:
            continue
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        is_required = parameter.default is inspect.Parameter.empty
        repeats = " Repeatable." if _is_list(type_) and "repeatable" not in str(info.help) else ""
        text = escaped(f"{info.help or ''}{_limits(info)}{repeats}")
        shown = "required" if is_required else _default(default)
        if isinstance(info, OptionInfo):
            options.append(f"| {_option(parameter.name, info, type_)} | {shown} | {text} |")
            continue
        word = info.metavar or parameter.name.upper()
        usage.append((word if is_required else f"[{word}]") + ("..." if _is_list(type_) else ""))
        arguments.append(f"| <code>{escaped(word)}</code> | {shown} | {text} |")
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    lines = [f"## ftctl {name}\n", f"```text\n{' '.join(usage)}\n```\n"]
    lines += [f"{escaped(' '.join(one.split()))}\n" for one in paragraphs]
    for title, rows in (("Argument", arguments), ("Option", options)):
        if rows:
            lines += [f"| {title} | Default | Description |", "|---|---|---|", *rows, ""]
    return lines


def _declared(hint: Any) -> tuple[ParameterInfo, Any]:
    """Return the declaration of an option or argument, and its type without None."""
    if get_origin(hint) is not Annotated:
        raise TypeError(f"{hint} declares neither an option nor an argument")
    type_, *metadata = get_args(hint)
    info = next(one for one in metadata if isinstance(one, OptionInfo | ArgumentInfo))
    if get_origin(type_) in (Union, UnionType):
        type_ = next(one for one in get_args(type_) if one is not NoneType)
    return info, type_


def _is_list(type_: Any) -> bool:
    return get_origin(type_) is list


def _option(name: str, info: OptionInfo, type_: Any) -> str:
    # Within Annotated, the first name is the parameter that is a default elsewhere.
    declared = [one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str)]
    names = ", ".join(f"`{one}`" for one in declared or [f"--{name.replace('_', '-')}"])
    value = info.metavar or _value(type_)
    return f"{names} <code>{escaped(value)}</code>" if value else names


def _value(type_: Any) -> str:
    """Return the word for the value of an option without a metavar; empty for a flag."""
    if isinstance(type_, type) and issubclass(type_, StrEnum):
        return "|".join(type_)
    return {bool: "", int: "NUMBER", float: "NUMBER"}.get(type_, "TEXT")


def _limits(info: ParameterInfo) -> str:
    low, high = info.min, info.max
    if low is not None and high is not None:
        return f" From {low:g} to {high:g}."
    return "" if low is None else f" At least {low:g}."


def _default(value: Any) -> str:
    if value is None or value is False or value in ("", []):
        return ""
    return f"`{value:g}`" if isinstance(value, int | float) else f"`{value}`"
