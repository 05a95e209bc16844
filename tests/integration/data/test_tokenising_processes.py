"""Several processes make the tokens of one, tell its errors, and leave nobody behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import wait
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from finetune_trainer.config import DataConfig, DatasetSource
from finetune_trainer.control import Interrupted, StopSignal
from finetune_trainer.data import sequences
from finetune_trainer.data.cores import usable_cores
from finetune_trainer.data.crew import Crew
from finetune_trainer.data.piecework import Batch, BatchEncoder
from finetune_trainer.data.rules import Rules
from finetune_trainer.data.source import Row
from finetune_trainer.errors import DataError, TrainerError
from support.data.text_fixtures import tiny_tokenizer

SECONDS = 60.0


def config_in(folder: Path) -> DataConfig:
    source = DatasetSource(path=str(folder / "rows.jsonl"))
    return DataConfig(train=source, cache_dir=str(folder / "cache"), max_seq_len=64)


def batch(number: int, size: int = 5) -> Batch:
    first = 1 + number * size
    rows = [
        Row(f"line {n}", {"prompt": f"Question {n}?", "completion": "word " * (n % 7)})
        for n in range(first, first + size)
    ]
    return Batch([*range(first, first + size)], rows)


BAD = Batch([1], [Row("line 1", {"prompt": "without an answer"})])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[Crew]:
    with Crew(config_in(tmp_path_factory.mktemp("data")), tokenizer, 2) as made:
        yield made


def test_batches_come_back_in_their_order_as_one_process_makes_them(
    crew: Crew, tokenizer: Any, tmp_path: Path
) -> None:
    encoder = BatchEncoder(config_in(tmp_path), tokenizer)
    asked = [batch(number, size=1 + number % 9) for number in range(23)]
    assert list(crew.encode(iter(asked))) == [encoder.encode(one) for one in asked]


def test_a_bad_row_is_told_after_the_batches_before_it(
    crew: Crew, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as expected:
        BatchEncoder(config_in(tmp_path), tokenizer).encode(BAD)
    made = crew.encode(iter([batch(0), batch(1), BAD, batch(2)]))
    assert [next(made).tally["rows"] for _ in range(2)] == [5, 5]
    with pytest.raises(DataError) as told:
        list(made)
    assert str(told.value) == str(expected.value)


def test_a_row_that_cannot_be_read_is_told_after_one_before_it_that_cannot_be_used(
    crew: Crew,
) -> None:
    def rows(*given: Batch) -> Iterator[Batch]:
        yield from given
        raise DataError("line 12 is not JSON")

    with pytest.raises(DataError, match="line 1 has no column"):
        list(crew.encode(rows(batch(0), BAD)))
    with pytest.raises(DataError, match="line 12 is not JSON"):
        list(crew.encode(rows(batch(0), batch(1))))


@pytest.mark.full
def test_a_large_data_set_has_the_same_files_by_one_process_and_by_several(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"Question {n}?", "completion": "word " * (n % 9)} for n in range(6_000)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, started = config_in(tmp_path), []
    alone = sequences.prepare(config, config.sources, tokenizer)

    def crew(config: DataConfig, tokenizer: Any, rules: Rules) -> Crew:
        started.append(Crew(config, tokenizer, 2, rules))
        wait(started[0]._starting)
        return started[0]

    monkeypatch.setattr(sequences, "SECONDS_ALONE", 0.0)
    monkeypatch.setattr(sequences, "_crew", crew)
    elsewhere = config.model_copy(update={"cache_dir": str(tmp_path / "other")})
    together = sequences.prepare(elsewhere, config.sources, tokenizer)
    assert started
    assert together.fingerprint == alone.fingerprint
    assert together.report == alone.report
    assert [together.origin(n) for n in (0, 5_000)] == [alone.origin(n) for n in (0, 5_000)]


def test_where_no_other_process_starts_one_tokenises_all(
    tmp_path: Path,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = json.dumps({"prompt": "Question?", "completion": "word"}) + "\n"
    (tmp_path / "rows.jsonl").write_text(row * 1_100)
    config = config_in(tmp_path)

    def crew(config: DataConfig, tokenizer: Any, rules: Rules) -> Crew:
        made = Crew(config, tokenizer, 2, rules)
        wait(made._starting)
        return made

    monkeypatch.setattr(sequences, "SECONDS_ALONE", 0.0)
    monkeypatch.setattr(sequences, "_crew", crew)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert len(sequences.prepare(config, config.sources, tokenizer)) == 1_100
    assert "one process tokenises the rows: a process" in capsys.readouterr().err


def test_a_process_that_is_killed_is_named(tmp_path: Path, tokenizer: Any) -> None:
    with Crew(config_in(tmp_path), tokenizer, 1) as crew:
        made = crew.encode(batch(number) for number in count())
        next(made)
        [process] = crew._processes
        process.kill()
        with pytest.raises(TrainerError, match="ended with SIGKILL; see its error above"):
            list(made)


PARENT = """
import sys
from itertools import count
from pathlib import Path
sys.path[:0] = {path!r}
from transformers import AutoTokenizer
from finetune_trainer.data.crew import Crew
from test_tokenising_processes import Interrupted, StopSignal, batch, config_in
stop = StopSignal()
stop.install()
try:
    tokenizer = AutoTokenizer.from_pretrained({model!r})
    with stop.interruptible(), Crew(config_in(Path("/")), tokenizer, 2) as crew:
        for made in crew.encode(batch(number) for number in count()):
            print(*(process.pid for process in crew._processes), flush=True)
except Interrupted:
    print("broken off", *(process.returncode for process in crew._processes), flush=True)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGKILL],
)
def test_nobody_is_left_when_the_one_that_asks_is_stopped_or_killed(
    number: signal.Signals, tmp_path: Path
) -> None:
    tiny_tokenizer(tmp_path)
    here = Path(__file__)
    code = PARENT.format(path=[str(here.parent), str(here.parents[2])], model=str(tmp_path))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent, parent.stdout as said:
        pids = [int(pid) for pid in said.readline().split()]
        workers = [psutil.Process(pid) for pid in pids]
        parent.send_signal(number)
        rest = said.read().splitlines()
        _, alive = psutil.wait_procs(workers, SECONDS)
    assert len(pids) == 2
    assert alive == []
    if number != signal.SIGKILL:
        assert rest[-1] == "broken off -9 -9"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({"cpu.max": "150000 100000"}, 1, id="one and a half"),
        pytest.param({"cpu.max": "50000 100000"}, 1, id="a half"),
        pytest.param({"cpu.max": "max 100000"}, None, id="no quota"),
        pytest.param({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        pytest.param({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        pytest.param({}, None, id="no control group"),
    ],
)
def test_cores_are_those_of_the_container(
    files: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    bound = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path) == (bound if expected is None else expected)


__all__ = ["Interrupted", "StopSignal"]  # for the process above
