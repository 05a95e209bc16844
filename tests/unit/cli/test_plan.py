"""`ftctl plan` from the manifest to the verdict, the memory and the table of sizes."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from finetune_operator.cli.app import app
from finetune_operator.errors import FineTuneError
from support.api.builders import manifest
from support.data.text_fixtures import tiny_model
from support.docs.pages import ROOT, blocks, read
from support.local.fake_nvidia_smi import H100, fake_nvidia_smi

PAGE = "docs/how-to/choose-hardware.md"
A100 = "Standard_NC24ads_A100_v4"
T4 = "Standard_NC16as_T4_v3"
LORA = {"type": "lora"}


def plan_of(
    folder: Path, *options: str, environ: dict[str, str] | None = None, **overrides: Any
) -> Result:
    values = {
        "model": {"source": "hf://meta-llama/Llama-3.1-8B"},
        "topology": {"processesPerNode": None, "gpusPerNode": 1},
        "training": {"globalBatchSize": 16, "maxSeqLength": 4096},
        **overrides,
    }
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(manifest(**values)))
    without_gpus = {"CUDA_VISIBLE_DEVICES": ""}  # the machine of the test may have some
    return CliRunner().invoke(app, ["plan", str(file), *options], env=environ or without_gpus)


def test_the_page_shows_the_output_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    [shown] = [block for block in blocks(PAGE) if block.language == "console"]
    command, *printed = shown.text.removeprefix("$ ftctl ").rstrip().split("\n")
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.stdout.rstrip().split("\n") == printed
    assert done.exit_code == 0
    assert "129 models" in read(PAGE)


def test_a_job_that_does_not_fit_has_the_cheapest_change_and_exit_code_1(tmp_path: Path) -> None:
    explicit = {"type": "ddp", "activationCheckpointing": "none"}
    refused = plan_of(tmp_path, "--on", A100, method={"type": "full"}, strategy=explicit)
    assert refused.exit_code == 1
    assert refused.stdout.startswith("WouldNotFit: meta-llama/Llama-3.1-8B full on 1 x ")
    assert "cheapest change that fits: spec.training.optimizer adamw8bit with" in refused.stdout
    assert "of 79.1 GiB" in refused.stdout
    assert plan_of(tmp_path, "--on", T4, method={"type": "lora"}).exit_code == 1
    small = plan_of(tmp_path, "--on", T4, method={"type": "qlora", "quantization": "nf4"})
    assert small.exit_code == 0
    assert "fp16" in small.stdout
    assert "Not looked up for Standard_NC16as_T4_v3: " in small.stdout


def test_a_model_that_the_host_cannot_load_for_sharding_does_not_fit(tmp_path: Path) -> None:
    large: dict[str, Any] = {
        "model": {"source": "hf://meta-llama/Llama-3.1-70B"},
        "method": {"type": "full"},
        "strategy": {"type": "fsdp"},
        "topology": {"nodes": 16, "processesPerNode": None, "gpusPerNode": 1},
    }
    refused = plan_of(tmp_path, "--on", A100, **large)
    assert refused.exit_code == 1
    assert refused.stdout.startswith("WouldNotFit: meta-llama/Llama-3.1-70B on 16 x ")
    assert "needs 262.8 of 220 GiB of host memory to load the model" in refused.stdout
    assert "cheapest change" not in refused.stdout
    on_t4 = large | {"model": {"source": "hf://meta-llama/Llama-3.1-8B"}, "strategy": {}}
    topology = {"processesPerNode": None, "gpusPerNode": 1}
    for_gpu = plan_of(tmp_path, "--on", "NC4as_T4_v3", **on_t4 | {"topology": topology})
    assert "cheapest change that fits: spec.method.type qlora" in for_gpu.stdout
    in_16_bits = plan_of(tmp_path, "--on", A100, **large | {"strategy": {"type": "zero3"}})
    assert "host memory" not in in_16_bits.stdout
    lora = {"method": {"type": "lora"}, "strategy": {"type": "auto"}}
    assert "fsdp/" in plan_of(tmp_path, "--on", A100, **large | lora).stdout


def test_options_that_the_api_would_refuse_are_not_possible(tmp_path: Path) -> None:
    values: dict[str, Any] = {"method": {"type": "lora"}, "strategy": {"type": "fsdp"}}
    topology = {"processesPerNode": None, "gpusPerNode": 8}
    done = plan_of(tmp_path, "--json", **values, topology=topology)
    single = [one for one in json.loads(done.stdout) if one["size"] == A100]
    assert [one["verdict"] for one in single] == ["WouldNotFit"]
    assert single[0]["lostBy"] == "has one GPU, and fsdp needs at least two"


def test_selected_sizes_have_at_most_the_gpus_of_the_job(tmp_path: Path) -> None:
    topology = {"processesPerNode": None, "gpusPerNode": 2}
    sizes = f"{A100},ND96isr_H100_v5,{A100}"
    done = plan_of(tmp_path, "--on", sizes, "--json", method={"type": "lora"}, topology=topology)
    gpus = {one["size"]: one["gpusPerNode"] for one in json.loads(done.stdout)}
    assert gpus == {A100: 1, "Standard_ND96isr_H100_v5": 2}
    text = plan_of(tmp_path, "--on", "ND96isr_H100_v5", method={"type": "lora"}, topology=topology)
    assert "(2 x NVIDIA H100" in text.stdout


def test_a_profile_states_the_memory_of_its_gpus(tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    allow = {"namespaces": ["default"], "claims": ["data", "models"]}
    image = "registry.test/trainer:1"
    spec = {"nodes": {"gpuMemoryGiB": 40}, "image": image, "allow": allow}
    kind = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneProfile"}
    profile.write_text(yaml.safe_dump({**kind, "metadata": {"name": "default"}, "spec": spec}))
    uris = {"checkpoint": {"uri": "pvc://models/c"}, "output": {"uri": "pvc://models/o"}}
    on_cluster: dict[str, Any] = {"backend": {"type": "kubernetes"}, **uris}
    data = {"dataset": {"source": "pvc://data/rows.jsonl", "format": "chat"}}
    done = plan_of(tmp_path, "--profile", str(profile), **on_cluster, **data, method=LORA)
    assert " of 40.0" in done.stdout
    unknown = {"source": "hf://acme/unknown", "baseName": None}
    failed = plan_of(tmp_path, **on_cluster, **data, method=LORA, model=unknown)
    assert isinstance(failed.exception, FineTuneError)
    assert "acme/unknown cannot be loaded" in str(failed.exception)


def test_all_sizes_are_compared_with_the_reason_why_each_lost(tmp_path: Path) -> None:
    done = plan_of(tmp_path, "--tokens", "20000000", "--json", method={"type": "lora"})
    assert "all sizes are compared" in done.stderr
    found = json.loads(done.stdout)
    assert len(found) > 30
    best, *others = found
    assert (best["verdict"], best["lostBy"]) == ("Fits", "")
    assert all(one["lostBy"] for one in others)
    assert sum(best["memory"].values()) == best["peakBytes"] <= best["usableBytes"]
    assert best["usd"]["low"] < best["usd"]["high"]
    costs = [
        sum(one["usd"].values()) for one in found if one["verdict"] == "Fits" and one.get("usd")
    ]
    assert costs == sorted(costs)
    assert any("ROCm" in one["lostBy"] for one in others)


def test_prices_of_a_file_replace_the_list_prices(tmp_path: Path) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text(f"size,usd_per_hour,date\n{A100},1.5,2026-11-01\n")
    done = plan_of(tmp_path, "--prices", str(prices), "--json", method={"type": "lora"})
    assert json.loads(done.stdout)[0]["price"] == {"usdPerHour": 1.5, "date": "2026-11-01"}
    prices.write_text(f"size,usd_per_hour,date\n{A100},1.5,\n")
    assert "date" in str(plan_of(tmp_path, "--prices", str(prices)).exception)


def test_a_local_job_is_planned_for_the_gpus_of_this_machine(tmp_path: Path) -> None:
    environ = {"PATH": fake_nvidia_smi(tmp_path, [H100, H100])}
    done = plan_of(tmp_path, environ=environ, method={"type": "lora"})
    assert done.exit_code == 0
    machine = "1 x this machine (1 x NVIDIA H100 80GB HBM3)"
    assert done.stdout.startswith(f"Fits: meta-llama/Llama-3.1-8B lora on {machine}\n")
    assert "of 79.1\n" in done.stdout
    assert "the speed is unknown" in done.stdout
    assert "this machine" not in plan_of(tmp_path, "--on", A100, environ=environ).stdout


@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        pytest.param("Standard_NC24ads_A100_v5", f"did you mean {A100}", id="typo"),
        pytest.param("Standard_NC6s_v3", "retired", id="retired"),
    ],
)
def test_an_unknown_size_names_another(size: str, sentence: str, tmp_path: Path) -> None:
    assert sentence in str(plan_of(tmp_path, "--on", size).exception)


def test_a_batch_that_the_gpus_of_a_size_cannot_share_is_a_reason(tmp_path: Path) -> None:
    training = {"globalBatchSize": 3, "maxSeqLength": 1024}
    found = json.loads(plan_of(tmp_path, "--json", training=training).stdout)
    shared = [one for one in found if one["gpusPerNode"] == 8 and one["verdict"] == "WouldNotFit"]
    assert any("globalBatchSize" in one["lostBy"] for one in shared)


def test_a_model_of_a_folder_is_read_by_the_trainer(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    local = {"source": f"file://{tmp_path}/model"}
    done = plan_of(tmp_path, "--on", T4, model=local, backend={"type": "local"})
    assert done.exit_code == 0, done.stdout
    assert done.stdout.startswith("Fits: file://")


def test_a_model_that_cannot_be_read_here_needs_its_name(tmp_path: Path) -> None:
    claim = {"source": "pvc://models/llama"}
    backend = {"type": "kubernetes", "kubernetes": {}}
    data = {"source": "pvc://data/rows.jsonl"}
    output = {"uri": "pvc://models/out"}
    values: dict[str, Any] = {"backend": backend, "dataset": data, "output": output}
    unread = plan_of(tmp_path, "--on", T4, model=claim, **values)
    assert "set spec.model.baseName" in str(unread.exception)
    named = {**claim, "baseName": "meta-llama/Llama-3.2-1B"}
    assert plan_of(tmp_path, "--on", T4, model=named, **values).exit_code == 0


def test_a_known_model_is_planned_without_torch() -> None:
    arguments = ["plan", "examples/04-hub-gpu.yaml", "--on", A100]
    code = (
        "import sys; from finetune_operator.cli.app import app; "
        f"app({arguments}, standalone_mode=False); "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
