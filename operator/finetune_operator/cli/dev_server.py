"""Run the API and the operator of `ftctl dev` in this process, from start to stop."""

import asyncio
import copy
import logging
import os
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import yaml

from finetune_operator.api.crd import custom_resource_definition, profile_definition
from finetune_operator.backends import registry
from finetune_operator.backends.base import Backend, BackendContext
from finetune_operator.backends.local.backend import TRAINER
from finetune_operator.cli.dev_folder import DevFolder
from finetune_operator.cli.dev_stop import resume_all, running_elsewhere, stop_all
from finetune_operator.cli.folder_backend import FolderBackend
from finetune_operator.cli.stop_signals import StopSignals
from finetune_operator.embedded.server import EmbeddedApi
from finetune_operator.errors import FineTuneError
from finetune_operator.kernel.run import operate
from finetune_operator.kernel.settings import Settings
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.http import HttpClient

log = logging.getLogger(__name__)

_KILL_SECONDS = 30


class DevServerError(FineTuneError):
    """The API or the operator cannot be started."""


async def serve(folder: DevFolder, port: int, *, command: Sequence[str] = TRAINER) -> None:
    """Serve a folder until Ctrl-C; the first line on standard output is `DevFolder.export`.

    Attempts that are still running at the end continue to run.

    Args:
        folder: The folder; locked while it is served.
        port: Port of the API on the loopback address; 0 takes a free one.
        command: Command of a node.

    Raises:
        DevFolderError: another process serves the folder, or it cannot be written.
        DevServerError: the port is taken, or the operator terminated unexpectedly.
        StateError: the stored objects cannot be read.
    """
    signals, stop = StopSignals(), asyncio.Event()
    context = BackendContext(folder.base, dict(os.environ))
    backend = FolderBackend(context, is_forced=signals.forced.is_set, command=command)
    others = registry.without_cluster(apart_from=backend.name)
    backends: dict[str, Backend | type[Backend]] = {backend.name: backend, **others}
    here = {name for name, one in backends.items() if one.runs_on_this_machine}
    async with AsyncExitStack() as stack:
        stack.enter_context(folder.held())
        await stack.enter_async_context(_api(folder, port))
        client = await HttpClient.connect(str(folder.kubeconfig))
        await stack.enter_async_context(client)
        signals.listen()
        stack.callback(backend.release_all)
        work = operate(_settings(folder), stop, backends=backends, folder=folder.base)
        operator = asyncio.create_task(work)
        try:
            print(folder.export, flush=True)  # if this fails, no job is resumed
            await resume_all(client)
            log.info("serving", extra={"folder": str(folder.base)})
            await _first_of(operator, asyncio.create_task(signals.asked.wait()))
            log.info("stopping all jobs after a checkpoint; Ctrl-C again kills them")
            await _stop_jobs(client, operator, signals, here)
        finally:
            stop.set()
            await operator


def _with_local_backend(definition: dict[str, Any]) -> dict[str, Any]:
    """Return the CRD in which a job without `spec.backend` runs on this machine."""
    changed = copy.deepcopy(definition)
    for version in changed["spec"]["versions"]:
        spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
        spec["properties"]["backend"]["default"] = {"type": "local"}
    return changed


@asynccontextmanager
async def _api(folder: DevFolder, port: int) -> AsyncIterator[None]:
    definitions = (_with_local_backend(custom_resource_definition()), profile_definition())
    api = EmbeddedApi(definitions, port=port, state=folder.state)
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(api)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise DevServerError(
                f"--port {port} cannot be used ({reason}); choose another, or 0 for a free one"
            ) from error
        folder.write_kubeconfig(yaml.safe_dump(api.kubeconfig(), sort_keys=False))
        yield


async def _first_of(operator: "asyncio.Task[None]", *tasks: "asyncio.Task[Any]") -> None:
    """Wait for the first of the tasks; the end of the operator is an error."""
    await asyncio.wait({operator, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    if operator.done():
        operator.result()
        raise DevServerError("the operator terminated unexpectedly; see its log")


async def _stop_jobs(
    client: KubeClient, operator: "asyncio.Task[None]", signals: StopSignals, here: Collection[str]
) -> None:
    """Stop all jobs with a checkpoint, and kill them on a second signal.

    Jobs of backends that are not in `here` continue: they do not need this machine.
    """
    if others := await running_elsewhere(client, here):
        log.info("left running; the next start finds them: %s", ", ".join(others))
    stopped = asyncio.create_task(stop_all(client, here))
    forced = asyncio.create_task(signals.forced.wait())
    try:
        await _first_of(operator, stopped, forced)
        if not stopped.done():
            log.warning("killing them now")
            async with asyncio.timeout(_KILL_SECONDS):
                await _first_of(operator, stopped)
        await stopped
    except TimeoutError:
        log.warning("processes still run after %s s; the next start finds them", _KILL_SECONDS)
    finally:
        stopped.cancel()
        forced.cancel()


def _settings(folder: DevFolder) -> Settings:
    return Settings(
        kubeconfig=str(folder.kubeconfig),
        leader_election=False,  # the lock on the folder serves the same purpose
        identity="ftctl-dev",
        lease_namespace="default",
        health_host="127.0.0.1",
        health_port=0,
    )
