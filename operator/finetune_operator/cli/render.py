"""`ftctl render`: print the exact request that a backend would send, without sending it."""

import json
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer
import yaml

from finetune_operator.backends.base import Attempt, Request
from finetune_operator.cli.output import takes_unicode
from finetune_operator.cli.target import BackendOption, FileArgument, ProfileOption, open_target


class RequestFormat(StrEnum):
    """Output format of a request."""

    YAML = "yaml"
    JSON = "json"


def render(
    file: FileArgument,
    backend: BackendOption = None,
    profile: ProfileOption = None,
    attempt: Annotated[int, typer.Option(min=1, help="Number of the attempt.")] = 1,
    output: Annotated[
        RequestFormat, typer.Option("-o", "--output", help="yaml or json.")
    ] = RequestFormat.YAML,
) -> None:
    """Print the exact request of one attempt, with the reason for each choice of the planner.

    The command neither sends nor writes the request. In YAML, each object is a document and the
    reasons are comments; JSON contains the whole request. The job's uid is empty, because it is
    assigned on submission.
    """
    target = open_target(file, backend, profile=profile)
    request = target.backend.render(target.plan, Attempt(attempt))
    if output is RequestFormat.JSON:
        print(json.dumps(asdict(request), indent=2, ensure_ascii=not takes_unicode()))
    else:
        print(_as_yaml(request, target.plan.reasons), end="")


def _as_yaml(request: Request, reasons: tuple[str, ...]) -> str:
    heading = f"# backend {request.backend}, attempt {request.attempt}, name {request.name}\n"
    heading += "".join(f"# {reason}\n" for reason in reasons)
    documents = yaml.safe_dump_all(
        [json.loads(json.dumps(thing)) for thing in request.objects],
        sort_keys=False,
        allow_unicode=takes_unicode(),
        explicit_start=True,
    )
    return heading + str(documents)
