"""Run one rank from the first check to the exported model, in the order of this file.

The launcher code calls it with a connected `World`. It builds the parts of the loop, resumes,
trains and exports; it neither starts nor ends processes.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from finetune_trainer.answers import answer_prompts
from finetune_trainer.checkpoint.commit import Fingerprint
from finetune_trainer.checkpoint.start import recorded
from finetune_trainer.checkpoint.store import CheckpointStore
from finetune_trainer.claims.fence import Fence
from finetune_trainer.config import (
    ExitCode,
    FailureClass,
    Phase,
    Termination,
    TrainConfig,
)
from finetune_trainer.control import Agreement, StopSignal, loading_model, preempted, unless_stopped
from finetune_trainer.data.batch import MicroBatch, collate
from finetune_trainer.data.plan import DataPlan
from finetune_trainer.data.rules import Rules
from finetune_trainer.data.run_data import RunData, prepare_run, prepare_with
from finetune_trainer.data.sequences import TokenDataset
from finetune_trainer.evaluation import ROUND_TO_ON_GPU, held_out_loss
from finetune_trainer.export import check_replaceable
from finetune_trainer.export.tryout import try_export
from finetune_trainer.failpoints import failpoint
from finetune_trainer.finishing import choose_weights, export_model, finish_saving
from finetune_trainer.garbage import gc_freeze, gc_paused
from finetune_trainer.gpu import find_gpu
from finetune_trainer.interconnect import check_transport
from finetune_trainer.loop import Run, evaluate, train
from finetune_trainer.memory.resolve import read_base_if_needed, resolve_by_memory
from finetune_trainer.model.adapters import choose_trained
from finetune_trainer.model.compiler import report_compilations
from finetune_trainer.model.families import resolve_packing
from finetune_trainer.model.float8 import check_float8
from finetune_trainer.model.identity import model_fingerprint, pinned, weights_fingerprint
from finetune_trainer.model.isolation import check_isolation
from finetune_trainer.model.load import (
    download_weights,
    load_device,
    load_model,
    load_settings,
    load_tokenizer,
)
from finetune_trainer.model.loss import CausalLoss, base_of, loss_inputs
from finetune_trainer.model.positions import refuse_long_rows
from finetune_trainer.model.prepare import prepare_model
from finetune_trainer.model.stored_quantization import resolve_stored_quantization
from finetune_trainer.model.unreached import named, unreached_modules
from finetune_trainer.model.unread import check_unread, unread_tensors
from finetune_trainer.model.vocabulary import padding_id, refuse_unknown_tokens
from finetune_trainer.preemption import watch_scheduled_events
from finetune_trainer.profiling import record_memory_history
from finetune_trainer.refusals import Refusals
from finetune_trainer.resuming import keep_output_dtype, notes_of, resume
from finetune_trainer.schedule import few_steps_warning, warmup_warning
from finetune_trainer.sizing.base_shape import BaseShape
from finetune_trainer.sizing.method import is_loaded_once
from finetune_trainer.stopping import Patience
from finetune_trainer.strategies import (
    create,
    emulation_warning,
    refuse_unsupported,
    single_process_warning,
)
from finetune_trainer.strategies.base import Strategy
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.telemetry.flops import model_flops
from finetune_trainer.world import World

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def run(
    config: TrainConfig,
    world: World,
    stop: StopSignal,
    telemetry: Telemetry,
    fence: Fence | None,
) -> Termination:
    """Do the work of one rank and return the termination of a finished run.

    `fence` holds the claims on the folders; None except on rank 0.

    Raises:
        Preempted: Asked to stop. All ranks raise it; during training, after the same step.
        TrainerError: The run cannot continue; the class determines the exit code.
    """
    agreement, warn_from_rank0 = Agreement(world), _warn_from_rank0(telemetry, world)
    if world.local_rank == 0:
        _watch_scheduled_events(config, telemetry, stop)
    if world.rank == 0:
        check_replaceable(config)
    torch.set_num_threads(config.world.threads_per_process)
    requested = config
    checkpoint = recorded(config.checkpoint, config.job)
    refusals = Refusals(not agreement.any(checkpoint is not None), warn_from_rank0)
    config, base = _resolve_config(config, world, telemetry, checkpoint, refusals)
    refuse_unsupported(config)
    by_memory = partial(_by_memory, world=world, telemetry=telemetry, base=base, refusals=refusals)
    config = by_memory(config, None)
    data = _read_data(config, agreement, stop, telemetry, checkpoint, warn_from_rank0)
    dataset, held_out, tokenizer = data.train, data.held_out, data.tokenizer
    config = by_memory(config, dataset)
    strategy = create(config, world)
    plan = DataPlan.of(dataset, config)
    _report_data(config, world, telemetry, plan, dataset, held_out)
    is_old = checkpoint is not None and checkpoint.method == _method_hash(requested, [])
    unreached = _unreached(config, dataset, agreement.any(is_old), warn_from_rank0)
    unless_stopped(agreement, stop, partial(_download, config, world, telemetry))
    load = partial(_load, config, world, telemetry, refusals, unreached)
    module = unless_stopped(agreement, stop, load)
    if world.is_main:
        try_export(module.model, tokenizer, config, dataset.ordered_stops, refusals)
    world.liveness_barrier()  # collectives of the strategy could time out
    _report_model(config, world, telemetry, dataset, held_out, module)
    of_rows = _flops_of_rows(module, dataset)
    with loading_model():
        strategy.prepare(module, warn_from_rank0)
    telemetry.collectives.begin()
    pad_id = padding_id(config.model, tokenizer)
    first_batch = partial(_first_batch, dataset, plan, config, pad_id)
    _check_float8(config, module, strategy, world, first_batch)
    measured = partial(check_isolation, device=world.device, any_rank=agreement.any)
    resolved = measured(config, module, strategy.evaluate, warn=warn_from_rank0)
    if resolved is not config:
        config, plan = resolved, DataPlan.of(dataset, resolved)
        _report_data(config, world, telemetry, plan, dataset, held_out)
    pad_to, round_to = _padding(config, world)
    patience = Patience(config.training.early_stopping)
    is_stopping = partial(_is_stopping, telemetry, agreement, stop)
    fingerprint = _fingerprint(requested, config, world, dataset, plan, unreached)
    run = Run(
        config=config,
        world=world,
        strategy=strategy,
        dataset=dataset,
        plan=plan,
        store=_store(config, world, telemetry, fence, fingerprint, held_out),
        telemetry=telemetry,
        stop=stop,
        agreement=agreement,
        fence=fence,
        patience=patience,
        evaluate=None
        if held_out is None
        else partial(held_out_loss, strategy, held_out, world, is_stopping, round_to=round_to),
        notes=partial(notes_of, telemetry, patience),
        pad_to=pad_to,
        pad_id=pad_id,
        flops_of_rows=of_rows,
    )
    return _train_and_export(run, tokenizer)


def _padding(config: TrainConfig, world: World) -> tuple[int | None, int]:
    """Return the length of all micro-batches, if it is fixed, and the divisor of lengths.

    Compiled kernels and GPUs need a fixed length; a CPU saves the padding. Lengths of unpacked rows
    are not rounded, because the model may have no positions beyond its longest row.
    """
    if config.data.packing and (config.training.compile or world.device.type == "cuda"):
        return config.data.max_seq_len, ROUND_TO_ON_GPU
    return None, 1


def _is_stopping(telemetry: Telemetry, agreement: Agreement, stop: StopSignal) -> bool:
    telemetry.alive()
    return agreement.is_stopping(stop.requested)


def _watch_scheduled_events(config: TrainConfig, telemetry: Telemetry, stop: StopSignal) -> None:
    """Watch for the announced removal of this machine, in one process per node."""
    if config.control.scheduled_events_url is not None:
        log = partial(telemetry.log, "scheduled_events")
        watch_scheduled_events(config.control.scheduled_events_url, stop, log)


def _resolve_config(
    config: TrainConfig,
    world: World,
    telemetry: Telemetry,
    checkpoint: Fingerprint | None,
    refusals: Refusals,
) -> tuple[TrainConfig, BaseShape | None]:
    """Resolve the configuration for this model, whose shape is read if memory decides something.

    This imports transformers.
    """
    config = pinned(config, world, checkpoint)
    with gc_paused():
        config = resolve_stored_quantization(config, load_settings(config.model), refusals)
        config = resolve_packing(config, _warn_from_rank0(telemetry, world))
        return config, read_base_if_needed(config, world)


def _by_memory(
    config: TrainConfig,
    rows: TokenDataset | None,
    *,
    world: World,
    telemetry: Telemetry,
    base: BaseShape | None,
    refusals: Refusals,
) -> TrainConfig:
    """Choose by memory the open settings, and report the choices of `auto`.

    The length of packed rows is known before tokenising, when `rows` is None; the length of other
    rows only afterwards. At the other time the configuration is returned unchanged.
    """
    if config.data.packing != (rows is None):
        return config
    row_tokens = config.data.max_seq_len if rows is None else int(rows.lengths.max())
    warn = _warn_from_rank0(telemetry, world)
    resolved = resolve_by_memory(
        config, world, base, row_tokens=row_tokens, refusals=refusals, warn=warn
    )
    if resolved.report is not None:
        telemetry.chose(resolved.config, resolved.report)
    return resolved.config


def _train_and_export(run: Run, tokenizer: "PreTrainedTokenizerBase") -> Termination:
    """Train from the newest checkpoint and export the model."""
    agreement, stop = run.agreement, run.stop
    first_step = resume(run)
    if run.world.device.type == "cuda":
        check_transport(run.config, run.world, run.telemetry, is_new=first_step == 0)
    keep_output_dtype(run, first_step)
    run.profiler.check(first_step, run.plan.total_steps)
    if first_step == 0:
        if run.evaluate is not None:
            evaluate(run, 0)
        answer_prompts(run, tokenizer, when="before")
    if agreement.any(stop.requested):
        raise preempted(stop)
    is_trained = run.patience.is_exhausted or first_step == run.plan.total_steps
    gc_freeze()
    last_step = first_step if is_trained else train(run, first_step)
    finish_saving(run)
    message = choose_weights(run, last_step)
    answer_prompts(run, tokenizer, when="after")
    artifacts = export_model(run, tokenizer)
    run.profiler.finish()
    run.telemetry.phase(Phase.DONE)
    return Termination(
        failure_class=FailureClass.COMPLETED,
        exit_code=ExitCode.DONE,
        message=message,
        step=last_step,
        artifacts=artifacts,
    )


def _read_data(
    config: TrainConfig,
    agreement: Agreement,
    stop: StopSignal,
    telemetry: Telemetry,
    checkpoint: Fingerprint | None,
    warn: Callable[[str], None],
) -> RunData:
    """Return the tokens of the run, by the same rules on every rank."""
    tokenizer_of = partial(load_tokenizer, config.model)
    recorded_data = checkpoint.data if checkpoint else None

    def work() -> RunData:
        telemetry.phase(Phase.TOKENIZING)
        failpoint("tokenizing")
        data = prepare_run(config.data, tokenizer_of, recorded_data, warn)
        refuse_unknown_tokens(config.model, data.tokenizer, data.train, data.held_out)
        return data

    data = unless_stopped(agreement, stop, work)
    if agreement.any(data.rules is not Rules.CURRENT) and data.rules is Rules.CURRENT:
        return prepare_with(config.data, tokenizer_of, Rules.RELEASE_0_1_0)
    return data


def _warn_from_rank0(telemetry: Telemetry, world: World) -> Callable[[str], None]:
    """Return a function for warnings that all ranks raise: rank 0 warns, the others log."""
    if world.is_main:
        return telemetry.warn
    return lambda sentence: telemetry.log("warning", message=sentence)


def _report_data(
    config: TrainConfig,
    world: World,
    telemetry: Telemetry,
    plan: DataPlan,
    dataset: TokenDataset,
    held_out: TokenDataset | None,
) -> None:
    """Report the tokenised rows and the number of steps, with warnings for the user."""
    reports = [plan.report(dataset.report), held_out.report if held_out is not None else None]
    telemetry.data(*reports)
    telemetry.plan(plan.total_steps)
    of_rows = [sentence for report in reports if report for sentence in report.warnings]
    of_run = (
        few_steps_warning(config.training, plan.total_steps),
        warmup_warning(config.training, plan.total_steps),
        single_process_warning(config),
        emulation_warning(config, torch.cpu.get_capabilities()),
    )
    for sentence in (*of_rows, *filter(None, of_run)):
        _warn_from_rank0(telemetry, world)(sentence)


def _report_model(
    config: TrainConfig,
    world: World,
    telemetry: Telemetry,
    dataset: TokenDataset,
    held_out: TokenDataset | None,
    module: CausalLoss,
) -> None:
    """Report the GPU; warn about memory for the loss, and if rows exceed the model's range."""
    telemetry.device(find_gpu(world.device))
    warn = _warn_from_rank0(telemetry, world)
    if config.training.fused_head and not module.is_fused:
        warn(
            "the loss is not fused with the model's head (there are adapters, added tokens or "
            "quantised weights on it, or its forward is not known), so all logits of a "
            "micro-batch are held at once; keep lm_head out of "
            "spec.method.lora.targetModules, or lower spec.training.maxSeqLength if memory is short"
        )
    longest = max(int(rows.lengths.max()) for rows in (dataset, held_out) if rows is not None)
    sentence = refuse_long_rows(base_of(module.model), longest)
    if sentence is not None:
        warn(sentence)


def _first_batch(
    dataset: TokenDataset, plan: DataPlan, config: TrainConfig, pad_id: int
) -> MicroBatch:
    """Return the first micro-batch of rank 0, on any rank."""
    packs = plan.rank_packs(0, 0, config.world.world_size)[0]
    return collate(dataset, packs, pad_to=config.data.max_seq_len, pad_id=pad_id)


def _flops_of_rows(module: CausalLoss, dataset: TokenDataset) -> memoryview | None:
    flops = model_flops(module.model)
    return None if flops is None else flops.of(dataset.lengths, dataset.label_counts).data


def _check_float8(
    config: TrainConfig,
    module: CausalLoss,
    strategy: Strategy,
    world: World,
    first_batch: Callable[[], MicroBatch],
) -> None:
    """Refuse float8 if it changes the loss of a batch, which is the same on every rank."""
    if config.training.float8:
        check_float8(module, strategy.evaluate, loss_inputs(first_batch(), world.device))


def _download(config: TrainConfig, world: World, telemetry: Telemetry) -> None:
    telemetry.phase(Phase.LOADING)
    download_weights(config, world)


def _load(
    config: TrainConfig,
    world: World,
    telemetry: Telemetry,
    refusals: Refusals,
    unreached: list[str],
) -> CausalLoss:
    """Load, adapt and prepare the model, the same on every rank."""
    if config.training.compile:
        report_compilations(telemetry.compiling)
    record_memory_history(config)
    failpoint("loading")
    place = load_device(config, world.rank, world.device)
    with loading_model():
        base = load_model(config, place, refusals, quantises=not is_loaded_once(config))
    if place.type != "meta":
        check_unread(unread_tensors(config.model), config.model.path, refusals)
    torch.manual_seed(config.training.seed)  # same initial adapters on every rank
    if unreached:
        refusals.warn(
            f"no text reaches {named(unreached, base)} of the model, so they are not trained and "
            "are exported unchanged"
        )
    model: nn.Module = choose_trained(base, config, refusals, unreached)
    return prepare_model(model, config, world.device, _warn_from_rank0(telemetry, world))


def _store(
    config: TrainConfig,
    world: World,
    telemetry: Telemetry,
    fence: Fence | None,
    fingerprint: Fingerprint,
    held_out: TokenDataset | None,
) -> CheckpointStore:
    return CheckpointStore(
        config.checkpoint,
        rank=world.rank,
        world_size=world.world_size,
        group=world.checkpoint_group,
        job=config.job,
        fingerprint=fingerprint,
        fence=fence,
        warn=telemetry.warn,
        ranks_on_node=config.world.nproc_per_node,
        costs=telemetry.checkpoint_costs,
        waiting=world.waiting,
        held_out=None if held_out is None else held_out.fingerprint,
    )


def _unreached(
    config: TrainConfig, dataset: TokenDataset, is_old: bool, warn: Callable[[str], None]
) -> list[str]:
    """Return the modules to leave untrained; the method of an old checkpoint trains them."""
    unreached = unreached_modules(config.model, int(dataset.lengths.max()), warn)
    if unreached and is_old:
        warn(
            f"no text reaches {len(unreached)} modules of the model; this run has a checkpoint in "
            "which they are trained and continues to train them, but a new run would not"
        )
        return []
    return unreached


def _method_hash(requested: TrainConfig, unreached: list[str]) -> str:
    text = requested.method.model_dump_json() + "".join(f"\n{name}" for name in unreached)
    return hashlib.sha256(text.encode()).hexdigest()


def _fingerprint(
    requested: TrainConfig,
    config: TrainConfig,
    world: World,
    dataset: TokenDataset,
    plan: DataPlan,
    unreached: list[str],
) -> Fingerprint:
    """Identify model, method, data and order, which must match to resume from a checkpoint.

    Only rank 0 compares and writes it.
    """
    return Fingerprint(
        model=model_fingerprint(requested.model),
        method=_method_hash(requested, unreached),
        data=dataset.fingerprint,
        order=plan.fingerprint,
        weights=weights_fingerprint(config.model) if world.is_main else "",
        optimizer=config.training.optimizer,
    )
