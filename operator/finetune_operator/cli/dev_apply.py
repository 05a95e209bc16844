"""Apply the job of `ftctl dev --run FILE`: with kubectl where there is one, else by ourselves."""

import asyncio
import os
import shutil
from pathlib import Path

from finetune_operator.api.problems import InvalidJobError, Problem
from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.api.validate import check_start
from finetune_operator.cli.target import Target
from finetune_operator.errors import FineTuneError
from finetune_operator.kernel.jobs import KnownJob, read_job
from finetune_operator.kube.cache import Key
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.errors import AlreadyExistsError, NotFoundError
from finetune_operator.kube.resources import FINE_TUNE_JOBS, NAMESPACES
from finetune_operator.reconcile.conditions import is_finished
from finetune_operator.reconcile.opening import changes_of_training

_GONE_SECONDS = 30.0
_LOOK_SECONDS = 0.1


class ApplyError(FineTuneError):
    """The job could not be applied."""


def key_of_job(job: FineTuneJob) -> Key:
    """Return namespace and name of a manifest's job."""
    return Key(job.metadata.namespace, job.metadata.name)


async def look_up(client: KubeClient, key: Key) -> KnownJob | None:
    """Return the job as the API has it, or None."""
    try:
        return read_job(await client.get(FINE_TUNE_JOBS, key.name, key.namespace))
    except NotFoundError:
        return None


async def make_room(client: KubeClient, target: Target, *, fresh: bool) -> str:
    """Delete the job of that name if it is over, so that it runs anew; return what was done.

    Args:
        client: Access to the API.
        target: The job to apply.
        fresh: Delete it though it is not over.

    Raises:
        InvalidJobError: it is not over, and the manifest asks for another training; or there is
            none, and no job can begin with the manifest.
    """
    key = key_of_job(target.job)
    there = await look_up(client, key)
    if there is None:
        target.refuse(check_start(target.job))  # with its line; the API tells the field alone
        return ""
    if not fresh and not is_finished(there.status):
        _refuse_another_training(there, target)
        return f"going on with {key}" if there.status.attempt else ""
    await client.delete(FINE_TUNE_JOBS, key.name, key.namespace)
    async with asyncio.timeout(None if fresh else _GONE_SECONDS):
        while await look_up(client, key) is not None:
            await asyncio.sleep(_LOOK_SECONDS)
    was = there.status.phase.value if is_finished(there.status) else "not over"
    return f"the earlier {key} was {was}; it runs anew, and what it wrote is moved aside"


async def apply(client: KubeClient, target: Target, kubeconfig: Path) -> str:
    """Create the job, or change it to what the manifest says; return one line about it.

    Raises:
        ApplyError: kubectl cannot apply it.
        ApiError: the API refuses it.
    """
    await _make_namespace(client, target.job.metadata.namespace)
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        return await _apply(client, target)
    process = await asyncio.create_subprocess_exec(
        kubectl,
        *("apply", "-f", str(target.manifest.path)),
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    text = said.decode(errors="replace").strip()
    if process.returncode:
        raise ApplyError(f"kubectl apply -f {target.manifest.path} failed: {text}")
    return text


async def _make_namespace(client: KubeClient, name: str) -> None:
    try:
        await client.create(NAMESPACES, {"metadata": {"name": name}})
    except AlreadyExistsError:
        return


async def _apply(client: KubeClient, target: Target) -> str:
    key, made = key_of_job(target.job), target.manifest.manifest.value
    name = f"finetunejob.finetune.dev/{key.name}"
    try:
        await client.create(FINE_TUNE_JOBS, made, key.namespace)
    except AlreadyExistsError:
        there = await client.get(FINE_TUNE_JOBS, key.name, key.namespace)
        await client.replace(FINE_TUNE_JOBS, {**there, "spec": made["spec"]}, key.namespace)
        return f"{name} configured"
    return f"{name} created"


def _refuse_another_training(there: KnownJob, target: Target) -> None:
    if there.job is None or not there.status.attempt:
        return
    if changed := changes_of_training(there.job.spec, target.job.spec):
        message = (
            f"differs from the unfinished job ({', '.join(changed)}); restore the old values to "
            "go on, or run it anew with --fresh, which moves aside what was written"
        )
        raise InvalidJobError([target.manifest.locate(Problem(f"spec.{changed[0]}", message))])
