"""The dashboard of one job: whether it trains, how fast, and what holds it back."""

from finetune_trainer.telemetry.node.slow import SlowPace
from monitoring.board import TO_NODE, Board, Column, Kind, Limit, Panel, Query, Row, Variable
from monitoring.fleet import GOODPUT
from monitoring.job_hardware import collectives_row, gpus_row
from monitoring.limits import CHECKPOINT_INTERVALS, DATA_WAIT
from monitoring.rule import RANK
from monitoring.windows import Windows

_OF = 'namespace="$namespace",finetunejob="$finetunejob"'
_RATE = "$__rate_interval"
_BY_RANK = "rank {{rank}}"


def job_board(windows: Windows) -> Board:
    """Return the dashboard."""
    return Board(
        "job",
        "Fine-tuning: one job",
        "Is it training, how fast against what the hardware can do, which rank holds it back, and"
        " what did restarts cost?",
        (
            Variable("namespace", "label_values(finetune_job_status_phase, namespace)"),
            Variable(
                "finetunejob",
                'label_values(finetune_job_status_phase{namespace="$namespace"}, finetunejob)',
            ),
        ),
        (_training(windows), _time(), _ranks(windows), collectives_row(), gpus_row()),
    )


def _training(windows: Windows) -> Row:
    steps = f"finetune_train_step_duration_seconds_bucket{{{_OF}}}"
    slowest = f"histogram_quantile(%s, sum by (le) (rate({steps}[{_RATE}])))"
    return Row(
        "Is it training, and how fast?",
        (
            *_state(windows),
            Panel(
                "Loss",
                "Per label token; held-out loss only with an evaluation data set.",
                "none",
                (
                    Query(f"max(finetune_train_loss{{{_OF}}})", "training"),
                    Query(f"max(finetune_train_eval_loss{{{_OF}}})", "held out"),
                ),
            ),
            Panel(
                "Gradient norm",
                "Before clipping.",
                "none",
                (Query(f"max(finetune_train_grad_norm{{{_OF}}})", "norm"),),
            ),
            Panel(
                "Learning rate",
                "Of the last step.",
                "sci",
                (Query(f"max(finetune_train_learning_rate{{{_OF}}})", "rate"),),
            ),
            Panel(
                "Tokens per second",
                "Sum over all ranks. Padding takes time and teaches nothing.",
                "short",
                (
                    Query(
                        f"sum by (kind) (rate(finetune_train_tokens_total{{{_OF}}}[{_RATE}]))",
                        "{{kind}}",
                    ),
                ),
            ),
            Panel(
                "Step time",
                "Median and 99th percentile over all ranks.",
                "s",
                (Query(slowest % 0.5, "median"), Query(slowest % 0.99, "99 %")),
            ),
            Panel(
                "Step time distribution",
                "Two bands: some steps do more, such as those after an evaluation.",
                "s",
                (Query(f"sum by (le) (increase({steps}[{_RATE}]))"),),
                Kind.HEATMAP,
            ),
        ),
    )


def _state(windows: Windows) -> tuple[Panel, ...]:
    """Return the first line of the dashboard: how far the job is."""

    def number(
        title: str, description: str, unit: str, expr: str, limit: Limit | None = None
    ) -> Panel:
        kind = Kind.NUMBER
        return Panel(title, description, unit, (Query(expr),), kind, 4, 4, limit=limit)

    return (
        Panel(
            "Phase",
            "As in the status of the job.",
            "none",
            (Query(f"finetune_job_status_phase{{{_OF}}} == 1", "{{phase}}"),),
            Kind.STATES,
            width=4,
            height=4,
        ),
        number(
            "Step",
            "Optimizer steps finished, over all attempts.",
            "none",
            f"max(finetune_train_global_step{{{_OF}}})",
        ),
        number(
            "Progress",
            "Share of the optimizer steps that are done.",
            "percentunit",
            f"max(finetune_job_progress_ratio{{{_OF}}})",
        ),
        number(
            "Time left",
            "Forecast of the operator.",
            "s",
            f"max(finetune_job_eta_seconds{{{_OF}}})",
        ),
        number(
            "Time since the last step",
            "Long during an evaluation, a checkpoint, or if a rank is stuck. The alert waits for"
            " ten steps if they take longer.",
            "s",
            f"time() - max(finetune_train_last_step_timestamp_seconds{{{_OF}}})",
            Limit(windows.silence, "FineTuneJobHung"),
        ),
        number(
            "Attempt",
            "Number of the attempt; each restart begins another one.",
            "none",
            f"max(finetune_train_restart_attempt{{{_OF}}})",
        ),
    )


def _time() -> Row:
    saves = f"finetune_train_checkpoint_duration_seconds_%s{{{_OF}}}"
    committed = f'finetune_train_checkpoint_duration_seconds_count{{{_OF},kind="save_async"}}'
    return Row(
        "Where the time goes",
        (
            Panel(
                "Time by phase",
                "Share of the ranks' wall time. The model learns only in forward, backward and"
                " optimizer.",
                "percentunit",
                (Query(f"avg by (phase) (finetunejob_rank:phase:ratio{{{_OF}}})", "{{phase}}"),),
                Kind.STACK,
                width=12,
            ),
            Panel(
                "Job time by category",
                "Ledger of the operator since the job was created, over all attempts.",
                "s",
                (Query(f"finetunejob:wallclock_seconds:max{{{_OF}}}", "{{category}}"),),
                Kind.BARS,
                width=12,
            ),
            Panel(
                "Goodput",
                "Share of the time with resources in which new steps were made.",
                "percentunit",
                (Query(f"finetunejob:goodput:ratio{{{_OF}}}", "goodput"),),
                width=6,
                limit=GOODPUT,
            ),
            Panel(
                "Checkpoint duration by kind",
                "On average; training waits during save_blocking and load.",
                "s",
                (
                    Query(
                        f"sum by (kind) (rate({saves % 'sum'}[{_RATE}]))"
                        f" / (sum by (kind) (rate({saves % 'count'}[{_RATE}])) > 0)",
                        "{{kind}}",
                    ),
                ),
                width=6,
            ),
            Panel(
                "Checkpoint size",
                "All files of a checkpoint, on average.",
                "bytes",
                (
                    Query(
                        f"sum(rate(finetune_train_checkpoint_bytes_total{{{_OF}}}[{_RATE}]))"
                        f" / (sum(rate({committed}[{_RATE}])) > 0)",
                        "size",
                    ),
                ),
                width=6,
            ),
            Panel(
                "Age of the newest checkpoint",
                "Training time that the loss of a node would cost. The limit is that of the alert"
                " FineTuneCheckpointStale; it is absent if checkpoints are counted in steps.",
                "s",
                (
                    Query(
                        "time() - max(finetune_train_checkpoint_last_success_timestamp_seconds"
                        f"{{{_OF}}})",
                        "age",
                    ),
                    Query(
                        f"{CHECKPOINT_INTERVALS} *"
                        f" max(finetune_train_checkpoint_interval_seconds{{{_OF}}})",
                        "limit",
                    ),
                ),
                width=6,
            ),
        ),
    )


def _ranks(windows: Windows) -> Row:
    busy = f'finetune_train_phase_seconds_total{{{_OF},phase!="comm_exposed"}}'
    steps = f"finetune_train_steps_total{{{_OF}}}"
    shares = "finetunejob_rank:phase:ratio"

    def by_rank(
        title: str, description: str, unit: str, expr: str, width: int, limit: Limit | None = None
    ) -> Panel:
        query = Query(expr, _BY_RANK)
        return Panel(title, description, unit, (query,), width=width, limit=limit, links=(TO_NODE,))

    return Row(
        "Which rank holds it back?",
        (
            Panel(
                "Suspected ranks",
                "Ranks that hold the others back, and the cause.",
                "none",
                (Query(f"max by (rank, node, cause) (finetune_job_suspect{{{_OF}}})"),),
                Kind.TABLE,
                columns=(Column(""),),
                links=(TO_NODE,),
                is_empty_when_well=True,
            ),
            by_rank(
                "Straggler score",
                "Busy time per step, divided by the median of the other ranks; 1.2 is 20 % longer.",
                "none",
                f"max by (rank, node) (finetune_train_straggler_score{{{_OF}}})",
                8,
                Limit(SlowPace().slow, "FineTuneRankSlow"),
            ),
            by_rank(
                "Busy time per step",
                "Time without waiting for others. The others wait for the highest rank.",
                "s",
                f"sum by ({RANK}) (rate({busy}[{_RATE}]))"
                f" / (sum by ({RANK}) (rate({steps}[{_RATE}])) > 0)",
                8,
            ),
            by_rank(
                "Share of time waiting for other ranks",
                "Time in which a rank can only wait for a collective. The others wait for the"
                " lowest rank.",
                "percentunit",
                f'{shares}{{{_OF},phase="comm_exposed"}}',
                6,
            ),
            by_rank(
                "Share of time waiting for data",
                "Time in which a rank waits for its next batch.",
                "percentunit",
                f'{shares}{{{_OF},phase="data_wait"}}',
                6,
                Limit(DATA_WAIT, "FineTuneDataStarved"),
            ),
            by_rank(
                "Time since the last report",
                "Grows while a rank is stuck, stopped or dead.",
                "s",
                f"finetune_train_last_seen_age_seconds{{{_OF}}}",
                6,
                Limit(windows.silence, "FineTuneJobHung"),
            ),
            by_rank(
                "Host memory",
                "Resident memory of a rank's process.",
                "bytes",
                f'finetune_train_memory_bytes{{{_OF},kind="host_rss"}}',
                6,
            ),
        ),
    )
