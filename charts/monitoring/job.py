"""The dashboard of one job: whether it trains, how fast, and what holds it back."""

from finetune_trainer.config.metrics import Needs
from monitoring.board import Board, Kind, Panel, Query, Row, Variable
from monitoring.rule import JOB, RANK

_OF = 'namespace="$namespace",finetunejob="$finetunejob"'
_RATE = "$__rate_interval"
_BY_RANK = "rank {{rank}}"


def job_board() -> Board:
    """Return the dashboard."""
    return Board(
        "job",
        "Fine-tuning: one job",
        "Is it training, how fast against what the hardware can do, which rank holds it back, and"
        " what did restarts cost?",
        (
            Variable("namespace", "label_values(finetune_train_global_step, namespace)"),
            Variable(
                "finetunejob",
                'label_values(finetune_train_global_step{namespace="$namespace"}, finetunejob)',
            ),
        ),
        (_training(), _time(), _ranks(), _collectives(), _gpus()),
    )


def _training() -> Row:
    steps = f"finetune_train_step_duration_seconds_bucket{{{_OF}}}"
    slowest = f"histogram_quantile(%s, sum by (le) (rate({steps}[{_RATE}])))"
    return Row(
        "Is it training, and how fast?",
        (
            Panel(
                "Phase",
                "What the operator says of the job.",
                "none",
                (Query(f"finetune_job_status_phase{{{_OF}}} == 1", "{{phase}}"),),
                Kind.STATES,
                width=12,
                height=4,
            ),
            Panel(
                "Step",
                "Optimizer steps finished, over all attempts.",
                "none",
                (Query(f"max(finetune_train_global_step{{{_OF}}})"),),
                Kind.NUMBER,
                width=4,
                height=4,
            ),
            Panel(
                "Since the newest step",
                "Longer than a few steps: an evaluation, a checkpoint, or a rank that is stuck.",
                "s",
                (Query(f"time() - max(finetune_train_last_step_timestamp_seconds{{{_OF}}})"),),
                Kind.NUMBER,
                width=4,
                height=4,
            ),
            Panel(
                "Attempt",
                "How often it was started.",
                "none",
                (Query(f"max(finetune_train_restart_attempt{{{_OF}}})"),),
                Kind.NUMBER,
                width=4,
                height=4,
            ),
            Panel(
                "Loss",
                "Per label token; the held-out loss where there is one.",
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
                "Of the newest step.",
                "sci",
                (Query(f"max(finetune_train_learning_rate{{{_OF}}})", "rate"),),
            ),
            Panel(
                "Tokens",
                "A second, of all ranks; padding is time for nothing.",
                "none",
                (
                    Query(
                        f"sum by (kind) (rate(finetune_train_tokens_total{{{_OF}}}[{_RATE}]))",
                        "{{kind}}",
                    ),
                ),
            ),
            Panel(
                "Model FLOPs utilisation",
                "Of the dense peak of the GPUs; recomputed activations do not count.",
                "percentunit",
                (Query(f"finetunejob:mfu:ratio{{{_OF}}}", "MFU"),),
                needs=Needs.GPU,
            ),
            Panel(
                "Time of a step",
                "Of all ranks.",
                "s",
                (Query(slowest % 0.5, "median"), Query(slowest % 0.99, "99 %")),
            ),
            Panel(
                "Steps by their time",
                "Two bands: some steps do more, such as those after an evaluation.",
                "s",
                (Query(f"sum by (le) (increase({steps}[{_RATE}]))"),),
                Kind.HEATMAP,
                width=24,
            ),
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
                "Share of the ranks' wall time. All but forward, backward and optimizer is time in"
                " which the model learns nothing.",
                "percentunit",
                (Query(f"avg by (phase) (finetunejob_rank:phase:ratio{{{_OF}}})", "{{phase}}"),),
                Kind.STACK,
                width=12,
            ),
            Panel(
                "Time since its creation",
                "Of the whole job, over all attempts, as the operator counts it.",
                "s",
                (Query(f"finetunejob:wallclock_seconds:max{{{_OF}}}", "{{category}}"),),
                Kind.STACK,
                width=12,
            ),
            Panel(
                "Goodput",
                "Share of the time with resources in which new steps were made.",
                "percentunit",
                (Query(f"finetunejob:goodput:ratio{{{_OF}}}", "goodput"),),
                width=6,
            ),
            Panel(
                "Checkpoints",
                "Average time of one, by kind of work; a step waits for what blocks.",
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
                "Size of a checkpoint",
                "Of all its files, on average.",
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
                "So much would be lost with a node.",
                "s",
                (
                    Query(
                        "time() - max(finetune_train_checkpoint_last_success_timestamp_seconds"
                        f"{{{_OF}}})",
                        "age",
                    ),
                ),
                width=6,
            ),
        ),
    )


def _ranks() -> Row:
    busy = f'finetune_train_phase_seconds_total{{{_OF},phase!="comm_exposed"}}'
    steps = f"finetune_train_steps_total{{{_OF}}}"
    return Row(
        "Which rank holds it back?",
        (
            Panel(
                "Suspects",
                "Ranks that hold the others back, and why.",
                "none",
                (
                    Query(
                        f"max by (rank, node, cause) (finetune_job_suspect{{{_OF}}})",
                        "rank {{rank}} on {{node}}: {{cause}}",
                    ),
                ),
                is_empty_when_well=True,
            ),
            Panel(
                "Score",
                "Busy time of a step by the median of the other ranks'; 1.2 is 20 % longer.",
                "none",
                (Query(f"max by (rank) (finetune_train_straggler_score{{{_OF}}})", _BY_RANK),),
            ),
            Panel(
                "Busy time of a step",
                "All but waiting for others. The rank above the others is the one they wait for.",
                "s",
                (
                    Query(
                        f"sum by ({RANK}) (rate({busy}[{_RATE}]))"
                        f" / (sum by ({RANK}) (rate({steps}[{_RATE}])) > 0)",
                        _BY_RANK,
                    ),
                ),
            ),
            Panel(
                "Waiting for others",
                "Share of its time in which a rank can only wait for a collective. The one below"
                " the others is the one they wait for.",
                "percentunit",
                (Query(f'finetunejob_rank:phase:ratio{{{_OF},phase="comm_exposed"}}', _BY_RANK),),
            ),
            Panel(
                "Last sign of life",
                "Its age, by rank.",
                "s",
                (Query(f"finetune_train_last_seen_age_seconds{{{_OF}}}", _BY_RANK),),
                width=8,
            ),
            Panel(
                "Memory of the processes",
                "Resident, by rank.",
                "bytes",
                (Query(f'finetune_train_memory_bytes{{{_OF},kind="host_rss"}}', _BY_RANK),),
                width=8,
            ),
        ),
    )


def _collectives() -> Row:
    def rate(name: str, by: str) -> str:
        """Return a rate per rank, because every rank counts each collective in full."""
        of_rank = f"sum by ({RANK}, {by}) (rate(finetune_comm_{name}_total{{{_OF}}}[{_RATE}]))"
        return f"avg by ({by}) ({of_rank})"

    newest = f"finetune_comm_last_enqueued_seq{{{_OF}}}"
    return Row(
        "Collectives",
        (
            Panel(
                "Bus bandwidth",
                "Of the rank that waits least, by operation and group; messages of 1 MiB and more.",
                "Bps",
                (
                    Query(
                        f"finetunejob_op:bus_bytes_per_second:max{{{_OF}}}", "{{op}} in {{group}}"
                    ),
                ),
            ),
            Panel(
                "Data",
                "A second, of a rank on average; of each collective the whole tensor.",
                "Bps",
                (Query(rate("bytes", "op, group"), "{{op}} in {{group}}"),),
                Kind.STACK,
            ),
            Panel(
                "Calls",
                "A second, of a rank on average, by size of the message.",
                "ops",
                (Query(rate("collectives", "op, size"), "{{op}}, {{size}}"),),
            ),
            Panel(
                "Behind the first rank",
                "Collectives that others have begun and a rank has not. One that stays above 0 is"
                " stuck.",
                "none",
                (
                    Query(
                        f"max by (group) ({newest}) - on (group) group_right {newest}",
                        "rank {{rank}} in {{group}}",
                    ),
                ),
                width=12,
            ),
            Panel(
                "Share that is known",
                "Of the collectives, those whose bytes and seconds were seen.",
                "percentunit",
                (Query(f"min by (of) (finetune_comm_sampled_ratio{{{_OF}}})", "{{of}}"),),
                width=12,
            ),
        ),
    )


def _gpus() -> Row:
    own = f"* on (gpu) group_left (rank) finetune_gpu:rank:info{{{_OF}}}"

    def gpus(title: str, description: str, unit: str, record: str) -> Panel:
        return Panel(
            title,
            description,
            unit,
            (Query(f"finetune_gpu:{record} {own}", _BY_RANK),),
            needs=Needs.GPU,
        )

    return Row(
        "GPUs",
        (
            gpus(
                "In use",
                "Share of the time in which a kernel ran, also one that only waits for others.",
                "percentunit",
                "utilization:ratio",
            ),
            gpus("Memory", "In use.", "bytes", "memory_used:bytes"),
            gpus("Power", "Drawn.", "watt", "power:watts"),
            Panel(
                "Tokens for a joule",
                "Of the GPUs alone.",
                "none",
                (
                    Query(
                        f"finetunejob:tokens:rate{{{_OF}}} / on ({JOB}) (sum by ({JOB})"
                        f" (rate(finetune_gpu_energy_joules_total{{{_OF}}}[{_RATE}])) > 0)",
                        "tokens",
                    ),
                ),
                needs=Needs.GPU,
            ),
        ),
    )
