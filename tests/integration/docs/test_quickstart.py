"""The quickstart as shipped: a real model, real dialogues, and what the project promises of it."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[3]
ASSETS = ROOT / "examples" / ".quickstart"
FTCTL = [sys.executable, "-m", "finetune_operator"]
GIB = 1024**3

pytestmark = [
    pytest.mark.full,
    pytest.mark.model,
    pytest.mark.timeout(900),  # two minutes of training, on a machine that runs other tests beside
    pytest.mark.skipif(
        not (ASSETS / "model").is_dir(),
        reason="the quickstart's model is not there; run: make quickstart-assets",
    ),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str, int]:
    """Run it in a copy of the examples; return that folder, what it printed and the peak memory."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(
        ROOT / "examples",
        folder / "examples",
        ignore=shutil.ignore_patterns("runs", ".quickstart", "__pycache__"),
    )
    (folder / "examples" / ".quickstart").symlink_to(ASSETS)
    process = subprocess.Popen(
        [*FTCTL, "run", "examples/00-quickstart.yaml"],
        cwd=folder,
        env=os.environ | {"XDG_CACHE_HOME": str(folder / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    peak = PeakMemory(process.pid)
    peak.start()
    printed, _ = process.communicate()
    peak.join()
    assert process.returncode == 0, printed
    print(f"peak memory {peak.rss / GIB:.2f} GiB\n{printed}")
    return folder, printed, peak.rss


class PeakMemory(threading.Thread):
    """Adds up the resident memory of a process and all it started, twice a second.

    Pages that they share count once for each. What each process has of them (its PSS) would be
    less, and takes 30 ms of CPU time a GiB to find out.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._root = psutil.Process(pid)
        self.rss = 0

    def run(self) -> None:
        while psutil.pid_exists(self._root.pid):
            self.rss = max(self.rss, sum(map(rss_of, self._tree())))
            threading.Event().wait(0.5)

    def _tree(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def rss_of(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0  # it ended between being found and being measured


def progress(folder: Path) -> dict[str, Any]:
    run_dir = folder / "examples" / "runs" / "default" / "quickstart"
    return json.loads((run_dir / "progress.json").read_text())


def test_the_held_out_loss_falls_by_thirty_percent(finished) -> None:
    told = progress(finished[0])
    assert told["evalLoss"] <= 0.7 * told["evalLossBefore"]


def test_all_processes_together_stay_below_six_gib(finished) -> None:
    assert 1 * GIB < finished[2] <= 6 * GIB


def test_the_question_is_answered_before_and_after_and_differently(finished) -> None:
    folder, printed, _ = finished
    [sample] = progress(folder)["samples"]
    assert sample["before"] != sample["after"]
    assert "Complete after" in printed
    assert sample["prompt"] in printed


def test_the_adapter_names_a_base_that_another_machine_can_load(finished) -> None:
    output = finished[0] / "examples" / "runs" / "default" / "quickstart" / "output"
    settings = json.loads((output / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_the_printed_python_answers_as_the_run_did(finished) -> None:
    folder, printed, _ = finished
    lines = printed.partition("Load it with:")[2].strip().splitlines()
    assert len(lines) == 3
    [sample] = progress(folder)["samples"]
    ask = f"""
inputs = tokenizer.apply_chat_template(
    [{{"role": "user", "content": {sample["prompt"]!r}}}],
    add_generation_prompt=True, return_tensors="pt", return_dict=True,
)
said = model.generate(**inputs, max_new_tokens=48, do_sample=False)
said = said[0, inputs["input_ids"].shape[1]:]
print("ANSWER " + tokenizer.decode(said, skip_special_tokens=True))
"""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines) + ask], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.partition("ANSWER ")[2].strip() == sample["after"]
