"""A process waits for the lock of a cache as long as its holder works, and no longer."""

import fcntl
import time
from pathlib import Path
from threading import Event, Thread

from finetune_trainer.cache_locks import patient_lock

PATIENCE = 0.5


def test_a_holder_that_works_is_waited_for_however_long_it_takes(tmp_path: Path) -> None:
    holds, has_ended = Event(), Event()

    def work() -> None:
        with patient_lock(tmp_path / "key", PATIENCE):
            holds.set()
            time.sleep(3 * PATIENCE)
            has_ended.set()

    Thread(target=work).start()
    holds.wait()
    with patient_lock(tmp_path / "key", PATIENCE) as number:
        assert has_ended.is_set()
        assert number == 1
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]


def test_holders_without_activity_are_passed_over(tmp_path: Path) -> None:
    with (tmp_path / "key.lock").open("w") as first, (tmp_path / "key.2.lock").open("w") as second:
        for file in (first, second):
            fcntl.flock(file, fcntl.LOCK_EX)
        began = time.monotonic()
        with patient_lock(tmp_path / "key", PATIENCE) as number:
            assert number == 3
        assert time.monotonic() - began >= 2 * PATIENCE
    with patient_lock(tmp_path / "key", PATIENCE) as number:
        assert number == 1
