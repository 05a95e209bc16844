"""The API and the operator of `ftctl dev`, in this process: started together, ended together."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import yaml

from finetune_operator.api.crd import custom_resource_definition, profile_definition
from finetune_operator.backends.base import BackendContext
from finetune_operator.backends.local.backend import TRAINER
from finetune_operator.cli.dev_folder import DevFolder
from finetune_operator.cli.dev_stop import resume_all, stop_all
from finetune_operator.cli.folder_backend import FolderBackend
from finetune_operator.cli.stop_signals import StopSignals
from finetune_operator.embedded.server import EmbeddedApi
from finetune_operator.errors import FineTuneError
from finetune_operator.kernel.run import operate
from finetune_operator.kernel.settings import Settings
from finetune_operator.kernel.surroundings import Surroundings
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.http import HttpClient

log = logging.getLogger(__name__)

_KILL_SECONDS = 30


class DevServerError(FineTuneError):
    """The API or the operator cannot be started."""


@dataclass(frozen=True)
class DevServer:
    """What runs.

    Attributes:
        client: Access to the API.
        backend: Runs the attempts of jobs of this machine.
        operator: Ends before it is asked to only by an error.
        signals: What the user asked for.
    """

    client: KubeClient
    backend: FolderBackend
    operator: "asyncio.Task[None]"
    signals: StopSignals

    async def until(self, *tasks: "asyncio.Task[Any]") -> None:
        """Return when one of the tasks has ended; what ends the operator is raised."""
        await asyncio.wait({*tasks, self.operator}, return_when=asyncio.FIRST_COMPLETED)
        if self.operator.done():
            self.operator.result()
            raise DevServerError("the operator ended by itself; its log tells more")

    async def stop_jobs(self, say: Callable[[str], object]) -> None:
        """Stop all jobs with a checkpoint, and kill them when the user insists.

        Args:
            say: Called with what happens, a sentence at a time.
        """
        stopped = asyncio.create_task(stop_all(self.client))
        forced = asyncio.create_task(self.signals.forced.wait())
        try:
            await self.until(stopped, forced)
            if not stopped.done():
                say("killing it now")
                async with asyncio.timeout(_KILL_SECONDS):
                    await self.until(stopped)
            await stopped
        except TimeoutError:
            say(f"something still runs after {_KILL_SECONDS} s; the next start finds it")
        finally:
            stopped.cancel()
            forced.cancel()


@asynccontextmanager
async def serving(
    folder: DevFolder, port: int, *, command: Sequence[str] = TRAINER
) -> AsyncIterator[DevServer]:
    """Run API and operator inside the block; attempts that run at its end run on.

    Args:
        folder: The folder that is served; nobody else does inside the block.
        port: Port of the API on the loopback address; 0 takes a free one.
        command: What a node of a job runs.

    Raises:
        DevFolderError: another process serves it, or it cannot be written.
        DevServerError: the port is taken.
        StateError: the stored objects cannot be read.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(folder.held())
        definitions = (custom_resource_definition(), profile_definition())
        api = EmbeddedApi(definitions, port=port, state=folder.state)
        try:
            await stack.enter_async_context(api)
        except OSError as error:
            said = os.strerror(error.errno) if error.errno else str(error)
            raise DevServerError(
                f"--port {port} cannot be used ({said}); choose another, or 0 for a free one"
            ) from error
        folder.write_kubeconfig(yaml.safe_dump(api.kubeconfig(), sort_keys=False))
        client = await HttpClient.connect(str(folder.kubeconfig))
        await stack.enter_async_context(client)
        signals = StopSignals()
        signals.listen()
        context = BackendContext(folder.base, dict(os.environ))
        backend = FolderBackend(context, is_forced=signals.forced.is_set, command=command)
        stack.callback(backend.release_all)
        surroundings = Surroundings(folder.base, {backend.name: backend})
        stop = asyncio.Event()
        operator = asyncio.create_task(operate(_settings(folder), stop, surroundings))
        try:
            yield DevServer(client, backend, operator, signals)
        finally:
            stop.set()
            await operator


async def serve(folder: DevFolder, port: int, *, command: Sequence[str] = TRAINER) -> None:
    """Serve a folder until Ctrl-C; its first line on standard output is `DevFolder.export`.

    Raises:
        DevFolderError, DevServerError, StateError: as `serving`.
    """
    async with serving(folder, port, command=command) as server:
        print(folder.export, flush=True)  # where it cannot be, no job is resumed
        await resume_all(server.client)
        log.info("serving", extra={"folder": str(folder.base)})
        await server.until(asyncio.create_task(server.signals.asked.wait()))
        log.info("stopping all jobs after a checkpoint; Ctrl-C again kills them")
        await server.stop_jobs(log.warning)


def _settings(folder: DevFolder) -> Settings:
    return Settings(
        kubeconfig=str(folder.kubeconfig),
        leader_election=False,  # the lock on the folder is as good
        identity="ftctl-dev",
        lease_namespace="default",
        health_host="127.0.0.1",
        health_port=0,
    )
