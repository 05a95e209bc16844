"""Turn a plan into a `Request`: the trainer's configuration and one process per node. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.backends.base import Attempt, BackendContext, Request
from finetune_operator.backends.local import layout, trackers
from finetune_operator.backends.local.layout import BACKEND, AttemptFolder, Folders
from finetune_operator.backends.local.records import AttemptRecord
from finetune_operator.planner.plan import Plan
from finetune_operator.planner.train_config import Locations, derive_train_config
from finetune_trainer.config import ENV_NODE_RANK, ENV_TERMINATION_PATH


def render(
    plan: Plan, attempt: Attempt, context: BackendContext, command: Sequence[str], cores: int
) -> Request:
    """Return the objects that `submit` creates: `attempt.json`, `config.json`, a process per node.

    They contain no secret. The rendezvous port of several nodes is chosen at submission.
    """
    job = plan.job
    folders = layout.folders_of(job, context.manifest_dir)
    folder = layout.attempt_folder(folders.run, attempt.number)
    config = derive_train_config(
        plan, attempt.number, _locations(plan, folders, folder, context, cores)
    )
    record = AttemptRecord(
        uid=attempt_uid(job, attempt),
        attempt=attempt.number,
        nodes=plan.nodes,
        processes_per_node=plan.processes_per_node,
        output_dir=str(folders.output),
    )
    return Request(
        backend=BACKEND,
        job_uid=job.metadata.uid,
        attempt=attempt.number,
        name=str(folder.path),
        objects=(
            _file(str(folder.attempt), record.model_dump(by_alias=True, exclude_none=True)),
            _file(
                str(folder.config), config.model_dump(by_alias=True, exclude_none=True, mode="json")
            ),
            *(_process(plan, folder, rank, command, context) for rank in range(plan.nodes)),
        ),
    )


def attempt_uid(job: FineTuneJob, attempt: Attempt) -> str:
    """Return a uid that no attempt of another job of the same name has."""
    return f"{job.metadata.uid}-{attempt.number}"


def _file(path: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"kind": "File", "path": path, "content": content}


def _process(
    plan: Plan, folder: AttemptFolder, rank: int, command: Sequence[str], context: BackendContext
) -> Mapping[str, Any]:
    environment = {ENV_NODE_RANK: str(rank), ENV_TERMINATION_PATH: str(folder.termination(rank))}
    if plan.device == "cuda" and plan.nodes > 1:
        # The nodes of an attempt share this machine's GPUs: each sees its part of the usable ones.
        first = rank * plan.processes_per_node
        mine = range(first, first + plan.processes_per_node)
        visible = visible_gpus(context.environ)
        ids = [visible[i] if visible and i < len(visible) else str(i) for i in mine]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(ids)
    return {
        "kind": "Process",
        "node": rank,
        "command": [*command, str(folder.config)],
        "environment": environment,
        "log": str(folder.log(rank)),
    }


def visible_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names; None when it does not limit them."""
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return None
    return [part.strip() for part in environ["CUDA_VISIBLE_DEVICES"].split(",") if part.strip()]


def _locations(
    plan: Plan, folders: Folders, folder: AttemptFolder, context: BackendContext, cores: int
) -> Locations:
    spec, base = plan.job.spec, context.manifest_dir
    local = spec.backend.local
    threads = local.threads_per_process if local else None
    return Locations(
        path_of=lambda uri: str(layout.file_path(uri, base)),
        run_dir=str(folders.run),
        checkpoint_dir=str(folders.checkpoint),
        output_dir=str(folders.output),
        cache_dir=str(layout.cache_dir(context.environ)),
        termination_path=str(folder.termination(0)),
        allow_foreign=spec.checkpoint.allow_foreign,
        threads_per_process=threads or max(1, cores // plan.world_size),
        trackers=trackers.configs(plan.job),
    )
