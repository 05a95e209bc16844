"""Turn the options of `ftctl init` into a manifest, with the counts of the trainer.

`init` calls it. The trainer inspects the rows, and then prepares them as for a run, whose cache
they fill; the manifest is complete only if the trainer accepts every row that it reads.
"""

import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from finetune_operator.api.paths import show_count
from finetune_operator.api.v1alpha1.method import MethodType
from finetune_operator.backends.local.gpus import size_here
from finetune_operator.backends.local.layout import cache_dir
from finetune_operator.backends.local.machine_checks import installed_gpus
from finetune_operator.backends.local.render import visible_gpus
from finetune_operator.cli.hub import OFFLINE, has_copy, is_offline, silence
from finetune_operator.cli.init_manifest import Draft, manifest_text
from finetune_operator.cli.init_numbers import (
    Counts,
    estimated,
    longer,
    max_seq_length,
    schedule_of,
    splits_rows,
)
from finetune_operator.cli.init_places import Place, uri_of
from finetune_operator.cli.target import Target, open_target
from finetune_operator.cli.trainer_process import INSPECTION, PREVIEW, Ask, config_of, read_base
from finetune_operator.errors import FineTuneError
from finetune_operator.planner.hardware import options, refusal, step_memory
from finetune_operator.planner.models import base_shape_of_job
from finetune_trainer.config import (
    FEW_STEPS,
    ColumnMap,
    DataReport,
    Inspection,
    InspectionRequest,
    ModelConfig,
)
from finetune_trainer.sizing.base_shape import BaseShape

LONGEST_NAME = 40
MAX_TOKENISED = 1 << 26  # characters, about half a minute of tokenising
MAX_LONG_SHARE = 0.01


@dataclass(frozen=True)
class Wish:
    """The options of `ftctl init`.

    Attributes:
        output: File of the manifest; None for standard output, which needs absolute paths.
        gpus: GPUs to train on; None for all of this machine.
    """

    base: Place
    rows: Place
    output: Path | None = None
    gpus: int | None = None
    method: MethodType | None = None
    columns: ColumnMap = field(default_factory=ColumnMap)


def drafted(
    wish: Wish,
    ask: Ask,
    environ: Mapping[str, str],
    installed: Callable[[], int] = installed_gpus,
) -> tuple[str, list[str]]:
    """Return the manifest and warnings for the user.

    Args:
        wish: The options.
        ask: Runs a module of the trainer.
        environ: Environment of the trainer.
        installed: Counts the GPUs of this machine.

    Raises:
        FineTuneError: the rows cannot be read, or it is unclear how; or the model cannot be read.
    """
    environ, why = _environment(wish, environ)
    base, rows = wish.base, wish.rows
    request = InspectionRequest(
        model=ModelConfig(path=base.hub_name if base.path is None else os.path.abspath(base.path)),
        has_model=not why,
        data=rows.hub_name if rows.path is None else str(rows.path),
        is_hub=rows.path is None,
        columns=wish.columns,
        cache_dir=str(cache_dir(environ)),
    )
    [line] = ask(INSPECTION, request, environ)
    found = Inspection.model_validate(line)
    gpus = _usable(environ, installed())
    draft, warnings = _counted(_first_draft(wish, found, why, gpus), ask, environ)
    draft, refused = _in_memory(draft, wish, None if why else ask, environ)
    warnings += refused
    if draft.schedule.steps < FEW_STEPS:
        steps = show_count(draft.schedule.steps, "optimizer step")
        warnings.append(f"the whole run has {steps}, which change the model little; add rows")
    folder = None if wish.output is None else wish.output.parent
    return manifest_text(_placed(draft, wish, folder)), warnings


def _environment(wish: Wish, environ: Mapping[str, str]) -> tuple[Mapping[str, str], str]:
    """Return the environment of the trainer, and why the model cannot be read.

    Raises:
        FineTuneError: the rows are on a hub that does not respond.
    """
    base, rows = wish.base, wish.rows
    if base.path is not None and rows.path is not None:
        return environ, ""
    why = f"{OFFLINE} is set" if is_offline(environ) else silence(environ)
    if why is None:
        return environ, ""
    if rows.path is None and not has_copy(rows.hub_name, environ, is_model=False):
        raise FineTuneError(
            f"--data {rows.given}: {why}, and this machine has no copy; check the network and "
            "HF_ENDPOINT, or name a local path"
        )
    has_model = base.path is not None or has_copy(base.hub_name, environ, is_model=True)
    return {**environ, OFFLINE: "1"}, "" if has_model else why


def _usable(environ: Mapping[str, str], installed: int) -> int:
    visible = visible_gpus(environ)
    return installed if visible is None else min(installed, len(visible))


def _first_draft(wish: Wish, found: Inspection, why: str, there: int) -> Draft:
    """Return a draft with estimated counts and absolute paths, for the GPUs of this machine."""
    gpus = there if wish.gpus is None else wish.gpus
    reason = f"found {there}" if there else "no GPU found: trains on the CPU"
    length = max_seq_length(found)
    counts = estimated(found, length)
    draft = Draft(
        name=_name(wish.rows),
        data=wish.rows.name,
        model="",
        model_name=wish.base.name,
        source="",
        eval_source=None,
        found=found,
        length=length,
        counts=counts,
        schedule=schedule_of(counts, max(1, gpus), length),
        method=wish.method or MethodType.LORA,
        method_reason=f"chosen by --method {wish.method}"
        if wish.method
        else "r 16, alpha 32 by default",
        gpus=gpus,
        gpus_reason=reason if wish.gpus is None else f"--gpus {gpus}",
        notes=(f"Tokenizer and context length of the model are not known: {why}.",) if why else (),
    )
    return _placed(draft, wish, None)


def _placed(draft: Draft, wish: Wish, folder: Path | None) -> Draft:
    """Return the draft with URIs for a manifest in a folder, absolute if it is None."""
    found, rows = draft.found, wish.rows
    return replace(
        draft,
        model=wish.base.uri(folder),
        source=rows.uri(folder) if rows.path is None else uri_of(Path(found.train), folder),
        eval_source=None if found.held_out is None else uri_of(Path(found.held_out), folder),
    )


def _counted(draft: Draft, ask: Ask, environ: Mapping[str, str]) -> tuple[Draft, list[str]]:
    """Return the draft with the counts of the trainer, and its warnings.

    Data sets that were not read to their end, or are large, retain estimated counts.
    """
    found = draft.found
    if found.lengths.is_estimate or not found.is_complete or found.characters > MAX_TOKENISED:
        return draft, []
    while True:
        counts, warnings = _count(draft, ask, environ)
        further = longer(draft.length, found)
        is_short = counts.long_rows > MAX_LONG_SHARE * counts.rows
        if not is_short or further is None or splits_rows(found, draft.length):
            schedule = schedule_of(counts, max(1, draft.gpus), draft.length)
            return replace(draft, counts=counts, schedule=schedule), warnings
        draft = replace(draft, length=further)


def _count(draft: Draft, ask: Ask, environ: Mapping[str, str]) -> tuple[Counts, list[str]]:
    [summary] = ask(PREVIEW, config_of(_target(draft)), environ, "--rows", "0")
    train = DataReport.model_validate(summary["report"])
    held_out = DataReport.model_validate(summary.get("eval_report", {}))
    long_rows = train.truncated_rows + train.split_rows
    counts = Counts(train.rows, held_out.rows, train.packs, long_rows, is_exact=True)
    return counts, [*train.warnings, *held_out.warnings]


def _in_memory(
    draft: Draft, wish: Wish, ask: Ask | None, environ: Mapping[str, str]
) -> tuple[Draft, list[str]]:
    """Return the draft with the memory of a step, and a warning if the job does not fit.

    LoRA becomes QLoRA if only QLoRA fits and the user has not chosen the method. A draft for GPUs
    or a model that are not known is unchanged. `ask` is None if the model cannot be read.
    """
    size = size_here(draft.gpus, environ) if draft.gpus else None
    if size is None:
        return draft, []
    target = _target(draft)
    base = _base(target, ask, environ)
    if base is None:
        return draft, []
    [best] = options(target.job, base, [size], gpus=draft.gpus)
    if best.is_too_large and wish.method is None:
        reason = f"with lora {step_memory(best)}"
        smaller = replace(draft, method=MethodType.QLORA, method_reason=reason)
        [other] = options(_target(smaller).job, base, [size], gpus=draft.gpus)
        if other.is_possible and not other.is_too_large:
            draft, best = smaller, other
    if best.is_too_large:
        return draft, [refusal(best)]
    reasons = filter(None, (draft.gpus_reason, step_memory(best)))
    return replace(draft, gpus_reason="; ".join(reasons)), []


def _base(target: Target, ask: Ask | None, environ: Mapping[str, str]) -> BaseShape | None:
    known = base_shape_of_job(target.job.spec.model)
    if known is not None or ask is None:
        return known
    try:
        return read_base(target, environ, ask)
    except FineTuneError:
        return None  # such as a model that transformers does not know; `run` reports it


def _target(draft: Draft) -> Target:
    """Return the job of a draft with absolute paths."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.yaml"
        file.write_text(manifest_text(draft), encoding="utf-8")
        return open_target(file, "local")


def _name(rows: Place) -> str:
    """Return a name for the job from the name of its data."""
    last = rows.hub_name.rsplit("/", 1)[-1] if rows.path is None else rows.name.split(".")[0]
    name = re.sub(r"[^a-z0-9]+", "-", last.lower()).lstrip("-0123456789")
    return name[:LONGEST_NAME].rstrip("-") or "job"
