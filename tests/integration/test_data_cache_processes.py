"""Several processes prepare the same data: one tokenises, and a killed one leaves no trace."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from text_fixtures import tiny_tokenizer

# Each process says `ready`, waits for a line, prepares, and prints the data's hash. With `stall`
# it stops for ever in the middle of tokenising, after it has said so.
WORKER = """
import resource, sys, time
from finetune_trainer.config import DataConfig, DatasetSource
from finetune_trainer.data.sequences import prepare
from finetune_trainer.errors import TrainerError
from transformers import AutoTokenizer

rows, model, cache, mode = sys.argv[1:]
loaded = AutoTokenizer.from_pretrained(model)

class Announcing(type(loaded)):
    def __call__(self, *args, **options):
        print("tokenising", flush=True)
        while mode == "stall":
            time.sleep(60)
        return super().__call__(*args, **options)

loaded.__class__ = Announcing
Announcing.__name__ = type(loaded).__mro__[1].__name__
config = DataConfig(train=DatasetSource(path=rows), cache_dir=cache, max_seq_len=64)
print("ready", flush=True)
sys.stdin.readline()
if mode == "full":
    # As a full disk does, this refuses what is written beyond the first KiB of a file.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
try:
    print(prepare(config, config.sources, loaded).fingerprint, flush=True)
except TrainerError as error:
    print(error, flush=True)
"""


class Workers:
    """Starts worker processes on one data set and ends those that are left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def start(self, mode: str = "run") -> subprocess.Popen[str]:
        arguments = [str(self._folder / name) for name in ("rows.jsonl", "model", "cache")]
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, *arguments, mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._started.append(process)
        assert line(process) == "ready"
        return process

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    rows = [{"prompt": f"Question {n}?", "completion": "word " * (n % 9 + 1)} for n in range(400)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny_tokenizer(tmp_path / "model")
    made = Workers(tmp_path)
    yield made
    made.end()


def test_of_several_processes_one_tokenises_and_all_read_the_same(workers: Workers) -> None:
    processes = [workers.start() for _ in range(3)]
    for process in processes:
        go(process)
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert sum(output.count("tokenising") for output in outputs) == 1
    assert len({output[-1] for output in outputs}) == 1


def test_a_process_killed_while_tokenising_is_replaced_by_the_one_that_waits(
    workers: Workers, tmp_path: Path
) -> None:
    stalled, waiting = workers.start("stall"), workers.start()
    go(stalled)
    assert line(stalled) == "tokenising"
    go(waiting)
    assert not [path for path in (tmp_path / "cache/tokens").iterdir() if path.suffix == ""]
    stalled.send_signal(signal.SIGKILL)
    assert waiting.communicate(timeout=60)[0].split()[0] == "tokenising"
    assert waiting.returncode == 0
    left = sorted(path.suffix for path in (tmp_path / "cache/tokens").iterdir())
    assert left == ["", ".lock"]


def test_a_disk_that_is_full_is_a_sentence_and_commits_nothing(
    workers: Workers, tmp_path: Path
) -> None:
    full = workers.start("full")
    go(full)
    said = full.communicate(timeout=60)[0].splitlines()[-1]
    assert said == (
        f"the token cache in {tmp_path}/cache cannot be written: File too large; "
        "make room there, or choose another folder"
    )
    assert not [path for path in (tmp_path / "cache/tokens").iterdir() if path.suffix == ""]
