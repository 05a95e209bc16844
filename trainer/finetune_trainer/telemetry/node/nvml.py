"""Read this machine's GPUs through NVML in a process: `python nvml.py PARENT SECONDS MOST_XIDS`.

`gpus` starts it with its own process id, the seconds between two readings and the number of XIDs
to remember, and reads JSON objects from its standard output, one per line:

    {"problem": SENTENCE}                a message for the user
    {"asking": UUID}                     the driver is being queried for this GPU
    {"read": UUID, "isLost": BOOL, "values": [[NAME, [LABEL, …], VALUE], …]}

A driver call may never return, not even on SIGKILL, so no process waits for this one. To stay
small it imports none of our modules; metric names are given without `finetune_gpu_`.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pynvml as nv

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_ALL_LINKS = 0xFFFFFFFF

Value = tuple[str, tuple[str, ...], float]


class _Field(NamedTuple):
    """A driver value with an id; `unit` is its unit in terms of the metric's unit."""

    id: int
    metric: str
    label: str
    unit: float = 1
    scope: int = 0


_FIELDS = (
    _Field(nv.NVML_FI_DEV_MEMORY_TEMP, "temperature_celsius", "memory"),
    _Field(nv.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, "nvlink_bytes_total", "tx", 1024, _ALL_LINKS),
    _Field(nv.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, "nvlink_bytes_total", "rx", 1024, _ALL_LINKS),
    _Field(nv.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, "nvlink_errors_total", "replay"),
    _Field(nv.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, "nvlink_errors_total", "recovery"),
    _Field(nv.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, "nvlink_errors_total", "crc"),
    _Field(nv.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, "pcie_bytes_total", "tx"),
    _Field(nv.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, "pcie_bytes_total", "rx"),
    _Field(nv.NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS, "pcie_errors_total", "correctable"),
    _Field(nv.NVML_FI_DEV_PCIE_COUNT_NON_FATAL_ERROR, "pcie_errors_total", "non_fatal"),
    _Field(nv.NVML_FI_DEV_PCIE_COUNT_FATAL_ERROR, "pcie_errors_total", "fatal"),
)


class _Throttle(NamedTuple):
    """A reason for a lower clock: the field that counts it in ns, and its bits in the mask."""

    id: int
    reason: str
    bits: int


_THROTTLES = (
    _Throttle(nv.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP, "sw_power_cap", 0x04),
    _Throttle(nv.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN, "sw_thermal", 0x20),
    _Throttle(nv.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN, "hw_thermal", 0x40),
    _Throttle(nv.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN, "hw_power_brake", 0x80),
    _Throttle(nv.NVML_FI_DEV_CLOCKS_EVENT_REASON_SYNC_BOOST, "sync_boost", 0x10),
)
_RECOVERY = nv.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
_NUM_LINKS = nv.NVML_FI_DEV_NVLINK_LINK_COUNT
_MEMBERS = {  # member of the union in a field's value, by NVML's type
    nv.NVML_VALUE_TYPE_DOUBLE: "dVal",
    nv.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    nv.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    nv.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    nv.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    nv.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    nv.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}


class Gpu:
    """GPU that the driver shows."""

    def __init__(self, handle: Any, most_xids: int) -> None:
        """Read its UUID.

        Raises:
            NVMLError: The driver does not return it.
        """
        self.handle = handle
        self.uuid: str = nv.nvmlDeviceGetUUID(handle)
        self._most_xids = most_xids
        self._xids: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self._sampled = dict.fromkeys((one.reason for one in _THROTTLES), 0.0)
        self._sampled_at: float | None = None
        self._known: dict[int, float] = {}  # newest reading, by field

    def count_xid(self, xid: int) -> None:
        """Count an error reported by the driver; only the latest error numbers are remembered."""
        count, _ = self._xids.pop(xid, (0, 0.0))
        self._xids[xid] = count + 1, time.time()
        if len(self._xids) > self._most_xids:
            self._xids.popitem(last=False)

    def read(self) -> tuple[bool, list[Value]]:
        """Return whether the driver has lost the GPU, and the values that are still known."""
        of_xids: list[Value] = []
        for xid, (count, when) in self._xids.items():
            of_xids.append(("xid_errors_total", (str(xid),), count))
            of_xids.append(("xid_last_timestamp_seconds", (str(xid),), when))
        found = of_xids.copy()
        for ask in (*_QUESTIONS, self._fields, self._links, self._throttled):
            try:
                found += ask(self.handle)
            except nv.NVMLError as error:  # mostly not supported by this GPU or driver
                if error.value == nv.NVML_ERROR_GPU_IS_LOST:
                    return True, of_xids
        return False, found

    def _fields(self, handle: Any) -> list[Value]:
        ids = [(one.id, one.scope) for one in _FIELDS]
        ids += [(one.id, 0) for one in _THROTTLES] + [(_RECOVERY, 0), (_NUM_LINKS, 0)]
        self._known = {}
        read = nv.nvmlDeviceGetFieldValues(handle, ids)
        self._known = known = {
            one.fieldId: float(getattr(one.value, _MEMBERS[one.valueType]))
            for one in read
            if one.nvmlReturn == nv.NVML_SUCCESS and one.valueType in _MEMBERS
        }
        found: list[Value] = [
            (one.metric, (one.label,), known[one.id] * one.unit)
            for one in _FIELDS
            if one.id in known
        ]
        if _RECOVERY in known:
            found.append(("recovery_action", (), known[_RECOVERY]))
        return found

    def _links(self, handle: Any) -> list[Value]:
        if not (num_links := int(self._known.get(_NUM_LINKS, 0))):
            return []
        up = sum(nv.nvmlDeviceGetNvLinkState(handle, link) for link in range(num_links))
        return [("nvlink_up_links", (), up)]

    def _throttled(self, handle: Any) -> list[Value]:
        """Return the driver's own times, or sums of samples if the driver has no such times."""
        name, known = "throttle_seconds_total", self._known
        counted: list[Value] = [
            (name, (one.reason,), known[one.id] / 1e9) for one in _THROTTLES if one.id in known
        ]
        if counted:
            return counted
        bits, now = nv.nvmlDeviceGetCurrentClocksEventReasons(handle), time.monotonic()
        since, self._sampled_at = self._sampled_at, now
        for one in _THROTTLES:
            if since is not None and bits & one.bits:
                self._sampled[one.reason] += now - since
        return [(name, (reason,), seconds) for reason, seconds in self._sampled.items()]


def _use(handle: Any) -> list[Value]:
    rates = nv.nvmlDeviceGetUtilizationRates(handle)
    return [
        ("utilization_ratio", (), rates.gpu / 100),
        ("memory_bandwidth_utilization_ratio", (), rates.memory / 100),
    ]


def _memory(handle: Any) -> list[Value]:
    read = nv.nvmlDeviceGetMemoryInfo(handle, nv.nvmlMemory_v2)
    kinds = ("used", "free", "reserved", "total")
    return [("memory_bytes", (kind,), getattr(read, kind)) for kind in kinds]


def _clock(domain: str, number: int) -> "Question":
    def ask(handle: Any) -> list[Value]:
        return [("clock_hertz", (domain,), nv.nvmlDeviceGetClockInfo(handle, number) * 1e6)]

    return ask


def _ecc(kind: str, number: int) -> "Question":
    def ask(handle: Any) -> list[Value]:
        count = nv.nvmlDeviceGetTotalEccErrors(handle, number, nv.NVML_VOLATILE_ECC)
        return [("ecc_errors_total", (kind,), count)]

    return ask


def _rows(handle: Any) -> list[Value]:
    correctable, uncorrectable, pending, failed = nv.nvmlDeviceGetRemappedRows(handle)
    return [
        ("row_remap", ("correctable",), correctable),
        ("row_remap", ("uncorrectable",), uncorrectable),
        ("row_remap_pending", (), pending),
        ("row_remap_failed", (), failed),
    ]


def _one(name: str, read: Callable[[Any], float], unit: float = 1, *labels: str) -> "Question":
    return lambda handle: [(name, labels, read(handle) * unit)]


Question = Callable[[Any], list[Value]]
"""Query the driver for one GPU; raises NVMLError if there is no response."""

_QUESTIONS: tuple[Question, ...] = (
    _use,
    _memory,
    _one("power_watts", nv.nvmlDeviceGetPowerUsage, 1e-3),
    _one("power_limit_watts", nv.nvmlDeviceGetEnforcedPowerLimit, 1e-3),
    _one("energy_joules_total", nv.nvmlDeviceGetTotalEnergyConsumption, 1e-3),
    _one(
        "temperature_celsius",
        lambda handle: float(nv.nvmlDeviceGetTemperature(handle, nv.NVML_TEMPERATURE_GPU)),
        1,
        "core",
    ),
    _clock("sm", nv.NVML_CLOCK_SM),
    _clock("memory", nv.NVML_CLOCK_MEM),
    _ecc("corrected", nv.NVML_MEMORY_ERROR_TYPE_CORRECTED),
    _ecc("uncorrected", nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    _rows,
    _one("pcie_errors_total", nv.nvmlDeviceGetPcieReplayCounter, 1, "replay"),
    _one("pcie_link_generation", nv.nvmlDeviceGetCurrPcieLinkGeneration),
    _one("pcie_link_width", nv.nvmlDeviceGetCurrPcieLinkWidth),
)


class Driver:
    """All GPUs that the driver shows, and their errors."""

    def __init__(self, most_xids: int) -> None:
        """Open the driver's library.

        Raises:
            NVMLError: The library or the driver is missing.
        """
        nv.nvmlInit()
        self._most_xids = most_xids
        self._count = nv.nvmlDeviceGetCount()
        if not self._count:
            _write(problem="NVML shows no GPU")
        self._gpus: dict[int, Gpu] = {}
        self._events: Any = None

    def read(self) -> None:
        """Write a reading of every GPU."""
        for index in range(self._count):
            gpu = self._gpus.get(index) or self._find(index)
            if gpu is None:
                continue
            _write(asking=gpu.uuid)
            is_lost, values = gpu.read()
            _write(read=gpu.uuid, isLost=is_lost, values=values)
            if is_lost:
                _write(problem=f"the driver has lost {gpu.uuid}; drain and restart its node")

    def wait(self, seconds: float) -> None:
        """Count the errors that the driver reports within `seconds`."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            try:
                event = nv.nvmlEventSetWait_v2(self._events, int(left * 1000) + 1)
            except nv.NVMLError as error:
                if error.value != nv.NVML_ERROR_TIMEOUT:  # no events supported, or a lost GPU
                    time.sleep(max(0.0, until - time.monotonic()))
                continue
            for gpu in self._gpus.values():
                if _address(gpu.handle) == _address(event.device):  # a lost GPU has no UUID
                    gpu.count_xid(event.eventData)

    def _find(self, index: int) -> Gpu | None:
        """Open a GPU for the first time; None while it is lost."""
        try:
            gpu = Gpu(nv.nvmlDeviceGetHandleByIndex(index), self._most_xids)
        except nv.NVMLError as error:
            _write(problem=f"the driver does not show GPU {index} of this node ({error})")
            return None
        self._gpus[index] = gpu
        self._listen(gpu)
        return gpu

    def _listen(self, gpu: Gpu) -> None:
        try:
            if self._events is None:
                self._events = nv.nvmlEventSetCreate()
            nv.nvmlDeviceRegisterEvents(gpu.handle, nv.nvmlEventTypeXidCriticalError, self._events)
        except nv.NVMLError as error:
            _write(problem=f"the driver does not report the errors of {gpu.uuid} ({error})")


def main() -> None:
    """Read until the parent has ended."""
    parent, seconds, most_xids = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        driver = Driver(int(most_xids))
    except nv.NVMLError as error:
        _write(problem=f"NVML cannot be used ({error})")
        return
    while os.getppid() == int(parent):
        driver.read()
        driver.wait(float(seconds))


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _write(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
