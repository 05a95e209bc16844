"""`ftctl dev`: a Kubernetes API and the operator on this machine, for kubectl, without a cluster.

The operator is the same as in a cluster; the API is served by the same process. Jobs run as
processes of this machine.
"""

import asyncio
import shlex
from pathlib import Path
from typing import Annotated

import typer

from finetune_operator.cli.dev_folder import DevFolder


def dev(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="Base folder of file://./x in manifests and of runs/; default: current folder.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port of the API; 0 takes a free one.")
    ] = 0,
    run: Annotated[Path | None, typer.Option("--run", hidden=True)] = None,
    fresh: Annotated[bool, typer.Option("--fresh", hidden=True)] = False,
    plain: Annotated[bool, typer.Option("--plain", hidden=True)] = False,
) -> None:
    """Serve a Kubernetes API with the operator on this machine, for kubectl.

    Jobs of the local backend run here; their files are beside the manifests in FOLDER. The first
    printed line makes kubectl use this API. Ctrl-C once stops all jobs with a checkpoint, twice
    kills them; the next start resumes them. Jobs of a service, such as Azure ML, continue there.
    """
    if run is not None or fresh or plain:
        options = " --fresh" * fresh + " --plain" * plain
        raise typer.BadParameter(
            "ftctl dev serves a folder and runs no job by itself; use: "
            f"ftctl run {shlex.quote(str(run or 'FILE'))}{options}"
        )
    # Imported here because the import of kopf takes half a second, and --help must be fast.
    from finetune_operator.cli.dev_server import serve
    from finetune_operator.kernel.logs import set_up
    from finetune_operator.kernel.settings import LogFormat, LogLevel

    served = DevFolder(folder or Path())
    if not served.base.is_dir():
        raise typer.BadParameter(f"{folder} is not a folder")
    set_up(LogFormat.TEXT, LogLevel.INFO)
    asyncio.run(serve(served, port))
