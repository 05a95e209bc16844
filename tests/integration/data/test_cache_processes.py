"""Several processes prepare the same data: one tokenises, and a killed one leaves no trace."""

import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.config import DataConfig, DatasetSource
from finetune_trainer.data.sequences import prepare
from finetune_trainer.errors import TrainerError
from support.data.text_fixtures import tiny_tokenizer
from support.launch.warm_processes import forkserver

SECONDS = 60.0


def prepare_rows(test: Connection, folder: Path, mode: str, patience: float) -> None:
    """Say `ready`, wait for a word, prepare the rows, and say the data's hash or what is wrong.

    In the mode `stall` it waits for a word before each batch, after it has sent `tokenising`.
    """
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder / "model")

    kind = type(loaded)

    def announce(self: Any, *arguments: Any, **options: Any) -> Any:
        test.send("tokenising")
        if mode == "stall":
            test.recv()
        return kind.__call__(self, *arguments, **options)

    loaded.__class__ = type(kind.__name__, (kind,), {"__call__": announce})
    source = DatasetSource(path=str(folder / "rows.jsonl"))
    config = DataConfig(train=source, cache_dir=str(folder / "cache"), max_seq_len=64)
    test.send("ready")
    test.recv()
    if mode == "full":
        # As a full disk does, this refuses what is written beyond the first KiB of a file.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
    try:
        prepared = prepare(config, config.sources, loaded, patience_seconds=patience)
        test.send(prepared.fingerprint)
    except TrainerError as error:
        test.send(str(error))


class Worker:
    """A process that prepares the rows of a folder once it is told to."""

    def __init__(self, folder: Path, mode: str, patience: float) -> None:
        self._pipe, other_end = forkserver().Pipe()
        self.process: BaseProcess = forkserver().Process(
            target=prepare_rows, args=(other_end, folder, mode, patience), daemon=True
        )
        self.process.start()
        other_end.close()
        assert self.hear() == "ready"

    def go(self) -> None:
        self._pipe.send("go")

    def hear(self) -> str:
        assert self._pipe.poll(SECONDS), f"it says nothing for {SECONDS} s"
        said: str = self._pipe.recv()
        return said

    def hear_all(self) -> list[str]:
        """Return what else it says until it ends."""
        said = []
        while True:
            try:
                said.append(self.hear())
            except EOFError:
                self.process.join(SECONDS)
                return said


Start = Callable[..., Worker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    rows = [{"prompt": f"Question {n}?", "completion": "word " * (n % 9 + 1)} for n in range(400)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny_tokenizer(tmp_path / "model")
    started: list[Worker] = []

    def start(mode: str = "run", patience: float = SECONDS) -> Worker:
        started.append(Worker(tmp_path, mode, patience))
        return started[-1]

    yield start
    for worker in started:
        worker.process.kill()
        worker.process.join()


def test_of_several_processes_one_tokenises_and_all_read_the_same(start: Start) -> None:
    workers = [start() for _ in range(3)]
    for worker in workers:
        worker.go()
    outputs = [worker.hear_all() for worker in workers]
    assert sum("tokenising" in output for output in outputs) == 1
    assert len({output[-1] for output in outputs}) == 1


def test_a_process_killed_while_tokenising_is_replaced_by_the_one_that_waits(
    start: Start, tmp_path: Path
) -> None:
    stalled, waiting = start("stall"), start()
    stalled.go()
    assert stalled.hear() == "tokenising"
    waiting.go()
    assert not [path for path in (tmp_path / "cache/tokens").iterdir() if path.suffix == ""]
    stalled.process.kill()
    assert waiting.hear_all()[0] == "tokenising"
    assert waiting.process.exitcode == 0
    left = sorted(path.suffix for path in (tmp_path / "cache/tokens").iterdir())
    assert left == ["", ".lock"]


def test_a_stopped_process_is_not_waited_for_and_changes_nothing_when_it_continues(
    start: Start, tmp_path: Path
) -> None:
    stalled, waiting = start("stall"), start(patience=0.5)
    stalled.go()
    assert stalled.hear() == "tokenising"
    pid = stalled.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    waiting.go()
    fingerprint = waiting.hear_all()[-1]
    [entry] = [path for path in (tmp_path / "cache/tokens").iterdir() if path.suffix == ""]
    tokens = entry / "tokens.bin"
    committed = tokens.stat()
    os.kill(pid, signal.SIGCONT)
    stalled.go()
    while (said := stalled.hear()) == "tokenising":
        stalled.go()
    assert said == fingerprint
    assert os.path.samestat(tokens.stat(), committed)
    left = sorted(path.suffix for path in (tmp_path / "cache/tokens").iterdir())
    assert left == ["", ".lock", ".lock"]


def test_a_disk_that_is_full_is_a_sentence_and_commits_nothing(
    start: Start, tmp_path: Path
) -> None:
    full = start("full")
    full.go()
    assert full.hear_all()[-1] == (
        f"the token cache in {tmp_path}/cache cannot be written: File too large; "
        "make room there, or choose another folder"
    )
    assert not [path for path in (tmp_path / "cache/tokens").iterdir() if path.suffix == ""]
