"""The work of one rank, from the first check to the exported model; read it top to bottom.

Called by the launcher code with an open world. It builds what the loop needs, resumes, trains and
exports; it starts no process and ends none.
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
    ModelConfig,
    Phase,
    Termination,
    TrainConfig,
)
from finetune_trainer.control import Agreement, StopSignal, preempted, unless_stopped
from finetune_trainer.data.batch import MicroBatch, collate
from finetune_trainer.data.plan import DataPlan
from finetune_trainer.data.sequences import TokenDataset, prepare
from finetune_trainer.evaluation import ROUND_TO_ON_GPU, held_out_loss
from finetune_trainer.export import check_replaceable
from finetune_trainer.export.tryout import try_export
from finetune_trainer.failpoints import reach
from finetune_trainer.finishing import choose_weights, export_model, finish_saving
from finetune_trainer.garbage import exempt_what_is_there, uncollected
from finetune_trainer.gpu import find_gpu
from finetune_trainer.loop import Run, evaluate, train
from finetune_trainer.memory.check import refuse_what_does_not_fit
from finetune_trainer.model.adapters import choose_trained
from finetune_trainer.model.families import resolve_packing
from finetune_trainer.model.float8 import check_float8
from finetune_trainer.model.identity import model_fingerprint, pinned, weights_fingerprint
from finetune_trainer.model.isolation import check_isolation
from finetune_trainer.model.load import is_loaded_once, load_device, load_model, load_tokenizer
from finetune_trainer.model.loss import CausalLoss, base_of, loss_inputs
from finetune_trainer.model.positions import refuse_long_rows
from finetune_trainer.model.prepare import prepare_model
from finetune_trainer.model.vocabulary import refuse_unknown_tokens
from finetune_trainer.preemption import watch_scheduled_events
from finetune_trainer.resuming import notes_of, resume
from finetune_trainer.schedule import warmup_warning
from finetune_trainer.stopping import Patience
from finetune_trainer.strategies import (
    create,
    emulation_warning,
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
    """Do everything one rank has to do and return the termination of a finished run.

    `fence` holds the claims on the folders; None on every rank but 0.

    Raises:
        Preempted: asked to stop; every rank leaves, at the same step once there are steps.
        TrainerError: the run cannot go on; its class says which exit code that means.
    """
    agreement, warn_alike = Agreement(world), _warn_alike(telemetry, world)
    if world.local_rank == 0:
        _watch_scheduled_events(config, telemetry, stop)
    if world.rank == 0:
        check_replaceable(config)
    torch.set_num_threads(config.world.threads_per_process)
    asked = config.model
    config = _settle(config, world, telemetry)
    strategy = create(config, world)
    tokenizer = load_tokenizer(config.model)
    dataset, held_out = unless_stopped(
        agreement, stop, partial(_tokenize, config, tokenizer, telemetry)
    )
    plan = DataPlan.of(dataset, config)
    _tell_data(config, world, telemetry, plan, dataset, held_out)
    module = unless_stopped(agreement, stop, partial(_load, config, world, telemetry, dataset))
    if world.is_main:
        try_export(module.model, tokenizer, config)
    world.meet()  # the strategy's own collectives would not wait for rank 0
    _tell_model(config, world, telemetry, dataset, held_out, module)
    telemetry.device(find_gpu(world.device))
    of_rows = _flops_of_rows(module, dataset)
    strategy.prepare(module, warn_alike)
    telemetry.collectives.begin()
    first_batch = partial(_first_batch, dataset, plan, config, tokenizer.pad_token_id)
    _check_float8(config, module, strategy, world, first_batch)
    measured = partial(check_isolation, device=world.device, any_rank=agreement.any)
    settled = measured(config, module, strategy.evaluate, warn=warn_alike)
    if settled is not config:
        config, plan = settled, DataPlan.of(dataset, settled)
        _tell_data(config, world, telemetry, plan, dataset, held_out)
    # Compiled kernels and a GPU want one length; a CPU saves the padding.
    pads = config.data.packing and (config.training.compile or world.device.type == "cuda")
    # Not where rows hold one document: such a model may have no positions beyond its longest row.
    round_to = ROUND_TO_ON_GPU if pads else 1
    patience = Patience(config.training.early_stopping)

    def is_stopping() -> bool:
        telemetry.alive()
        return agreement.is_stopping(stop.requested)

    run = Run(
        config=config,
        world=world,
        strategy=strategy,
        dataset=dataset,
        plan=plan,
        store=_store(
            config, world, telemetry, fence, _fingerprint(asked, config, world, dataset, plan)
        ),
        telemetry=telemetry,
        stop=stop,
        agreement=agreement,
        fence=fence,
        patience=patience,
        evaluate=None
        if held_out is None
        else partial(held_out_loss, strategy, held_out, world, is_stopping, round_to=round_to),
        notes=partial(notes_of, telemetry, patience),
        pad_to=config.data.max_seq_len if pads else None,
        pad_id=tokenizer.pad_token_id,
        flops_of_rows=of_rows,
    )
    return _train_and_export(run, tokenizer)


def _watch_scheduled_events(config: TrainConfig, telemetry: Telemetry, stop: StopSignal) -> None:
    """Hear from the machine itself that it is about to be taken away; once a node is enough."""
    if config.control.scheduled_events_url is not None:
        log = partial(telemetry.log, "scheduled_events")
        watch_scheduled_events(config.control.scheduled_events_url, stop, log)


def _check_memory(config: TrainConfig, world: World, row_tokens: int) -> None:
    """Refuse what a GPU has no memory for, before anything is loaded."""
    if world.device.type == "cuda" and config.training.check_memory:
        free, _ = torch.cuda.mem_get_info(world.device)
        refuse_what_does_not_fit(config, free, row_tokens=row_tokens)


def _settle(config: TrainConfig, world: World, telemetry: Telemetry) -> TrainConfig:
    """Return the configuration with which this model is trained; this imports transformers."""
    config = pinned(config, world, partial(recorded, config.checkpoint, config.job))
    with uncollected():
        config = resolve_packing(config, _warn_alike(telemetry, world))
        # Where rows are not packed their length is known only once they are tokens.
        _check_memory(config, world, config.data.max_seq_len if config.data.packing else 1)
    return config


def _train_and_export(run: Run, tokenizer: "PreTrainedTokenizerBase") -> Termination:
    """Go on from the newest checkpoint to the exported model."""
    agreement, stop = run.agreement, run.stop
    first_step = resume(run)
    if first_step == 0:
        if run.evaluate is not None:
            evaluate(run, 0)
        answer_prompts(run, tokenizer, when="before")
    if agreement.any(stop.requested):
        raise preempted(stop)
    is_trained = run.patience.is_over or first_step == run.plan.total_steps
    exempt_what_is_there()
    last_step = first_step if is_trained else train(run, first_step)
    finish_saving(run)
    message = choose_weights(run, last_step)
    answer_prompts(run, tokenizer, when="after")
    artifacts = export_model(run, tokenizer)
    run.telemetry.phase(Phase.DONE)
    return Termination(
        failure_class=FailureClass.COMPLETED,
        exit_code=ExitCode.DONE,
        message=message,
        step=last_step,
        artifacts=artifacts,
    )


def _tokenize(
    config: TrainConfig, tokenizer: "PreTrainedTokenizerBase", telemetry: Telemetry
) -> tuple[TokenDataset, TokenDataset | None]:
    """Tokenise both data sets, or find them in the cache; one process of a node does the work."""
    telemetry.phase(Phase.TOKENIZING)
    reach("tokenizing")
    dataset = prepare(config.data, config.data.sources, tokenizer, name="train")
    held_out = None
    if config.data.eval is not None:
        held_out = prepare(config.data, (config.data.eval,), tokenizer, name="eval")
    refuse_unknown_tokens(config.model, tokenizer, dataset, held_out)
    return dataset, held_out


def _warn_alike(telemetry: Telemetry, world: World) -> Callable[[str], None]:
    """Return how to warn of what every rank finds alike: rank 0 says it, the others note it."""
    if world.is_main:
        return telemetry.warn
    return lambda sentence: telemetry.log("warning", message=sentence)


def _tell_data(
    config: TrainConfig,
    world: World,
    telemetry: Telemetry,
    plan: DataPlan,
    dataset: TokenDataset,
    held_out: TokenDataset | None,
) -> None:
    """Report what became of the rows, how many steps they make, and what a user should know."""
    reports = [plan.report(dataset.report), held_out.report if held_out is not None else None]
    telemetry.data(*reports)
    telemetry.plan(plan.total_steps)
    of_rows = [sentence for report in reports if report for sentence in report.warnings]
    of_run = (
        warmup_warning(config.training, plan.total_steps),
        single_process_warning(config),
        emulation_warning(config, torch.cpu.get_capabilities()),
    )
    for sentence in (*of_rows, *filter(None, of_run)):
        _warn_alike(telemetry, world)(sentence)


def _tell_model(
    config: TrainConfig,
    world: World,
    telemetry: Telemetry,
    dataset: TokenDataset,
    held_out: TokenDataset | None,
    module: CausalLoss,
) -> None:
    """Say where the loss costs more memory, and where rows are longer than the base has seen."""
    warn = _warn_alike(telemetry, world)
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
    """Return the first micro-batch of rank 0, on whichever rank this is."""
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
    """Refuse float8 that changes the loss, going by a batch that is the same on every rank."""
    if config.training.float8:
        check_float8(module, strategy.evaluate, loss_inputs(first_batch(), world.device))


def _load(
    config: TrainConfig, world: World, telemetry: Telemetry, dataset: TokenDataset
) -> CausalLoss:
    """Load, adapt and prepare the model, the same on every rank."""
    telemetry.phase(Phase.LOADING)
    if not config.data.packing:
        _check_memory(config, world, int(dataset.lengths.max()))
    reach("loading")
    place = load_device(config, world.rank, world.device)
    base = load_model(config, place, quantises=not is_loaded_once(config))
    torch.manual_seed(config.training.seed)  # adapters start alike on every rank
    model: nn.Module = choose_trained(base, config)
    return prepare_model(model, config, world.device, _warn_alike(telemetry, world))


def _store(
    config: TrainConfig,
    world: World,
    telemetry: Telemetry,
    fence: Fence | None,
    fingerprint: Fingerprint,
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
    )


def _fingerprint(
    asked: ModelConfig, config: TrainConfig, world: World, dataset: TokenDataset, plan: DataPlan
) -> Fingerprint:
    """Identify what a checkpoint can be continued as: model, method, data and their order.

    Rank 0 alone compares, and writes.
    """
    method = config.method.model_dump_json()
    return Fingerprint(
        model=model_fingerprint(asked),
        method=hashlib.sha256(method.encode()).hexdigest(),
        data=dataset.fingerprint,
        order=plan.fingerprint,
        weights=weights_fingerprint(config.model) if world.is_main else "",
        optimizer=config.training.optimizer,
    )
