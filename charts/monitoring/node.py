"""The dashboard of one node, with its ranks and GPUs."""

from finetune_trainer.config.metrics import Needs
from monitoring.board import Board, Kind, Panel, Query, Row, Variable
from monitoring.rule import JOB

_OF = 'node="$node"'
_RATE = "$__rate_interval"
_RANK = "{{finetunejob}}, rank {{rank}}"
_GPU = "{{gpu}}"


def node_board() -> Board:
    """Return the dashboard."""
    return Board(
        "node",
        "Fine-tuning: one node",
        "What the ranks of a node do, and how its GPUs are.",
        (Variable("node", "label_values(finetune_train_last_seen_age_seconds, node)"),),
        (_ranks(), _gpus(), _faults()),
    )


def _ranks() -> Row:
    return Row(
        "Ranks",
        (
            Panel(
                "Ranks of this node",
                "What runs here.",
                "none",
                (Query(f"max by ({JOB}, rank, strategy, backend) (finetune_train_info{{{_OF}}})"),),
                Kind.TABLE,
                width=12,
                columns=("runs",),
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
                "Last sign of life",
                "Its age, by rank.",
                "s",
                (Query(f"finetune_train_last_seen_age_seconds{{{_OF}}}", _RANK),),
            ),
            Panel(
                "Waiting for data",
                "Share of a rank's time.",
                "percentunit",
                (Query(f'finetunejob_rank:phase:ratio{{{_OF},phase="data_wait"}}', _RANK),),
            ),
            Panel(
                "Memory of the processes",
                "Resident.",
                "bytes",
                (Query(f'finetune_train_memory_bytes{{{_OF},kind="host_rss"}}', _RANK),),
            ),
        ),
    )


def _panel(title: str, description: str, unit: str, expr: str, legend: str = _GPU) -> Panel:
    return Panel(title, description, unit, (Query(expr, legend),), needs=Needs.GPU)


def _gpus() -> Row:
    def recorded(name: str) -> str:
        return f"finetune_gpu:{name}{{{_OF}}}"

    limit = f"max by (gpu) (finetune_gpu_power_limit_watts{{{_OF}}})"
    return Row(
        "GPUs",
        (
            _panel("In use", "Share of the time.", "percentunit", recorded("utilization:ratio")),
            _panel("Memory", "In use.", "bytes", recorded("memory_used:bytes")),
            Panel(
                "Power",
                "Drawn, and the most that may be.",
                "watt",
                (
                    Query(recorded("power:watts"), _GPU),
                    Query(limit, "limit {{gpu}}"),
                ),
                needs=Needs.GPU,
            ),
            _panel("Temperature", "Of the core.", "celsius", recorded("temperature:celsius")),
            _panel("Clock", "Of the processors.", "hertz", recorded("clock:hertz")),
            _panel(
                "Throttled",
                "Share of the time at a reduced clock, by reason; `sw_power_cap` is usual under"
                " load.",
                "percentunit",
                "max by (gpu, reason) (rate(finetune_gpu_throttle_seconds_total"
                f"{{{_OF}}}[{_RATE}]))",
                "{{gpu}}: {{reason}}",
            ),
        ),
    )


def _faults() -> Row:
    def rate(name: str, by: str) -> str:
        """Return one series per GPU, because pages of two jobs may show the same GPU."""
        return f"max by (gpu, {by}) (rate(finetune_gpu_{name}_total{{{_OF}}}[{_RATE}]))"

    return Row(
        "Links and faults",
        (
            _panel(
                "NVLink",
                "Data a second, over all links of a GPU.",
                "Bps",
                rate("nvlink_bytes", "direction"),
                "{{gpu}} {{direction}}",
            ),
            _panel(
                "PCIe",
                "Data a second.",
                "Bps",
                rate("pcie_bytes", "direction"),
                "{{gpu}} {{direction}}",
            ),
            _panel(
                "PCIe generation",
                "One that falls under load is a fault of the slot; an idle GPU lowers it.",
                "none",
                f"max by (gpu) (finetune_gpu_pcie_link_generation{{{_OF}}})",
            ),
            _panel(
                "Memory errors",
                "Since the driver was loaded; one that cannot be corrected is one too many.",
                "none",
                f"max by (gpu, type) (finetune_gpu_ecc_errors_total{{{_OF}}})",
                "{{gpu}}: {{type}}",
            ),
            _panel(
                "XIDs",
                "Errors that the driver reported, by NVIDIA's number.",
                "none",
                f"max by (gpu, xid) (finetune_gpu_xid_errors_total{{{_OF}}})",
                "{{gpu}}: XID {{xid}}",
            ),
            _panel(
                "Errors of links",
                "Of NVLink, a second, by kind.",
                "none",
                rate("nvlink_errors", "kind"),
                "{{gpu}}: {{kind}}",
            ),
        ),
    )
