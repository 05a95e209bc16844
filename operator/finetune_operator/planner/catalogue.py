"""GPU sizes of Azure with their memory, links and list prices, and prices from a user's file.

`azure_gpu_sizes.csv` is the data; a value with `?` is recalled or inferred, not looked up. Sources:
Azure's documentation of VM sizes (docs), the price table of karpenter-provider-azure (karpenter),
and stas00/ml-engineering at 744d01e. Usable memory is an estimate, except for the H200. List prices
do not imply quota or capacity.
"""

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path

from finetune_operator.errors import CatalogueError
from finetune_trainer.sizing.fit import Gpu

_PREFIX = "Standard_"
_GIB = 2**30
_MOST_GPUS = 64  # per node, as in `topology.gpusPerNode`
_PRICE_COLUMNS = ("size", "usd_per_hour", "date")


@dataclass(frozen=True)
class Price:
    """Price of a VM: USD per hour, the day on which it was valid, and its region if known."""

    usd_per_hour: float
    date: date
    region: str = ""


@dataclass(frozen=True)
class GpuSize:
    """A VM size.

    Attributes:
        name: Name in Azure, with `Standard_`.
        gpu: Model of its GPUs.
        gpus: Number of GPUs.
        usable_gib: Memory of one GPU that the driver reports as its total.
        capability: NVIDIA's compute capability; (0, 0) for other GPUs.
        nvlink_gb_per_second: Bandwidth of a GPU to all others, both directions together; 0 if not
            all GPUs are connected.
        rdma_gbps: InfiniBand bandwidth of the VM, in Gb/s; 0 without.
        ethernet_gbps: Bandwidth of its other network, in Gb/s.
        host_gib: Memory of the VM.
        half_precision_tflops: Dense peak of one GPU in fp16, and in bf16 if the GPU supports it.
        price: Price on demand; None if unknown.
        unsupported: Reason why our images cannot use the size; empty if they can.
        recalled: Names of the fields whose values were not looked up.
    """

    name: str
    gpu: str
    gpus: int
    usable_gib: float
    capability: tuple[int, int]
    nvlink_gb_per_second: float
    rdma_gbps: float
    ethernet_gbps: float
    host_gib: float
    half_precision_tflops: float
    price: Price | None
    unsupported: str = ""
    recalled: tuple[str, ...] = ()

    @property
    def has_nvlink(self) -> bool:
        """Whether NVLink connects all GPUs of a VM."""
        return self.nvlink_gb_per_second > 0

    @property
    def memory(self) -> Gpu:
        """Memory of a rank, for `Sizing.fit`."""
        return Gpu(int(self.usable_gib * _GIB), self.capability)

    def show(self, field: str) -> str:
        """Return the value of a field as text, with `?` if it was not looked up."""
        value = getattr(self, field)
        text = f"{value:g}" if isinstance(value, float) else str(value)
        return text + "?" * (field in self.recalled)


def sizes() -> tuple[GpuSize, ...]:
    """Return all sizes that are not retired, also unsupported ones."""
    return tuple(_size(row) for row in _rows().values() if not row["retired_on"])


def size_of(name: str) -> GpuSize:
    """Return the size of a name with or without `Standard_`, in any case.

    Raises:
        CatalogueError: The size is unknown or retired.
    """
    row = _rows().get(_key(name))
    if row is None:
        names = {key: row["name"] for key, row in _rows().items() if not row["retired_on"]}
        nearest = [names[key] for key in get_close_matches(_key(name), names, n=3, cutoff=0.7)]
        hint = "write it as Azure does, such as Standard_NC24ads_A100_v4"
        if nearest:
            hint = f"did you mean {' or '.join(nearest)}?"
        raise CatalogueError(f"size {name}: is not a known GPU size of Azure; {hint}")
    if row["retired_on"]:
        raise CatalogueError(
            f"size {row['name']}: Azure retired it on {row['retired_on']}; "
            f"use {_PREFIX}{row['successor']}"
        )
    return _size(row)


def size_with(memory_gib: float) -> GpuSize:
    """Return a stand-in for GPUs that are not in the catalogue; only their memory is known."""
    return GpuSize(
        name=f"GPUs of {memory_gib:g} GiB",
        gpu="GPU",
        gpus=_MOST_GPUS,
        usable_gib=memory_gib,
        capability=(8, 0),
        nvlink_gb_per_second=0.0,
        rdma_gbps=0.0,
        ethernet_gbps=0.0,
        host_gib=0.0,
        half_precision_tflops=0.0,
        price=None,
    )


def read_prices(path: Path) -> dict[str, Price]:
    """Return the prices of a CSV file with columns size, usd_per_hour and date, by size name.

    Raises:
        CatalogueError: The file or a row is invalid, such as a row without a date.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            if missing := set(_PRICE_COLUMNS) - set(rows.fieldnames or ()):
                raise CatalogueError(
                    f"{path}:1: column {sorted(missing)[0]} is missing; "
                    f"the columns are {','.join(_PRICE_COLUMNS)}"
                )
            return dict(_price(row, f"{path}:{rows.line_num}") for row in rows)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CatalogueError(f"{path}: cannot be read as CSV: {error}") from error


def _price(row: Mapping[str, str | None], place: str) -> tuple[str, Price]:
    size, usd, day = ((row[name] or "").strip() for name in _PRICE_COLUMNS)
    try:
        name = size_of(size).name
    except CatalogueError as error:
        raise CatalogueError(f"{place}: {error}") from error
    try:
        price = float(usd)
    except ValueError:
        price = math.nan
    if not 0 < price < math.inf:
        raise CatalogueError(f"{place}: usd_per_hour {usd!r}: is not a positive number; correct it")
    try:
        return name, Price(price, date.fromisoformat(day))
    except ValueError as error:
        raise CatalogueError(
            f"{place}: date {day!r}: is not a date; write the day of the price as YYYY-MM-DD"
        ) from error


@cache
def _rows() -> dict[str, dict[str, str]]:
    text = files(__package__).joinpath("azure_gpu_sizes.csv").read_text(encoding="utf-8")
    return {_key(row["name"]): row for row in csv.DictReader(text.splitlines())}


def _key(name: str) -> str:
    return name.lower().removeprefix(_PREFIX.lower())


def _size(row: Mapping[str, str]) -> GpuSize:
    values = {name: value.rstrip("?") for name, value in row.items()}
    usd, (major, minor) = values["usd_per_hour"], values["capability"].split(".")
    return GpuSize(
        name=values["name"],
        gpu=values["gpu"],
        gpus=int(values["gpus"]),
        usable_gib=float(values["usable_gib"]),
        capability=(int(major), int(minor)),
        nvlink_gb_per_second=float(values["nvlink_gb_per_second"]),
        rdma_gbps=float(values["rdma_gbps"]),
        ethernet_gbps=float(values["ethernet_gbps"]),
        host_gib=float(values["host_gib"]),
        half_precision_tflops=float(values["half_precision_tflops"]),
        price=Price(float(usd), date.fromisoformat(values["as_of"]), values["region"])
        if usd
        else None,
        unsupported=values["unsupported"],
        recalled=tuple(name for name, value in row.items() if value.endswith("?")),
    )
