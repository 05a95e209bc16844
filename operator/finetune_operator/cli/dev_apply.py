"""The job of `ftctl dev --run FILE`: what the API has of it, and what is to become of that."""

import asyncio
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from finetune_operator.api.problems import InvalidJobError, Problem
from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.api.v1alpha1.transitions import changes_of_training
from finetune_operator.api.validate import check_start
from finetune_operator.cli.target import Target
from finetune_operator.errors import FineTuneError
from finetune_operator.kernel.jobs import JobView, read_job
from finetune_operator.kube.cache import Key
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.errors import AlreadyExistsError, NotFoundError
from finetune_operator.kube.resources import FINE_TUNE_JOBS, NAMESPACES
from finetune_operator.reconcile.conditions import is_finished

_GONE_SECONDS = 30.0
_LOOK_SECONDS = 0.1


class ApplyError(FineTuneError):
    """The job could not be applied."""


@dataclass(frozen=True)
class DevJob:
    """The job of a manifest in the API.

    Attributes:
        client: Access to the API.
        target: The job as it is asked for.
    """

    client: KubeClient
    target: Target

    @property
    def key(self) -> Key:
        """Namespace and name."""
        return Key(self.target.job.metadata.namespace, self.target.job.metadata.name)

    async def read(self) -> FineTuneJob:
        """Return the job as the API has it.

        Raises:
            ApplyError: it has none.
        """
        known = await self._known()
        if known is None or known.parsed is None:
            raise ApplyError(f"{self.key} was deleted before its end")
        return known.parsed

    async def make_room(self, *, fresh: bool) -> str:
        """Delete the job of that name if it is over, so that it runs anew; return what was done.

        Args:
            fresh: Delete it though it is not over.

        Raises:
            InvalidJobError: it is not over, and the manifest asks for another training; or there
                is none, and no job can begin with the manifest.
        """
        if fresh:
            self.target.refuse_fresh()
        there = await self._known()
        if there is None:
            # With its line; the API tells the field alone.
            self.target.refuse(check_start(self.target.job))
            return ""
        if not fresh and not is_finished(there.status):
            self._refuse_another_training(there)
            return f"going on with {self.key}" if there.status.attempt else ""
        await self.client.delete(FINE_TUNE_JOBS, self.key.name, self.key.namespace)
        async with asyncio.timeout(None if fresh else _GONE_SECONDS):
            while await self._known() is not None:
                await asyncio.sleep(_LOOK_SECONDS)
        was = there.status.phase.value if is_finished(there.status) else "not over"
        then = "runs anew, and what it wrote is moved aside"
        if self.target.job.spec.take_over:
            then = "is made anew and goes on with what that one wrote (spec.takeOver)"
        return f"the earlier {self.key} was {was}; it {then}"

    async def apply(self, kubeconfig: Path) -> str:
        """Create the job, or change it to what the manifest says; return one line about it.

        Args:
            kubeconfig: For kubectl, which does it where it is installed.

        Raises:
            ApplyError: kubectl cannot apply it.
            ApiError: the API refuses it.
        """
        with suppress(AlreadyExistsError):
            await self.client.create(NAMESPACES, {"metadata": {"name": self.key.namespace}})
        kubectl = shutil.which("kubectl")
        if kubectl is None:
            return await self._apply()
        process = await asyncio.create_subprocess_exec(
            kubectl,
            *("apply", "-f", str(self.target.manifest.path)),
            env={**os.environ, "KUBECONFIG": str(kubeconfig)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        text = said.decode(errors="replace").strip()
        if process.returncode:
            raise ApplyError(f"kubectl apply -f {self.target.manifest.path} failed: {text}")
        return text

    async def _apply(self) -> str:
        made, namespace = self.target.manifest.manifest.value, self.key.namespace
        there = await self._known()
        if there is None:
            await self.client.create(FINE_TUNE_JOBS, made, namespace)
        else:
            changed = {**there.raw, "spec": made["spec"]}
            await self.client.replace(FINE_TUNE_JOBS, changed, namespace)
        return f"finetunejob.finetune.dev/{self.key.name} {'configured' if there else 'created'}"

    async def _known(self) -> JobView | None:
        try:
            raw = await self.client.get(FINE_TUNE_JOBS, self.key.name, self.key.namespace)
        except NotFoundError:
            return None
        return read_job(raw)

    def _refuse_another_training(self, there: JobView) -> None:
        if there.parsed is None or not there.status.attempt:
            return
        if changed := changes_of_training(there.job.spec, self.target.job.spec):
            message = (
                f"differs from the unfinished job ({', '.join(changed)}); restore the old values "
                "to go on, or run it anew with --fresh, which moves aside what was written"
            )
            problem = Problem(f"spec.{changed[0]}", message)
            raise InvalidJobError([self.target.manifest.locate(problem)])
