"""The API and the operator of `ftctl dev`, in this process: started together, ended together."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import yaml

from finetune_operator.api.crd import custom_resource_definition, profile_definition
from finetune_operator.backends import registry
from finetune_operator.backends.base import Backend, BackendContext
from finetune_operator.backends.local.backend import TRAINER
from finetune_operator.cli.dev_backend import DevBackend
from finetune_operator.cli.dev_folder import DevFolder
from finetune_operator.cli.dev_stop import StopSignals, resume_all, suspend_all, until_stopped
from finetune_operator.embedded.server import EmbeddedApi
from finetune_operator.errors import FineTuneError
from finetune_operator.kernel.run import operate
from finetune_operator.kernel.settings import Settings
from finetune_operator.kernel.surroundings import Surroundings
from finetune_operator.kube.client import KubeClient

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
    backend: DevBackend
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
        waited = await suspend_all(self.client)
        stopped = asyncio.create_task(until_stopped(self.client, waited))
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
    folder: DevFolder, port: int, signals: StopSignals, *, command: Sequence[str] = TRAINER
) -> AsyncIterator[DevServer]:
    """Run API and operator inside the block; attempts that run at its end run on.

    Args:
        folder: Held by the caller.
        port: Port of the API on the loopback address; 0 takes a free one.
        signals: What the user asks for.
        command: What a node of a job runs.

    Raises:
        DevServerError: the port is taken, or the stored objects cannot be read.
    """
    api = _api(folder, port)
    try:
        await api.__aenter__()
    except OSError as error:
        said = os.strerror(error.errno) if error.errno else str(error)
        raise DevServerError(
            f"--port {port} cannot be used ({said}); choose another, or 0 for a free one"
        ) from error
    try:
        folder.write_kubeconfig(yaml.safe_dump(api.kubeconfig(), sort_keys=False))
        client = await KubeClient.connect(str(folder.kubeconfig))
        context = BackendContext(folder.base, dict(os.environ))
        backend = DevBackend(context, is_forced=signals.forced.is_set, command=command)
        surroundings = Surroundings(folder.base, _backends(context, backend))
        stop = asyncio.Event()
        operator = asyncio.create_task(operate(_settings(folder), stop, surroundings))
        try:
            async with client:
                yield DevServer(client, backend, operator, signals)
        finally:
            stop.set()
            await operator
            backend.release_all()
    finally:
        await api.__aexit__(None, None, None)


def _api(folder: DevFolder, port: int) -> EmbeddedApi:
    definitions = (custom_resource_definition(), profile_definition())
    try:
        return EmbeddedApi(definitions, port=port, state=folder.state)
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise DevServerError(
            f"{folder.state} cannot be read ({error}); restore it, or remove it, with which its "
            "jobs are forgotten, and their files stay"
        ) from error


async def serve(folder: DevFolder, port: int, *, command: Sequence[str] = TRAINER) -> None:
    """Serve a folder until Ctrl-C; its first line on standard output is `DevFolder.export`.

    Raises:
        DevFolderError: another process serves it, or it cannot be written.
        DevServerError: as `serving`.
    """
    signals = StopSignals()
    with folder.held():
        async with serving(folder, port, signals, command=command) as server:
            await resume_all(server.client)
            print(folder.export, flush=True)
            log.info("serving", extra={"folder": str(folder.base)})
            await server.until(asyncio.create_task(signals.asked.wait()))
            log.info("stopping all jobs after a checkpoint; Ctrl-C again kills them")
            await server.stop_jobs(log.warning)


def _backends(context: BackendContext, local: DevBackend) -> dict[str, Backend]:
    """Return what can run jobs without a cluster: there are no pods here."""
    found: dict[str, Backend] = {local.name: local}
    for name in registry.available():
        kind = registry.load(name)
        if name not in found and not kind.watches:
            found[name] = kind(context)
    return found


def _settings(folder: DevFolder) -> Settings:
    return Settings(
        kubeconfig=str(folder.kubeconfig),
        leader_election=False,  # the lock on the folder is as good
        identity="ftctl-dev",
        lease_namespace="default",
        health_host="127.0.0.1",
        health_port=0,
    )
