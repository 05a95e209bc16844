"""`ftctl dev --run FILE`, which is `make run`: apply one job, follow it, and end with it."""

import asyncio
import shlex
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.backends.base import Observation
from finetune_operator.cli.conclusion import Conclusion
from finetune_operator.cli.dev_apply import ApplyError, DevJob
from finetune_operator.cli.dev_folder import DevFolder
from finetune_operator.cli.dev_server import DevServer, serving
from finetune_operator.cli.dev_stop import resume
from finetune_operator.cli.live import LiveScreen
from finetune_operator.cli.plain import PlainScreen
from finetune_operator.cli.screen import make_screen, stopping
from finetune_operator.cli.target import open_target
from finetune_operator.cli.unheard import heard
from finetune_operator.cli.view import View, look
from finetune_operator.errors import TransientError
from finetune_operator.kernel.logs import LogFile, set_up
from finetune_operator.kernel.settings import LogFormat
from finetune_operator.reconcile.attempts import handle_of
from finetune_operator.reconcile.conditions import ConditionType, find, is_finished, is_settled

_LOOK_SECONDS = 0.5


def run_one(file: Path, *, port: int, fresh: bool, plain: bool) -> None:
    """Run the job in `file` through the operator and follow it to its end.

    Args:
        file: The manifest.
        port: Port of the API; 0 takes a free one.
        fresh: Start anew though the job is not over.
        plain: Print lines, also on a terminal.

    Raises:
        FineTuneError: it is refused.
        typer.Exit: it is not Complete; with the exit code that says why.
    """
    start = time.monotonic()
    target = open_target(file, runs_here=True)
    target.refuse(target.backend.check_inputs(target.job))
    console = Console(highlight=False)
    again = f"ftctl dev --run {shlex.quote(str(target.manifest.path))}"

    async def work() -> tuple[FineTuneJob, View]:
        folder = DevFolder(target.manifest.directory)
        async with serving(folder, port) as server:
            set_up(LogFormat.TEXT, "INFO", LogFile(folder.log))
            job = DevJob(server.client, target)
            if note := await job.make_room(fresh=fresh):
                console.print(Text(note), soft_wrap=True)
            console.print(Text(await job.apply(folder.kubeconfig)))
            console.print(Text(f"kubectl sees it, too: {folder.export}"), soft_wrap=True)
            first = look(await job.read(), None)
            if not target.job.spec.suspend:
                await resume(server.client, job.key)
            with make_screen(console, first, plain=plain) as screen:
                return await heard(
                    _follow(server, job, screen, first),
                    is_stopping=server.signals.asked.is_set,
                    name=first.name,
                    again=again,
                )

    job, last = asyncio.run(work())
    Conclusion(target, job, last, time.monotonic() - start, again).tell(console)


async def _follow(
    server: DevServer, job: DevJob, screen: LiveScreen | PlainScreen, first: View
) -> tuple[FineTuneJob, View]:
    """Show the job until it is over, or until the user has stopped it."""
    over = asyncio.create_task(_until_over(server, job, screen, first))
    asked = asyncio.create_task(server.signals.asked.wait())
    try:
        await server.until(over, asked)
        if not over.done():
            screen.note(stopping(job.target.job.spec.deadlines.termination_grace_seconds))
        await server.stop_jobs(screen.note)
        return await over
    finally:
        over.cancel()
        asked.cancel()


async def _until_over(
    server: DevServer, job: DevJob, screen: LiveScreen | PlainScreen, last: View
) -> tuple[FineTuneJob, View]:
    while True:
        now = await job.read()
        # What was said of an older spec, such as that it is suspended, is not true any more.
        if is_finished(now.status) or now.status.observed_generation >= now.metadata.generation:
            last = look(now, await _seen(server, now), last)
            screen.show(last)
            if is_settled(now.status):
                return now, last
            stalled = find(now.status, ConditionType.STALLED)
            if stalled is not None and stalled.status == "True":
                raise ApplyError(stalled.message)
        await asyncio.sleep(_LOOK_SECONDS)


async def _seen(server: DevServer, job: FineTuneJob) -> Observation | None:
    """Look at the attempt itself: the status tells of progress more seldom, and less."""
    handle = handle_of(job.status)
    if handle is None:
        return None
    try:
        return await server.backend.observe(handle)
    except TransientError:
        return None
