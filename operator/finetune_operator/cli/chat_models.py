"""Find the exported model that `ftctl chat` names, and its base model, on this machine."""

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_operator.api.manifest import Manifest
from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.api.validation import load_job
from finetune_operator.backends import registry
from finetune_operator.backends.local import records
from finetune_operator.backends.local.layout import (
    BACKEND,
    AttemptFolder,
    attempt_folder,
    file_path,
    folders_of,
)
from finetune_operator.backends.local.records import AttemptRecord
from finetune_operator.backends.local.run_folder import RunFolder
from finetune_operator.cli.chat_elsewhere import refuse_elsewhere, refuse_in_cluster
from finetune_operator.cli.run_directories import run_directory, shown_path
from finetune_operator.errors import FineTuneError
from finetune_operator.kube.cache import Key
from finetune_operator.planner.uris import is_on_hub
from finetune_operator.reconcile.conditions import ConditionType, find, is_true
from finetune_trainer.config import FailureClass, ModelConfig, Termination

_ADAPTER, _MODEL = "adapter_config.json", "config.json"
_REMEDY = "move it back, or name the job's manifest, with the new folder as spec.model.source"


@dataclass(frozen=True)
class ChatModels:
    """Models to converse with.

    Attributes:
        trained: Folder of an exported adapter or model.
        base: Base model; None if the folder of a whole model does not record it.
        remedy: What to do if the folder of the base is missing.
    """

    trained: Path
    base: ModelConfig | None
    remedy: str

    @property
    def is_adapter(self) -> bool:
        """Whether the export needs its base."""
        return (self.trained / _ADAPTER).is_file()


def find_models(target: str, namespace: str | None) -> ChatModels:
    """Return the models of a manifest, run directory, job name or exported folder.

    Raises:
        FineTuneError: the job is not finished, has failed, or its model is not on this machine.
    """
    loaded = None
    if os.path.isfile(target):
        loaded = load_job(Path(target), default_backend="local", may_resume=True)
        job, _ = loaded
        if not registry.load(job.spec.backend.type).runs_without_cluster:
            refuse_in_cluster(Key(namespace or job.metadata.namespace, job.metadata.name))
    if namespace is not None:
        refuse_in_cluster(Key(namespace, loaded[0].metadata.name if loaded else target))
    folder = Path(os.path.abspath(target))
    if folder.is_dir() and not RunFolder(folder).path.exists():
        return _of_folder(folder)
    return _of_run(target, run_directory(target, loaded), loaded)


def _of_run(target: str, run_dir: Path, loaded: tuple[FineTuneJob, Manifest] | None) -> ChatModels:
    """Return the models of a finished run of this machine."""
    stored, named = RunFolder(run_dir).load(), shlex.quote(target)
    if stored is None or not stored.status.attempt:
        raise FineTuneError(
            f"{target} has no run in {shown_path(run_dir)} yet; start one: ftctl run "
            f"{named if loaded else 'FILE'}"
        )
    if stored.spec.backend.type != BACKEND:
        refuse_elsewhere(stored)
    attempt = attempt_folder(run_dir, stored.status.attempt)
    _refuse_unfinished(target, stored, attempt, again=named if loaded else "FILE")
    job, manifest = loaded or (stored, None)
    output = _output(run_dir, stored, attempt)
    if manifest is not None:
        output = folders_of(job, manifest.directory).output
    if (trained := exported_in(output)) is None:
        raise FineTuneError(
            f"{shown_path(output)} has no exported model; if you have moved it, name its folder: "
            "ftctl chat FOLDER"
        )
    base = _base_of(attempt)
    source, remedy = job.spec.model.source, _REMEDY
    if manifest is not None:
        remedy = f"move it back, or set spec.model.source in {manifest.file} to its new folder"
        if not is_on_hub(source):
            base = ModelConfig(path=str(file_path(source, manifest.directory)))
    return ChatModels(trained, base, remedy)


def _refuse_unfinished(
    target: str, job: FineTuneJob, attempt: AttemptFolder, *, again: str
) -> None:
    """Refuse a job whose newest attempt has not exported a model."""
    name, status = job.metadata.name, job.status
    if (failed := find(status, ConditionType.FAILED)) and is_true(status, ConditionType.FAILED):
        raise FineTuneError(
            f"the job {name} has failed: {failed.message}\nSee: ftctl logs {shlex.quote(target)}\n"
            f"Correct it and run it again: ftctl run {again}"
        )
    # `ftctl dev` stores the status elsewhere, so the termination message decides.
    ended = records.read(attempt.termination(0), Termination)
    if ended is None or ended.failure_class is not FailureClass.COMPLETED:
        progress = status.progress
        step = f", step {progress.step} of {progress.total_steps}" if progress else ""
        raise FineTuneError(
            f"the job {name} is not finished (attempt {attempt.number}{step}), and only a finished "
            f"job has a model; follow or resume it: ftctl run {again}"
        )


def _output(run_dir: Path, job: FineTuneJob, attempt: AttemptFolder) -> Path:
    if job.spec.output.uri is None:
        return run_dir / "output"
    record = records.read(attempt.attempt, AttemptRecord)
    return Path(record.output_dir) if record else run_dir / "output"


def exported_in(output: Path) -> Path | None:
    """Return the folder of an exported model; of two formats the adapter, which has both models."""
    for folder, kind in (
        (output, _ADAPTER),
        (output / "adapter", _ADAPTER),
        (output, _MODEL),
        (output / "merged", _MODEL),
    ):
        if (folder / kind).is_file():
            return folder
    return None


def _base_of(attempt: AttemptFolder) -> ModelConfig:
    """Return the base model of an attempt from its configuration, of any version."""
    try:
        model: dict[str, Any] = json.loads(attempt.config.read_bytes())["model"]
        return ModelConfig(path=model["path"], revision=model.get("revision"))
    except (OSError, ValueError, KeyError) as error:
        raise FineTuneError(
            f"{attempt.config} cannot be read ({error}), so the base model is not known; restore it"
        ) from error


def _of_folder(folder: Path) -> ChatModels:
    """Return the models of an exported folder; a run beside it knows the base."""
    trained = exported_in(folder)
    if trained is None:
        raise FineTuneError(
            f"{folder} is neither a run directory nor an exported model: it has no job.json, "
            f"{_ADAPTER} or {_MODEL}"
        )
    settings = trained / _ADAPTER
    remedy = f"move it back, or write its new folder into {settings} (base_model_name_or_path)"
    for run_dir in (trained.parent, trained.parent.parent):
        stored = RunFolder(run_dir).load()
        if stored is not None and stored.spec.backend.type == BACKEND and stored.status.attempt:
            base = _base_of(attempt_folder(run_dir, stored.status.attempt))
            return ChatModels(trained, base, _REMEDY)
    if not settings.is_file():
        return ChatModels(trained, None, "")
    try:
        adapter: dict[str, Any] = json.loads(settings.read_bytes())
        name = str(adapter["base_model_name_or_path"])
    except (ValueError, KeyError) as error:
        raise FineTuneError(f"{settings} names no base model ({error}); restore it") from error
    return ChatModels(trained, ModelConfig(path=name, revision=adapter.get("revision")), remedy)
