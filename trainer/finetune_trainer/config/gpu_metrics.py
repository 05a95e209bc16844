"""Metrics of a GPU, declared once; a part of the catalogue in `metrics`.

The page of a node has them with `gpuMetrics: own`. The label `gpu` is the UUID, which
`metrics.INFO` and the series of NVIDIA's DCGM exporter also use for a GPU.
"""

from finetune_trainer.config.metrics import Label, Metric, MetricType, Needs

GPU = Label("gpu")
RECOVERY_ACTIONS = (
    "none",
    "gpu_reset",
    "node_reboot",
    "drain_p2p",
    "drain_and_reset",
    "recover_imex_domain",
    "bus_reset",
    "system_reboot",
)
"""Actions, indexed by NVML's number."""
MOST_XIDS = 16
"""Maximum number of XIDs with series per GPU: the newest."""


def _gauge(name: str, unit: str, help: str, *labels: Label) -> Metric:
    return Metric(
        f"finetune_gpu_{name}", MetricType.GAUGE, unit, help, (GPU, *labels), needs=Needs.GPU
    )


def _counter(name: str, unit: str, help: str, *labels: Label) -> Metric:
    return Metric(
        f"finetune_gpu_{name}_total",
        MetricType.COUNTER,
        unit,
        help,
        (GPU, *labels),
        needs=Needs.GPU,
    )


_XID = Label("xid")
_DIRECTION = Label("direction", ("tx", "rx"))

VISIBLE = _gauge(
    "process_visible",
    "GPUs",
    "1 while the driver responds for the GPU, 0 once the GPU is lost or the driver is silent.",
)
UTILIZATION = _gauge("utilization_ratio", "ratio", "Share of the time in which a kernel ran.")
MEMORY_UTILIZATION = _gauge(
    "memory_bandwidth_utilization_ratio",
    "ratio",
    "Share of the time in which the GPU's memory was read or written.",
)
MEMORY = _gauge(
    "memory_bytes",
    "bytes",
    "Memory of the GPU, by kind.",
    Label("kind", ("used", "free", "reserved", "total")),
)
POWER = _gauge("power_watts", "watts", "Power drawn.")
POWER_LIMIT = _gauge("power_limit_watts", "watts", "Power that the GPU may draw.")
ENERGY = _counter("energy_joules", "joules", "Energy used since the driver was loaded.")
TEMPERATURE = _gauge(
    "temperature_celsius", "degrees Celsius", "Temperature.", Label("sensor", ("core", "memory"))
)
CLOCK = _gauge("clock_hertz", "hertz", "Clock rate now.", Label("domain", ("sm", "memory")))
THROTTLED = _counter(
    "throttle_seconds",
    "seconds",
    "Time at a reduced clock, by reason; sampled if the driver does not count it.",
    Label("reason", ("sw_power_cap", "sw_thermal", "hw_thermal", "hw_power_brake", "sync_boost")),
)
ECC_ERRORS = _counter(
    "ecc_errors",
    "errors",
    "Memory errors since the driver was loaded.",
    Label("type", ("corrected", "uncorrected")),
)
ROW_REMAP = _gauge(
    "row_remap",
    "rows",
    "Memory rows replaced by spare ones, by the kind of error.",
    Label("kind", ("correctable", "uncorrectable")),
)
ROW_REMAP_PENDING = _gauge(
    "row_remap_pending", "GPUs", "1 while a row waits for a reset of the GPU to be replaced."
)
ROW_REMAP_FAILED = _gauge(
    "row_remap_failed", "GPUs", "1 once a row could not be replaced: exchange the GPU."
)
XID_ERRORS = _counter(
    "xid_errors",
    "errors",
    f"Errors that the driver reported, by NVIDIA's number; the newest {MOST_XIDS} numbers.",
    _XID,
)
XID_TIMESTAMP = _gauge(
    "xid_last_timestamp_seconds",
    "seconds",
    "When the driver last reported that error, since the epoch; used by alerts.",
    _XID,
)
RECOVERY_ACTION = _gauge(
    "recovery_action",
    "GPUs",
    "1 for the action that the driver recommends for the GPU, else 0.",
    Label("action", RECOVERY_ACTIONS),
)
NVLINK_BYTES = _counter("nvlink_bytes", "bytes", "Data over all NVLinks.", _DIRECTION)
NVLINK_ERRORS = _counter(
    "nvlink_errors",
    "errors",
    "Errors of all NVLinks, by kind.",
    Label("kind", ("replay", "recovery", "crc")),
)
NVLINK_UP = _gauge("nvlink_up_links", "links", "NVLinks that are up.")
PCIE_BYTES = _counter("pcie_bytes", "bytes", "Data over PCIe.", _DIRECTION)
PCIE_ERRORS = _counter(
    "pcie_errors",
    "errors",
    "Errors of PCIe, by kind.",
    Label("kind", ("replay", "correctable", "non_fatal", "fatal")),
)
PCIE_GENERATION = _gauge(
    "pcie_link_generation", "generations", "PCIe generation now; an idle GPU may lower it."
)
PCIE_WIDTH = _gauge("pcie_link_width", "lanes", "PCIe lanes in use.")

OF_GPU = (
    VISIBLE,
    UTILIZATION,
    MEMORY_UTILIZATION,
    MEMORY,
    POWER,
    POWER_LIMIT,
    ENERGY,
    TEMPERATURE,
    CLOCK,
    THROTTLED,
    ECC_ERRORS,
    ROW_REMAP,
    ROW_REMAP_PENDING,
    ROW_REMAP_FAILED,
    XID_ERRORS,
    XID_TIMESTAMP,
    RECOVERY_ACTION,
    NVLINK_BYTES,
    NVLINK_ERRORS,
    NVLINK_UP,
    PCIE_BYTES,
    PCIE_ERRORS,
    PCIE_GENERATION,
    PCIE_WIDTH,
)
"""All metrics of a GPU on a page, in order."""
