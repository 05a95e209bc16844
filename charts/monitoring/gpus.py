"""Rules and alerts on GPUs, for metrics of our exporter and of NVIDIA's DCGM exporter.

A series has the labels `gpu` (UUID) and node; `finetune_gpu:rank:info` maps a GPU to job and rank.
"""

from monitoring.limits import THROTTLED
from monitoring.rule import JOB, RANK, THE_RANK, Alert, Rule, Severity
from monitoring.windows import Windows, duration

_BY_RANK = f"* on (gpu) group_left ({JOB}, rank) finetune_gpu:rank:info"
_OF_NOTHING = (13, 31, 43, 45)
"""XIDs that a program can cause; the GPU causes all others."""


def gpu_rules() -> tuple[Rule, ...]:
    """Return the rules that give metrics of both exporters the same names."""
    uuid = 'label_replace(finetune_train_info{gpu_uuid!=""}, "gpu", "$1", "gpu_uuid", "(.+)")'
    return (
        # One rank per GPU, because a join fails if two ranks share a GPU.
        Rule("finetune_gpu:rank:info", f"topk by (gpu) (1, max by (gpu, {RANK}) ({uuid}))"),
        _same("utilization:ratio", "finetune_gpu_utilization_ratio", "DCGM_FI_DEV_GPU_UTIL", 0.01),
        _same(
            "memory_used:bytes",
            'finetune_gpu_memory_bytes{kind="used"}',
            "DCGM_FI_DEV_FB_USED",
            1_048_576,
        ),
        _same("power:watts", "finetune_gpu_power_watts", "DCGM_FI_DEV_POWER_USAGE", 1),
        _same(
            "temperature:celsius",
            'finetune_gpu_temperature_celsius{sensor="core"}',
            "DCGM_FI_DEV_GPU_TEMP",
            1,
        ),
        _same(
            "clock:hertz",
            'finetune_gpu_clock_hertz{domain="sm"}',
            "DCGM_FI_DEV_SM_CLOCK",
            1_000_000,
        ),
        _same(
            "row_remap_failed:max",
            "finetune_gpu_row_remap_failed",
            "DCGM_FI_DEV_ROW_REMAP_FAILURE",
            1,
        ),
    )


def _same(name: str, own: str, dcgm: str, factor: float) -> Rule:
    """Return a rule for our metric and DCGM's, in our unit."""
    named = f'label_replace({dcgm}, "gpu", "$1", "UUID", "(.+)")'
    for host in ("Hostname", "hostname"):  # its names before and since 2026
        named = f'label_replace({named}, "node", "$1", "{host}", "(.+)")'
    scaled = named if factor == 1 else f"{factor:g} * {named}"
    return Rule(
        f"finetune_gpu:{name}",
        f"max by (gpu, node) ({own}) or max by (gpu, node) ({scaled})",
    )


def gpu_alerts(windows: Windows) -> tuple[Alert, ...]:
    """Return the alerts on GPUs of a job's ranks."""
    rate, share = duration(windows.rate), duration(windows.share)
    faults = f'xid!~"{"|".join(map(str, _OF_NOTHING))}"'
    the_gpu = f"{THE_RANK} has the GPU {{{{ $labels.gpu }}}}"
    return (
        Alert(
            "FineTuneGpuLost",
            f"(finetune_gpu_process_visible == 0) + on (gpu) group_left ({JOB}, rank)"
            " finetune_gpu:rank:info",
            windows.shortly,
            Severity.CRITICAL,
            f"{the_gpu}, which does not answer.",
            "The driver has lost it, or does not answer for it.",
        ),
        # The time of the error is used, because a counter that begins at 1 has not increased.
        Alert(
            "FineTuneGpuXid",
            f"(time() - finetune_gpu_xid_last_timestamp_seconds{{{faults}}} < {windows.share:g})"
            f" {_BY_RANK}",
            0,
            Severity.CRITICAL,
            f"{the_gpu}, which reported the error XID {{{{ $labels.xid }}}}.",
            "That was {{ $value | humanizeDuration }} ago.",
        ),
        # The maximum over reasons, because several can apply at the same time.
        Alert(
            "FineTuneGpuThrottled",
            "(max by (gpu, node) (rate(finetune_gpu_throttle_seconds_total"
            f'{{reason=~"sw_thermal|hw_thermal|hw_power_brake"}}[{rate}])) > {THROTTLED:g})'
            f" {_BY_RANK}",
            windows.lasting,
            Severity.WARNING,
            f"{the_gpu}, which is slowed down.",
            "{{ $value | humanizePercentage }} of the time its clock was reduced for heat, or for"
            " want of power.",
        ),
        Alert(
            "FineTuneGpuMemoryErrors",
            '(round(increase(finetune_gpu_ecc_errors_total{type="uncorrected"}'
            f"[{share}])) > 0) {_BY_RANK}",
            0,
            Severity.CRITICAL,
            f"{the_gpu}, whose memory has errors.",
            f"{{{{ $value | humanize }}}} errors in {share} could not be corrected.",
        ),
        Alert(
            "FineTuneGpuMemoryWorn",
            "((max by (gpu, node) (finetune_gpu_row_remap_pending) > 0)"
            f" or (finetune_gpu:row_remap_failed:max > 0)) {_BY_RANK}",
            0,
            Severity.WARNING,
            f"{the_gpu}, of whose memory a row is to be replaced.",
            "It needs a reset, or is to be exchanged, once the job has ended.",
        ),
        Alert(
            "FineTuneNvlinkDown",
            f"(finetune_gpu_nvlink_up_links < max_over_time(finetune_gpu_nvlink_up_links"
            f"[{duration(windows.past)}])) {_BY_RANK}",
            windows.lasting,
            Severity.WARNING,
            f"{the_gpu}, of which an NVLink is down.",
            "{{ $value | humanize }} links are up; there were more.",
        ),
    )
