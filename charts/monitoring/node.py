"""The dashboard of one node, with its ranks and GPUs."""

from finetune_trainer.config.metrics import Needs
from monitoring.board import TO_JOB, Board, Column, Kind, Limit, Panel, Query, Row, Variable
from monitoring.limits import DATA_WAIT, THROTTLED
from monitoring.rule import JOB
from monitoring.windows import Windows

_OF = 'node="$node"'
_RATE = "$__rate_interval"
_RANK = "{{finetunejob}}, rank {{rank}}"
_GPU = "{{gpu}}"


def node_board(windows: Windows) -> Board:
    """Return the dashboard."""
    return Board(
        "node",
        "Fine-tuning: one node",
        "What the ranks of a node do, and how its GPUs are.",
        (Variable("node", "label_values(finetune_train_last_seen_age_seconds, node)"),),
        (_ranks(windows), _gpus(), _faults()),
    )


def _ranks(windows: Windows) -> Row:
    return Row(
        "Ranks",
        (
            Panel(
                "Ranks of this node",
                "Jobs, ranks and strategies that run on the node.",
                "none",
                (Query(f"max by ({JOB}, rank, strategy, backend) (finetune_train_info{{{_OF}}})"),),
                Kind.TABLE,
                width=12,
                columns=(Column(""),),
                links=(TO_JOB,),
            ),
            Panel(
                "Time by phase",
                "Share of the wall time of the node's ranks.",
                "percentunit",
                (Query(f"avg by (phase) (finetunejob_rank:phase:ratio{{{_OF}}})", "{{phase}}"),),
                Kind.STACK,
                width=12,
            ),
            Panel(
                "Time since the last report",
                "Grows while a rank is stuck, stopped or dead.",
                "s",
                (Query(f"finetune_train_last_seen_age_seconds{{{_OF}}}", _RANK),),
                limit=Limit(windows.silence, "FineTuneJobHung"),
                links=(TO_JOB,),
            ),
            Panel(
                "Share of time waiting for data",
                "Time in which a rank waits for its next batch.",
                "percentunit",
                (Query(f'finetunejob_rank:phase:ratio{{{_OF},phase="data_wait"}}', _RANK),),
                limit=Limit(DATA_WAIT, "FineTuneDataStarved"),
                links=(TO_JOB,),
            ),
            Panel(
                "Host memory",
                "Resident memory of a rank's process.",
                "bytes",
                (Query(f'finetune_train_memory_bytes{{{_OF},kind="host_rss"}}', _RANK),),
                links=(TO_JOB,),
            ),
        ),
    )


def _panel(
    title: str,
    description: str,
    unit: str,
    expr: str,
    legend: str = _GPU,
    limit: Limit | None = None,
) -> Panel:
    query = Query(expr, legend)
    return Panel(title, description, unit, (query,), needs=Needs.GPU, limit=limit)


def _gpus() -> Row:
    def recorded(name: str) -> str:
        return f"finetune_gpu:{name}{{{_OF}}}"

    limit = f"max by (gpu) (finetune_gpu_power_limit_watts{{{_OF}}})"
    return Row(
        "GPUs",
        (
            _panel(
                "GPU utilisation",
                "Share of the time in which a kernel ran.",
                "percentunit",
                recorded("utilization:ratio"),
            ),
            _panel("GPU memory", "Memory in use.", "bytes", recorded("memory_used:bytes")),
            Panel(
                "GPU power and limit",
                "Power that a GPU draws, and its power limit.",
                "watt",
                (
                    Query(recorded("power:watts"), _GPU),
                    Query(limit, "limit {{gpu}}"),
                ),
                needs=Needs.GPU,
            ),
            _panel(
                "GPU temperature",
                "Temperature of the core.",
                "celsius",
                recorded("temperature:celsius"),
            ),
            _panel("GPU clock", "Clock of the processors.", "hertz", recorded("clock:hertz")),
            _panel(
                "Share of time at a reduced clock",
                "By reason; `sw_power_cap` is usual under load and raises no alert.",
                "percentunit",
                "max by (gpu, reason) (rate(finetune_gpu_throttle_seconds_total"
                f"{{{_OF}}}[{_RATE}]))",
                "{{gpu}}: {{reason}}",
                Limit(THROTTLED, "FineTuneGpuThrottled"),
            ),
        ),
        is_collapsed=True,
    )


def _faults() -> Row:
    def rate(name: str, by: str) -> str:
        """Return one series per GPU, because pages of two jobs may show the same GPU."""
        return f"max by (gpu, {by}) (rate(finetune_gpu_{name}_total{{{_OF}}}[{_RATE}]))"

    return Row(
        "Links and faults",
        (
            _panel(
                "NVLink traffic",
                "Sum over all links of a GPU.",
                "Bps",
                rate("nvlink_bytes", "direction"),
                "{{gpu}} {{direction}}",
            ),
            _panel(
                "PCIe traffic",
                "Between a GPU and its host.",
                "Bps",
                rate("pcie_bytes", "direction"),
                "{{gpu}} {{direction}}",
            ),
            _panel(
                "PCIe generation",
                "A generation that falls under load is a fault of the slot; an idle GPU lowers it.",
                "none",
                f"max by (gpu) (finetune_gpu_pcie_link_generation{{{_OF}}})",
            ),
            _panel(
                "GPU memory errors",
                "Since the driver was loaded. Uncorrected errors raise an alert.",
                "none",
                f"max by (gpu, type) (finetune_gpu_ecc_errors_total{{{_OF}}})",
                "{{gpu}}: {{type}}",
            ),
            _panel(
                "GPU errors by XID",
                "Errors that the driver reported, by NVIDIA's number.",
                "none",
                f"max by (gpu, xid) (finetune_gpu_xid_errors_total{{{_OF}}})",
                "{{gpu}}: XID {{xid}}",
            ),
            _panel(
                "NVLink errors per second",
                "By kind.",
                "none",
                rate("nvlink_errors", "kind"),
                "{{gpu}}: {{kind}}",
            ),
        ),
        is_collapsed=True,
    )
