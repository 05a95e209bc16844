"""Rows of the dashboard of one job about its collectives and its GPUs."""

from finetune_trainer.config.metrics import Needs
from monitoring.board import TO_NODE, Kind, Panel, Query, Row
from monitoring.rule import JOB, RANK

_OF = 'namespace="$namespace",finetunejob="$finetunejob"'
_RATE = "$__rate_interval"
_BY_RANK = "rank {{rank}}"


def collectives_row() -> Row:
    """Return the row about the collectives of a job's ranks."""

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
                "Collective data per second",
                "Average of a rank; each collective counts its whole tensor.",
                "Bps",
                (Query(rate("bytes", "op, group"), "{{op}} in {{group}}"),),
                Kind.STACK,
            ),
            Panel(
                "Collective calls per second",
                "Average of a rank, by size of the message.",
                "ops",
                (Query(rate("collectives", "op, size"), "{{op}}, {{size}}"),),
            ),
            Panel(
                "Collectives behind the first rank",
                "Collectives that other ranks have begun and a rank has not. A rank that stays"
                " above 0 is stuck.",
                "none",
                (
                    Query(
                        f"max by (group) ({newest}) - on (group) group_right {newest}",
                        "rank {{rank}} in {{group}}",
                    ),
                ),
                width=12,
                links=(TO_NODE,),
            ),
            Panel(
                "Share of collectives that are measured",
                "Collectives whose bytes or seconds are known.",
                "percentunit",
                (Query(f"min by (of) (finetune_comm_sampled_ratio{{{_OF}}})", "{{of}}"),),
                width=12,
            ),
        ),
        is_collapsed=True,
    )


def gpus_row() -> Row:
    """Return the row about the GPUs of a job."""
    own = f"* on (gpu) group_left (rank) finetune_gpu:rank:info{{{_OF}}}"

    def gpus(title: str, description: str, unit: str, record: str) -> Panel:
        return Panel(
            title,
            description,
            unit,
            (Query(f"finetune_gpu:{record} {own}", _BY_RANK),),
            needs=Needs.GPU,
            links=(TO_NODE,),
        )

    return Row(
        "GPUs",
        (
            Panel(
                "Model FLOPs utilisation (MFU)",
                "Share of the dense peak of the GPUs; recomputed activations do not count.",
                "percentunit",
                (Query(f"finetunejob:mfu:ratio{{{_OF}}}", "MFU"),),
                needs=Needs.GPU,
            ),
            gpus(
                "GPU utilisation",
                "Share of the time in which a kernel ran, including kernels that wait for others.",
                "percentunit",
                "utilization:ratio",
            ),
            gpus("GPU memory", "Memory in use.", "bytes", "memory_used:bytes"),
            gpus("GPU power", "Power that the GPU draws.", "watt", "power:watts"),
            Panel(
                "Tokens per joule",
                "Energy of the GPUs only.",
                "short",
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
        is_collapsed=True,
    )
