"""The store of one process: what it saves, when, and what it restores."""

import json
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # so that no thread of a test waits for its import

from finetune_trainer.checkpoint.commit import MANIFEST, ledger
from finetune_trainer.checkpoint.shards import Snapshot
from finetune_trainer.config import JobRef, metrics
from finetune_trainer.config.metrics import Metric
from finetune_trainer.errors import CheckpointError, ConfigError
from finetune_trainer.telemetry import CheckpointCosts
from finetune_trainer.telemetry.slots import Block, layout_of_node
from support.checkpoint.checkpoint_fixtures import (
    FINGERPRINT,
    JOB,
    State,
    make_state,
    open_store,
    step_path,
    steps_in,
    tensors_differ,
)

OTHER = JobRef(name="other", uid="uid-2")


def save(root: Path, *steps: int, **changes: Any) -> None:
    store = open_store(root, **changes)
    for step in steps:
        store.save(step, make_state(step))
    store.wait()


def test_restore_gives_back_every_bit_and_every_plain_value(tmp_path: Path) -> None:
    save(tmp_path, 7)
    state = make_state(0)
    weight = state["model"]["layers.0.weight"]

    manifest = open_store(tmp_path).restore(state)

    assert manifest is not None
    assert (manifest.step, manifest.time, manifest.world_size) == (7, 1000.0, 1)
    assert tensors_differ(state, make_state(7)) == []
    assert state["trainer"] == make_state(7)["trainer"]
    assert state["model"]["layers.0.weight"] is weight, "restored in place"


def test_restore_writes_into_live_parameters(tmp_path: Path) -> None:
    save(tmp_path, 1)
    parameter = torch.nn.Parameter(torch.zeros(16, 16))
    state = make_state(0)
    state["model"]["layers.0.weight"] = parameter.detach()
    open_store(tmp_path).restore(state)
    assert torch.equal(parameter, make_state(1)["model"]["layers.0.weight"])


def test_a_save_holds_the_state_as_it_was_when_save_was_called(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    state = make_state(1, size=512)
    for step in (1, 2):  # the second one reuses the buffers of the first
        expected = make_state(step, size=512)
        for section in ("model", "optimizer"):
            for name, tensor in state[section].items():
                tensor.copy_(expected[section][name])
        store.save(step, state)
        for section in ("model", "optimizer"):
            for tensor in state[section].values():
                tensor.zero_()
        state["trainer"]["answers"].append("later")
    store.wait()

    paths = {step: str(step_path(tmp_path, step)) for step in (2, 1)}
    for step, path in paths.items():
        found = make_state(0, size=512)
        open_store(tmp_path, resume_from=path).restore(found)
        assert tensors_differ(found, make_state(step, size=512)) == []
        assert len(found["trainer"]["answers"]) == step


class CountedCuda:
    """A stub of `torch.cuda` that records calls by thread, as (name, GPU of the thread)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: int) -> None:
        self.calls: dict[str, list[tuple[str, int]]] = {}
        self._device = {threading.current_thread().name: device}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "set_device", self.set_device)
        monkeypatch.setattr(torch.cuda, "current_device", self.current_device)
        monkeypatch.setattr(torch.cuda, "current_stream", self.current_stream)
        monkeypatch.setattr(torch.cuda, "stream", nullcontext)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)

    def set_device(self, device: int) -> None:
        self._device[threading.current_thread().name] = device
        self._record("set_device")

    def current_device(self) -> int:
        return self._device.get(threading.current_thread().name, 0)  # CUDA begins with GPU 0

    def current_stream(self) -> "CountedCuda":
        self._record("current_stream")
        return self

    def synchronize(self) -> None:
        self._record("synchronize")

    def wait_stream(self, stream: "CountedCuda") -> None:
        self._record("wait_stream")

    def _record(self, name: str) -> None:
        calls = self.calls.setdefault(threading.current_thread().name, [])
        calls.append((name, self.current_device()))


def test_threads_use_the_gpu_of_their_rank_and_wait_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = CountedCuda(monkeypatch, device=3)
    save(tmp_path, 1)
    snapshot = Snapshot()
    snapshot.reserve(make_state(2))
    snapshot.take(make_state(2))
    mine = cuda.calls.pop(threading.current_thread().name)
    assert set(mine) == {("synchronize", 3)}, "the copy to the host is complete"
    assert cuda.calls == {"save": [("set_device", 3)], "reserve": [("set_device", 3)]}


class LongToCopy(torch.Tensor):
    """Is being copied until there is more state."""

    begun, grown = threading.Event(), threading.Event()

    def detach(self) -> torch.Tensor:
        self.begun.set()
        assert self.grown.wait(60)
        return torch.zeros(4)


def test_memory_is_reserved_while_the_optimizer_makes_its_state() -> None:
    long = torch.zeros(4).as_subclass(LongToCopy)
    moments = {"long to copy": long, "short": torch.zeros(4)}
    snapshot = Snapshot()
    snapshot.reserve({"optimizer": moments})
    assert LongToCopy.begun.wait(60)
    moments["late"] = torch.ones(4)
    LongToCopy.grown.set()
    copy = snapshot.take({"optimizer": moments})
    assert copy["optimizer"].keys() == moments.keys()
    assert torch.equal(copy["optimizer"]["late"], torch.ones(4))


def test_a_commit_is_reported_once_and_stays_known(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.restore(make_state(0)) is None
    assert (store.poll(), store.wait(), store.last) == (None, None, None)

    store.save(1, make_state(1), eval_loss=2.0)
    store.save(2, make_state(2), eval_loss=3.0)  # finishes the first
    first = store.poll()
    assert first is not None
    assert (first.step, first.eval_loss, first.path) == (
        1,
        2.0,
        str(step_path(tmp_path, 1)),
    )

    last = store.wait()
    assert last is not None
    assert last.step == 2
    assert store.poll() is None
    assert (store.wait(), store.last, store.best) == (last, last, first)
    assert ledger(tmp_path) == [last, first]


def test_a_step_is_not_saved_twice(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(1, make_state(1))
    store.save(1, make_state(2))
    store.wait()
    store.save(1, make_state(3))
    assert (store.poll(), store.last and store.last.step) == (None, 1)

    state = make_state(0)
    again = open_store(tmp_path)
    again.restore(state)
    again.save(1, make_state(4))
    assert again.poll() is None
    assert tensors_differ(state, make_state(1)) == []


def test_old_checkpoints_go_only_after_a_later_commit(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, keep=1)
    assert steps_in(tmp_path) == ["step-3"]


def test_a_value_that_is_not_json_is_refused_at_once(tmp_path: Path) -> None:
    state = make_state(1)
    state["trainer"]["device"] = object()
    with pytest.raises(TypeError, match="not JSON serializable"):
        open_store(tmp_path).save(1, state)
    assert steps_in(tmp_path) == []


def test_a_failed_save_is_a_warning_and_the_next_one_works(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    warnings: list[str] = []
    store = open_store(root, warnings)
    store.save(1, make_state(1))
    store.wait()

    root.rename(tmp_path / "away")
    root.write_text("a file where the folder was")
    store.save(2, make_state(2))
    with pytest.raises(CheckpointError, match="checkpoint of step 2 was not written") as caught:
        store.wait()
    assert warnings == [str(caught.value)]
    assert "Not a directory" in warnings[0]
    assert "the last committed one is step 1" in warnings[0]

    root.unlink()
    (tmp_path / "away").rename(root)
    store.save(3, make_state(3))
    assert [ref.step for ref in ledger(root)] in ([1], [3, 1])
    ref = store.wait()
    assert ref is not None
    assert ref.step == 3
    assert steps_in(root) == ["step-1", "step-3"]


def test_what_checkpoints_cost_is_counted(tmp_path: Path) -> None:
    root, numbers = tmp_path / "checkpoints", Block.private()
    began = time.perf_counter()
    store = open_store(root, costs=CheckpointCosts(numbers), every_seconds=60)
    store.save(1, make_state(1))
    store.save(1, make_state(1))  # the same: not saved again
    store.wait()
    folder = step_path(root, 1)
    size = sum(path.stat().st_size for path in folder.iterdir() if path.name != MANIFEST)
    root.rename(tmp_path / "away")
    root.write_text("a file where the folder was")
    store.save(2, make_state(2))
    with pytest.raises(CheckpointError):
        store.wait()
    root.unlink()
    (tmp_path / "away").rename(root)
    again = open_store(root, costs=CheckpointCosts(numbers), take_over=True)
    assert again.restore(make_state(0)) is not None
    took = time.perf_counter() - began

    def duration(kind: str) -> tuple[float, float]:
        """Return how many were counted, and their seconds."""
        at = layout_of_node().place(metrics.CHECKPOINT_DURATION, kind)
        *counts, total = numbers.numbers[at : at + len(metrics.CHECKPOINT_DURATION.buckets) + 2]
        return sum(counts), total

    kinds = {kind: duration(kind) for kind in ("save_blocking", "save_async", "load")}
    assert {kind: count for kind, (count, _) in kinds.items()} == {
        "save_blocking": 2,
        "save_async": 1,
        "load": 1,
    }
    assert 0 < sum(seconds for _, seconds in kinds.values()) < took

    def value(metric: Metric) -> float:
        return numbers.numbers[layout_of_node().place(metric)]

    assert value(metrics.CHECKPOINT_BYTES) == size
    assert value(metrics.CHECKPOINT_FAILURES) == 1
    assert value(metrics.CHECKPOINT_INTERVAL) == 60


def test_the_interval_that_is_told_is_the_one_that_has_begun(tmp_path: Path) -> None:
    numbers = Block.private()
    store = open_store(tmp_path, costs=CheckpointCosts(numbers))
    first = store.cadence.interval_seconds
    store.save(1, make_state(1))
    store.wait()

    told = numbers.numbers[layout_of_node().place(metrics.CHECKPOINT_INTERVAL)]
    assert told == store.cadence.interval_seconds != first


def test_a_failure_that_poll_has_seen_is_still_told_by_wait(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    failed = threading.Event()
    store = open_store(root, warn=lambda sentence: failed.set())
    root.rename(tmp_path / "away")
    root.write_text("a file where the folder should be")
    store.save(1, make_state(1))
    while not failed.is_set():
        assert store.poll() is None
    with pytest.raises(CheckpointError, match="checkpoint of step 1 was not written"):
        store.wait()

    root.unlink()
    (tmp_path / "away").rename(root)
    store.save(1, make_state(1))  # the same step again, as it is not committed
    ref = store.wait()
    assert ref is not None
    assert ref.step == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(
            lambda state: state["model"].update(extra=torch.zeros(1)),
            "Missing key in checkpoint state_dict: model.extra",
            id="a tensor more",
        ),
        pytest.param(
            lambda state: state["optimizer"].clear(),
            "2 values that this run lacks, first optimizer.layers.0.weight.exp_avg",
            id="an optimizer without state",
        ),
        pytest.param(
            lambda state: state["model"].update({"layers.0.bias": torch.zeros(3)}),
            "layers.0.bias",
            id="a tensor of another size",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[State], None], reason: str
) -> None:
    save(tmp_path, 1)
    state = make_state(0)
    change(state)
    with pytest.raises(CheckpointError, match=r"step-1\S+ cannot be restored") as caught:
        open_store(tmp_path).restore(state)
    assert reason in str(caught.value)


@pytest.mark.parametrize("saved_in_fp16", [True, False])
def test_a_run_goes_on_in_another_precision_without_the_loss_scale(
    tmp_path: Path, saved_in_fp16: bool
) -> None:
    scaled = {"scaler": {"scale": torch.tensor(256.0)}}
    store = open_store(tmp_path)
    store.save(1, make_state(1) | (scaled if saved_in_fp16 else {}))
    store.wait()
    state = make_state(0) | ({} if saved_in_fp16 else {"scaler": {"scale": torch.tensor(8.0)}})
    manifest = open_store(tmp_path).restore(state)
    assert manifest is not None
    assert tensors_differ(state, make_state(1)) == []
    assert saved_in_fp16 or state["scaler"]["scale"] == 8, "it begins anew"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        pytest.param({"model"}, "model (spec.model)", id="model"),
        pytest.param({"method"}, "method (spec.method)", id="method"),
        pytest.param(
            {"data", "order"},
            "data set (spec.dataset, spec.training.maxSeqLength)",
            id="data, and the order with them",
        ),
        pytest.param(
            {"order"},
            "order of the data (spec.training.seed, globalBatchSize, maxSeqLength, packing)",
            id="order alone",
        ),
        pytest.param(
            {"method", "model", "data", "order"},
            "method (spec.method) and another model (spec.model)",
            id="everything",
        ),
    ],
)
def test_a_checkpoint_of_another_training_is_refused_with_what_differs(
    tmp_path: Path, changed: set[str], named: str
) -> None:
    root = tmp_path / "own"
    save(root, 1)
    other = FINGERPRINT.model_copy(update=dict.fromkeys(changed, "other"))

    with pytest.raises(ConfigError) as caught:
        open_store(root, fingerprint=other).restore(make_state(0))
    assert str(caught.value) == (
        f"{step_path(root, 1)} was written by this job with another {named}; restore that setting, "
        "set another spec.checkpoint.uri, or start from step 0 with ftctl run --fresh"
    )
    assert [ref.step for ref in ledger(root)] == [1]

    elsewhere = open_store(
        tmp_path / "elsewhere", resume_from=str(step_path(root, 1)), fingerprint=other
    )
    with pytest.raises(ConfigError) as caught:
        elsewhere.restore(make_state(0))
    assert str(caught.value).startswith(
        f"spec.checkpoint.resumeFrom {step_path(root, 1)} was written with another {named}; "
    )
    assert "spec.checkpoint.uri" not in str(caught.value)


def test_checkpoints_of_another_job_that_were_put_there_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "other", 2, job=OTHER)
    store = open_store(tmp_path / "own")
    shutil.copytree(step_path(tmp_path / "other", 2), tmp_path / "own" / "step-2")
    with pytest.raises(ConfigError) as caught:
        store.restore(make_state(0))
    own = tmp_path / "own"
    assert str(caught.value) == (
        f"spec.checkpoint.uri {own} contains step-2 of the job default/other (uid uid-2), not of "
        "this one (uid uid-1); set another spec.checkpoint.uri, and to start from that "
        f"checkpoint on purpose also spec.checkpoint.resumeFrom file://{own}/step-2 and "
        "spec.checkpoint.allowForeign true"
    )
    assert steps_in(own) == ["step-2"]


def test_a_checkpoint_that_is_pruned_while_another_job_reads_it_is_said_so(tmp_path: Path) -> None:
    save(tmp_path / "other", 2, job=OTHER)
    path = step_path(tmp_path / "other", 2)
    store = open_store(tmp_path / "own", resume_from=str(path), allow_foreign=True)
    (path / "manifest.json").unlink()  # it goes first, when a checkpoint is deleted
    (path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"step-2.* was deleted during the read"):
        store.load(path, make_state(0))
    with pytest.raises(CheckpointError, match=r"step-2.* has no manifest.json"):
        store.restore(make_state(0))


def test_a_checkpoint_of_another_job_is_loaded_only_where_that_is_allowed(tmp_path: Path) -> None:
    save(tmp_path / "other", 3)
    resume_from = str(step_path(tmp_path / "other", 3))
    state = make_state(0)
    with pytest.raises(ConfigError) as caught:
        open_store(tmp_path / "own", job=OTHER, resume_from=resume_from).restore(state)
    assert str(caught.value) == (
        f"spec.checkpoint.resumeFrom {resume_from} was written by the job default/tiny (uid "
        "uid-1), not by this one (uid uid-2); to load it anyway, set "
        "spec.checkpoint.allowForeign true on this machine; in a cluster, an administrator sets "
        "the profile's allow.foreignCheckpoints"
    )
    assert tensors_differ(state, make_state(0)) == []

    open_store(tmp_path / "own", job=OTHER, resume_from=resume_from, allow_foreign=True).restore(
        state
    )
    assert tensors_differ(state, make_state(3)) == []


@pytest.mark.parametrize("takes_over", [True, False])
def test_a_predecessor_that_is_taken_over_is_no_other_job(tmp_path: Path, takes_over: bool) -> None:
    save(tmp_path / "other", 3)
    heir = JOB.model_copy(update={"uid": "uid-9"})
    store = open_store(
        tmp_path / "own",
        job=heir,
        take_over=takes_over,
        resume_from=str(step_path(tmp_path / "other", 3)),
    )
    state = make_state(0)
    if takes_over:
        store.restore(state)
        assert tensors_differ(state, make_state(3)) == []
    else:
        with pytest.raises(ConfigError, match=r"\(spec\.takeOver true makes that job's work this"):
            store.restore(state)


def test_a_later_attempt_of_the_same_job_is_no_other_job(tmp_path: Path) -> None:
    save(tmp_path, 1)
    state = make_state(0)
    open_store(tmp_path, job=JOB.model_copy(update={"attempt": 2})).restore(state)
    assert tensors_differ(state, make_state(1)) == []


def test_resume_from_none_starts_anew_and_what_was_there_counts_no_more(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "step-3.tmp").mkdir()
    warnings: list[str] = []
    store = open_store(tmp_path, warnings, resume_from="none")
    state = make_state(0)
    assert store.restore(state) is None
    assert tensors_differ(state, make_state(0)) == []
    assert warnings[0].startswith("training starts from step 0")
    assert steps_in(tmp_path) == ["step-1", "step-2"]
    assert ledger(tmp_path) == []
    assert store.last is None


def test_resume_from_a_folder_takes_that_one_and_goes_on_from_it(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    store = open_store(tmp_path, resume_from=str(step_path(tmp_path, 1)))
    state = make_state(0)
    store.restore(state)
    assert tensors_differ(state, make_state(1)) == []
    store.save(2, make_state(20))
    store.wait()

    state = make_state(0)
    open_store(tmp_path).restore(state)
    assert tensors_differ(state, make_state(20)) == []


@pytest.mark.parametrize(
    ("named", "own", "expected"),
    [
        pytest.param("none", (1, 2), 2, id="none, and the job has committed since"),
        pytest.param("folder", (), 5, id="a folder, nothing committed yet"),
        pytest.param("folder", (7,), 7, id="a folder, and the job went beyond it"),
        pytest.param("folder", (3,), 5, id="a folder, and only older ones of its own"),
    ],
)
def test_a_later_attempt_goes_on_from_what_the_job_has_committed(
    named: str, own: tuple[int, ...], expected: int, tmp_path: Path
) -> None:
    save(tmp_path / "named", 5)
    (tmp_path / "own").mkdir()
    save(tmp_path / "own", *own)
    resume_from = str(step_path(tmp_path / "named", 5)) if named == "folder" else named
    store = open_store(tmp_path / "own", resume_from=resume_from, is_continued=True)
    state = make_state(0)
    store.restore(state)
    assert tensors_differ(state, make_state(expected)) == []


def test_a_successor_that_starts_anew_goes_on_from_its_own_commits_alone(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    heir = JOB.model_copy(update={"uid": "uid-9"})
    anew: dict[str, Any] = {"job": heir, "take_over": True, "resume_from": "none"}
    open_store(tmp_path, **anew)  # killed before it wrote down where it starts
    store = open_store(tmp_path, is_continued=True, **anew)
    assert store.restore(make_state(0)) is None
    store.save(7, make_state(7))
    store.wait()
    state = make_state(0)
    open_store(tmp_path, is_continued=True, **anew).restore(state)
    assert tensors_differ(state, make_state(7)) == []


@pytest.mark.parametrize(
    ("make", "error", "reason"),
    [
        pytest.param(lambda path: None, ConfigError, "is not a folder", id="no folder"),
        pytest.param(Path.mkdir, CheckpointError, "never committed", id="no checkpoint"),
    ],
)
def test_a_named_folder_that_holds_no_checkpoint_is_an_error(
    tmp_path: Path, make: Callable[[Path], None], error: type[Exception], reason: str
) -> None:
    folder = tmp_path / "named"
    make(folder)
    with pytest.raises(error, match=reason):
        open_store(tmp_path / "own", resume_from=str(folder)).restore(make_state(0))


def test_saves_are_due_by_step(tmp_path: Path) -> None:
    store = open_store(tmp_path, every_steps=3)
    assert [step for step in range(10) if store.cadence.is_due(step)] == [3, 6, 9]
    assert not any(open_store(tmp_path, every_seconds=9).cadence.is_due(step) for step in range(10))


def test_saves_are_wanted_by_time_once_for_each_interval(tmp_path: Path) -> None:
    store = open_store(tmp_path, every_seconds=10)
    clock = [0.0, 4.0, 9.9, 10.0, 10.1, 19.9, 20.5]
    wanted = [now for step, now in enumerate(clock, start=1) if store.wants_save(step, now)]
    assert wanted == [10.0, 20.5]


def test_the_interval_counts_from_the_last_save(tmp_path: Path) -> None:
    store = open_store(tmp_path, every_seconds=10)
    store.wants_save(1, 0.0)
    store.save(1, make_state(1))
    store.wait()
    assert not store.wants_save(2, 12.0)
    assert store.wants_save(3, 22.0)


def test_only_rank_0_wants_a_save_by_time(tmp_path: Path) -> None:
    store = open_store(tmp_path, every_seconds=1, rank=1)
    assert not any(store.wants_save(step, float(step * 5)) for step in range(3))


def test_a_disk_too_small_for_the_checkpoints_is_found_before_training(tmp_path: Path) -> None:
    huge = {"model": {"weight": torch.empty(1).expand(2**44)}}  # 64 TiB, none of it in memory
    with pytest.raises(ConfigError) as caught:
        open_store(tmp_path, keep=3).check_space(huge)
    message = str(caught.value)
    assert f"spec.checkpoint.uri {tmp_path} has " in message
    assert "takes 65536.0 GiB and spec.checkpoint.keep 3 needs room for 4 of them" in message
    assert "GiB more free or lower spec.checkpoint.keep" in message

    open_store(tmp_path).check_space(make_state(1))


def test_the_trainer_values_can_be_read_without_torch(tmp_path: Path) -> None:
    save(tmp_path, 5)
    assert json.loads((step_path(tmp_path, 5) / "trainer.json").read_bytes())["step"] == 5


def test_without_checkpoints_none_is_made_and_no_room_is_wanted_or_taken(tmp_path: Path) -> None:
    class Refusing(Snapshot):
        def reserve(self, state: State) -> None:
            raise AssertionError("nothing is to be reserved")

        def take(self, state: State) -> State:
            raise AssertionError("nothing is to be copied")

        def write(self, *_: Any) -> list[str]:
            raise AssertionError("nothing is to be written")

        def read(self, *_: Any) -> None:
            raise AssertionError("there is nothing to read")

    store = open_store(tmp_path, enabled=False, shards=Refusing())
    huge = {"model": {"w": torch.empty(2**46, device="meta")}}
    store.check_space(huge)
    assert store.restore(make_state(0)) is None
    assert [store.wants_save(1, now) for now in (0.0, 1e9)] == [False, False]
    assert store.save(1, make_state(1)) == 0.0
    assert (store.poll(), store.wait()) == (None, None)
    assert steps_in(tmp_path) == []
    with pytest.raises(ConfigError, match="free"):
        open_store(tmp_path).check_space(huge)


def test_without_checkpoints_one_that_is_there_is_still_started_from(tmp_path: Path) -> None:
    save(tmp_path, 7)
    store, state = open_store(tmp_path, enabled=False), make_state(0)
    manifest = store.restore(state)
    assert manifest is not None
    assert manifest.step == 7
    assert tensors_differ(state, make_state(7)) == []


def test_losses_of_other_held_out_rows_are_not_compared(tmp_path: Path) -> None:
    first = open_store(tmp_path, keep=1, held_out="some rows")
    first.restore(make_state(0))
    first.save(1, make_state(1), eval_loss=1.0)
    first.save(2, make_state(2), eval_loss=2.0)
    first.wait()
    assert steps_in(tmp_path) == ["step-1", "step-2"], "the newest and the best"

    other = open_store(tmp_path, keep=1, held_out="other rows")
    manifest = other.restore(make_state(0))
    assert manifest is not None
    assert other.has_other_held_out(manifest)
    assert other.best is None
    other.save(3, make_state(3), eval_loss=5.0)
    other.save(4, make_state(4), eval_loss=6.0)
    other.wait()
    assert other.best is not None
    assert other.best.step == 3
    assert steps_in(tmp_path) == ["step-3", "step-4"]


@pytest.mark.parametrize(
    ("before", "now"),
    [
        pytest.param("rows", "rows", id="the same rows"),
        pytest.param(None, "rows", id="a checkpoint of release 0.1.0, or without held-out rows"),
        pytest.param("rows", None, id="without held-out rows from now on"),
    ],
)
def test_losses_are_compared_unless_other_rows_are_known(
    tmp_path: Path, before: str | None, now: str | None
) -> None:
    first = open_store(tmp_path, held_out=before)
    first.restore(make_state(0))
    first.save(1, make_state(1), eval_loss=1.0)
    first.wait()
    second = open_store(tmp_path, held_out=now)
    manifest = second.restore(make_state(0))
    assert manifest is not None
    assert not second.has_other_held_out(manifest)
    assert second.best is not None


def test_release_0_1_0_reads_a_checkpoint_with_held_out_rows(tmp_path: Path) -> None:
    """Manifest and notes have no new field; a file that the manifest lists is only verified."""
    store = open_store(tmp_path, held_out="rows")
    store.restore(make_state(0))
    store.save(1, make_state(1), eval_loss=1.0)
    store.wait()
    folder = step_path(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    known = "job step worldSize time fingerprint evalLoss files digest"
    assert manifest.keys() == {*known.split()}
    assert manifest["fingerprint"].keys() == {"model", "method", "data", "order"}
    assert "held-out-rows.txt" in manifest["files"]
    assert json.loads((folder / "trainer.json").read_text()) == make_state(1)["trainer"]
