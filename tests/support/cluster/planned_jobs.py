"""GPU jobs whose first attempt chooses their settings, and the settings of each attempt.

Release 0.1.0 chooses in its operator, the present release in the trainer, which is played here.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

from finetune_operator.backends.kubernetes.child_names import CONFIG_ANNOTATION
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.labels import ATTEMPT_LABEL, JOB_LABEL
from finetune_operator.kube.resources import FINE_TUNE_JOBS, JOBS, PODS, Object
from finetune_trainer.config import (
    ExitCode,
    FailureClass,
    Phase,
    PlanReport,
    Progress,
    Termination,
)
from support.cluster.played_pods import ProgressServer, end_pod, own_address
from support.cluster.running_jobs import training

_GPUS: Mapping[str, Any] = {
    "topology__gpusPerNode": 2,
    "topology__processesPerNode": None,
    "training__globalBatchSize": 64,
}
OF_0_1_0: tuple[Mapping[str, Any], ...] = (
    _GPUS,
    {**_GPUS, "training__packing": False},
    {**_GPUS, "training__packing": False, "training__globalBatchSize": 24},
    {**_GPUS, "strategy__activationCheckpointing": "full", "training__precision": "fp16"},
    {**_GPUS, "strategy__type": "fsdp", "training__microBatchSize": 2},
)
"""Changes of the specs of jobs for 0.1.0; it chooses micro-batch 8 or 6 without packing."""
_OPEN = ("strategy", "activationCheckpointing", "microBatchSize", "precision")


class Settings(NamedTuple):
    """Settings that may be chosen for a job."""

    strategy: str
    replicas: int
    activation_checkpointing: str
    micro_batch_size: int
    precision: str
    auto: tuple[str, ...] = ()
    """Settings left to the trainer."""


def _choice(settings: Settings) -> PlanReport:
    chosen = {key: value for key, value in settings._asdict().items() if key != "auto"}
    per_pass = settings.micro_batch_size * 4  # ranks
    return PlanReport(
        **chosen,
        gradient_accumulation_steps=_GPUS["training__globalBatchSize"] // per_pass,
        peak_bytes=2**33,
        usable_bytes=2**34,
    )


CHOICES = (
    Settings("ddp", 1, "selective", 4, "bf16"),
    Settings("fsdp", 2, "none", 2, "bf16"),
    Settings("fsdp", 1, "full", 8, "fp16"),
    Settings("fsdp", 4, "selective", 16, "fp32"),
    Settings("ddp", 1, "full", 2, "fp16"),
)
"""Choices of the trainers of `chosen_by_trainers`, each in turn."""


@asynccontextmanager
async def chosen_by_trainers(
    client: KubeClient, namespace: str, name: str, *, running: int
) -> AsyncIterator[dict[str, Settings]]:
    """Have so many jobs that leave their settings to their trainers, after these have chosen.

    Yields:
        The settings in the plans of the jobs, by `namespace/name`.
    """
    async with AsyncExitStack() as stack:
        changes = []
        for choice in CHOICES:
            progress = Progress(phase=Phase.TRAINING, step=1, total_steps=10, attempt=1)
            served = ProgressServer(progress.model_copy(update={"plan": _choice(choice)}))
            port = (await stack.enter_async_context(served.serving(own_address()))).port
            changes.append({**_GPUS, "observability__metricsPort": port})
        entered = training(
            client, namespace, name, 0, running=running, backends=["aks"], changes=changes
        )
        await stack.enter_async_context(entered)
        assert {one.auto for one in (await configured(client, namespace, 1)).values()} == {_OPEN}
        wanted = {
            f"{namespace}/job-{number}": CHOICES[number % len(CHOICES)] for number in range(running)
        }
        async with asyncio.timeout(60):
            while (found := await planned(client, namespace)) != wanted:
                await asyncio.sleep(0.2)
        yield found


async def planned(client: KubeClient, namespace: str) -> dict[str, Settings]:
    """Return the settings in the plans of the jobs of a namespace."""
    found = (await client.list(FINE_TUNE_JOBS, namespace)).items
    return {f"{namespace}/{one['metadata']['name']}": _of_plan(one) for one in found}


def _of_plan(job: Object) -> Settings:
    plan, asked = job["status"]["plan"], job["spec"]["strategy"]["activationCheckpointing"]
    return Settings(
        strategy=plan["strategy"],
        replicas=plan.get("replicas", 1),
        # 0.1.0 does not write recomputation into its plan, and chooses none.
        activation_checkpointing=plan.get(
            "activationCheckpointing", "none" if asked == "auto" else asked
        ),
        micro_batch_size=plan["microBatchSize"],
        precision=plan["precision"],
    )


async def configured(client: KubeClient, namespace: str, attempt: int) -> dict[str, Settings]:
    """Return the settings in the trainers' configurations, for jobs that have this attempt."""
    selector = f"{ATTEMPT_LABEL}={attempt}"
    found = (await client.list(JOBS, namespace, label_selector=selector)).items
    return {f"{namespace}/{one['metadata']['labels'][JOB_LABEL]}": _of_config(one) for one in found}


def _of_config(batch_job: Object) -> Settings:
    annotations = batch_job["spec"]["template"]["metadata"]["annotations"]
    config = json.loads(annotations[CONFIG_ANNOTATION])
    return Settings(
        strategy=config["strategy"]["type"],
        replicas=config["strategy"].get("replicas", 1),
        activation_checkpointing=config["strategy"]["activationCheckpointing"],
        micro_batch_size=config["training"]["microBatchSize"],
        precision=config["training"]["precision"],
        auto=tuple(config.get("auto", {}).get("settings", ())),
    )


async def lose_workers(client: KubeClient, namespace: str) -> None:
    """End the pods of all jobs of a namespace with a failure that starts another attempt."""
    lost = Termination(
        failure_class=FailureClass.WORKER_LOST, exit_code=ExitCode.ERROR, message="as played"
    )
    pods = (await client.list(PODS, namespace)).items
    await asyncio.gather(*(end_pod(client, pod, ExitCode.ERROR, lost.to_json()) for pod in pods))
