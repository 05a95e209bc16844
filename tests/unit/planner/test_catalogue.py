"""GPU sizes of Azure: names, retirement, prices, and that they reach an installation."""

import csv
import subprocess
import sys
import zipfile
from datetime import date
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from finetune_operator.errors import CatalogueError
from finetune_operator.planner.catalogue import GpuSize, Price, read_prices, size_of, sizes

ROOT = Path(__file__).parents[3]


def test_size_has_memory_links_and_a_dated_price() -> None:
    assert size_of("Standard_ND96isr_H100_v5") == GpuSize(
        name="Standard_ND96isr_H100_v5",
        gpu="NVIDIA H100 SXM5 80GB",
        gpus=8,
        usable_gib=79.1,
        capability=(9, 0),
        nvlink_gb_per_second=900,
        rdma_gbps=3200,
        ethernet_gbps=80,
        host_gib=1900,
        half_precision_tflops=989,
        price=Price(98.32, date(2026, 6, 18), "eastus"),
    )


@pytest.mark.parametrize("name", ["nc24ads_a100_v4", "STANDARD_NC24ADS_A100_V4"])
def test_names_match_in_any_case_and_without_prefix(name: str) -> None:
    assert size_of(name).name == "Standard_NC24ads_A100_v4"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param(
            "NC24ads_A100_v5",
            "size NC24ads_A100_v5: is not a known GPU size of Azure; did you mean Standard_NC24",
            id="nearest names for a typo",
        ),
        pytest.param("D4s_v5", "not a known GPU size of Azure; write it as", id="no similar name"),
        pytest.param(
            "nc6s_v3",
            "size Standard_NC6s_v3: Azure retired it on 2025-09-30; use Standard_NC24ads_A100_v4",
            id="successor of a retired size",
        ),
    ],
)
def test_unusable_names_are_refused_with_a_remedy(name: str, message: str) -> None:
    with pytest.raises(CatalogueError, match=message):
        size_of(name)


def test_sizes_without_images_have_a_reason() -> None:
    reasons = {one.gpu.split()[1]: one.unsupported for one in sizes() if one.unsupported}

    assert reasons == {
        "MI300X": "needs ROCm images",
        "GB200": "needs arm64 images",
        "GB300": "needs arm64 images",
        "A10-4Q": "has a fraction of a GPU",
        "A10-8Q": "has a fraction of a GPU",
        "A10-12Q": "has a fraction of a GPU",
    }


def test_recalled_values_are_shown_with_a_mark() -> None:
    assert size_of("NC4as_T4_v3").show("half_precision_tflops") == "65?"
    assert size_of("NC24ads_A100_v4").show("half_precision_tflops") == "312"


def test_each_successor_is_a_size_to_buy() -> None:
    path = ROOT / "operator/finetune_operator/planner/azure_gpu_sizes.csv"
    with path.open(encoding="utf-8") as file:
        successors = [row["successor"] for row in csv.DictReader(file) if row["retired_on"]]

    assert successors
    assert [size_of(name).unsupported for name in successors] == [""] * len(successors)


def test_prices_of_a_file_are_by_full_name(tmp_path: Path) -> None:
    file = tmp_path / "prices.csv"
    file.write_text("size,usd_per_hour,date\nnc24ads_a100_v4,2.5,2026-11-01\n")

    assert read_prices(file) == {"Standard_NC24ads_A100_v4": Price(2.5, date(2026, 11, 1))}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("size,usd_per_hour\n", ":1: column date is missing"),
        ("size,usd_per_hour,date\nNC4as_T4_v3,1,2026-01-01\nNC8as_T4_v3,1,\n", ":3: date ''"),
        ("size,usd_per_hour,date\nNC8as_T4_v3,1\n", ":2: date ''"),
        ("size,usd_per_hour,date\nNC8as_T4_v3,free,2026-01-01\n", ":2: usd_per_hour 'free'"),
        ("size,usd_per_hour,date\nNC8as_T4_v3,nan,2026-01-01\n", ":2: usd_per_hour 'nan'"),
        ("size,usd_per_hour,date\nnc6s_v3,1,2026-01-01\n", ":2: size Standard_NC6s_v3: Azure ret"),
    ],
)
def test_invalid_prices_name_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prices.csv"
    file.write_text(text)

    with pytest.raises(CatalogueError, match=rf"prices\.csv{message}"):
        read_prices(file)


def test_missing_price_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match=r"none\.csv: cannot be read as CSV"):
        read_prices(tmp_path / "none.csv")


def test_catalogue_needs_neither_torch_nor_numpy() -> None:
    code = "import sys; from finetune_operator.planner import catalogue; catalogue.sizes(); "
    code += "print({'torch', 'numpy'} & set(sys.modules))"

    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_wheel_contains_the_catalogue(tmp_path: Path) -> None:
    wheel = next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))

    names = zipfile.ZipFile(wheel).namelist()
    assert "finetune_operator/planner/azure_gpu_sizes.csv" in names
