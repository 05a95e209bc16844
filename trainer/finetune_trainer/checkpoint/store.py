"""Save without stopping, commit only what is whole, restore only what verifies.

The loop owns one `CheckpointStore` a rank and calls the same methods at the same steps on every
rank. A save copies the state and returns; a thread writes a folder named by step and claim, and
when every rank's part is on disk rank 0 adds the manifest, which commits it. The thread is the only
user of the process group, which must be none of those that training uses: collectives would mix.
"""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from finetune_trainer.checkpoint import commit
from finetune_trainer.checkpoint.agreement import (
    RankError,
    describe,
    do_nothing,
    on_rank_0,
)
from finetune_trainer.checkpoint.cadence import Cadence
from finetune_trainer.checkpoint.commit import Fingerprint, Manifest
from finetune_trainer.checkpoint.retention import best
from finetune_trainer.checkpoint.shards import Shards, State, TensorShards, size_bytes
from finetune_trainer.checkpoint.shared_hashes import SharedHashes
from finetune_trainer.checkpoint.space import measure, refuse_small_disk
from finetune_trainer.checkpoint.start import Start, prepare_start
from finetune_trainer.checkpoint.writing import TRAINER_FILE, CheckpointWriter, Written
from finetune_trainer.claims.fence import Fence
from finetune_trainer.claims.names import Mark
from finetune_trainer.config import CheckpointConfig, CheckpointRef, JobRef
from finetune_trainer.errors import CheckpointError
from finetune_trainer.failpoints import reach
from finetune_trainer.memory.host import free_host_memory, pinned_size, refuse_pinning
from finetune_trainer.telemetry.checkpoints import CheckpointCosts
from finetune_trainer.telemetry.slots import Block
from finetune_trainer.waiting import Waiting

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

TRAINER_SECTION = "trainer"  # plain JSON values, beside the tensors of the other sections


class CheckpointStore:
    """The checkpoints of one run, as one rank sees them.

    Attributes:
        is_enabled: Whether `checkpoint.enabled` lets any be made; one to start from is read anyhow.
        last: The newest checkpoint that is known to be committed; the same on every rank.
        best: The committed checkpoint with the lowest held-out loss, if any was evaluated.
        cadence: When a save is due by the count of steps, and what the newest one took.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        rank: int,
        world_size: int,
        group: "ProcessGroup | None",
        job: JobRef,
        fingerprint: Fingerprint,
        fence: Fence | None,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        shards: Shards | None = None,
        ranks_on_node: int = 1,
        costs: CheckpointCosts | None = None,
        waiting: Waiting | None = None,
    ) -> None:
        """Open the store; nothing is read or written before `restore`.

        `group` is a gloo group of its own over all ranks, or None for one process. Checkpoints of
        another `job` or `fingerprint` are refused on restore. `fence` is rank 0's, which has the
        folder; None on the others. `warn` receives a sentence on rank 0
        for each thing that went wrong and was survived; `clock` is in seconds since the epoch.
        `shards` puts states into files: by DCP if None. So many
        `ranks_on_node` share the host's memory. `costs` is told what everything took.
        In `waiting` the ranks wait for each other; only within the time of `group` if None.
        """
        self.is_enabled = config.enabled
        self.last: CheckpointRef | None = None
        self.best: CheckpointRef | None = None
        self.cadence = Cadence(config)
        self._config = config
        self._root = Path(config.dir).absolute()
        self._rank = rank
        self._world_size = world_size
        self._ranks_on_node = ranks_on_node
        self._group = group
        self._waiting = waiting
        self._job = job
        self._fingerprint = fingerprint
        self._fence = fence
        self._course: commit.Course | None = None
        self._warn = warn if rank == 0 else _say_nothing
        self._clock = clock
        self._shards = shards or TensorShards()
        self._writer = CheckpointWriter(
            self._root,
            keep=config.keep,
            shards=self._shards,
            rank=rank,
            group=group,
            waiting=waiting,
            fence=fence,
        )
        self._costs = costs or CheckpointCosts(Block.private())
        self._blocked_seconds = 0.0  # of the save in flight
        self._in_flight: tuple[int, Future[Written]] | None = None
        self._failure: str | None = None  # of the newest save, as long as none came after it
        self._unreported: CheckpointRef | None = None

    def wants_save(self, step: int, now: float) -> bool:
        """Whether the interval between saves has passed; true once, then the count starts anew.

        Only rank 0 ever says so, and not at a step that is saved anyway: the others learn it from
        the agreement at the step boundary, as clocks differ. `now` is in seconds of any clock.
        """
        if self._rank != 0 or not self.is_enabled or self.cadence.is_due(step):
            return False
        return self.cadence.is_over(now)

    def save(self, step: int, state: State, *, eval_loss: float | None = None) -> float:
        """Start a save of `state` as it is now, and return the seconds the caller was blocked.

        `state` may change as soon as this returns. A save in flight is finished first. A step
        that is committed or in flight already is not saved again. A save that fails is reported
        to `warn`, leaves the checkpoints before it alone, and never ends training. None is made
        where checkpoints are off.

        `state` has sections of named tensors and plain values; that of `trainer` holds JSON alone.
        `eval_loss` is the held-out loss of this state, if it was evaluated.

        Raises:
            OvertakenError: the save before found a higher claim; raised on every rank, as by `poll`
                and `wait`.
        """
        started = time.perf_counter()
        if not self.is_enabled:
            return 0.0
        if self._in_flight is not None and self._in_flight[0] == step:
            return 0.0
        self._finish()
        if self.last is not None and self.last.step == step:
            return time.perf_counter() - started
        self._failure = None
        self.cadence.restart()
        copy = self._shards.take(_tensors_of(state))
        trainer = json.dumps(state.get(TRAINER_SECTION, {}))
        draft = Manifest(
            job=self._job,
            step=step,
            world_size=self._world_size,
            time=self._clock(),
            fingerprint=self._fingerprint,
            eval_loss=eval_loss,
            files={},
        )
        write = partial(
            self._writer.write, draft, copy, trainer, course=self._course, started=started
        )
        self._in_flight = (step, self._start(write))
        self._blocked_seconds = time.perf_counter() - started
        self._costs.blocked(self._blocked_seconds, self.cadence.interval_seconds)
        return self._blocked_seconds

    def poll(self) -> CheckpointRef | None:
        """Return the checkpoint committed since the last `poll` or `wait`, if any; never blocks.

        Ranks learn of the same commit at slightly different times, so no collective may depend
        on the answer.
        """
        if self._in_flight is not None and self._in_flight[1].done():
            self._finish()
        ref, self._unreported = self._unreported, None
        return ref

    def wait(self) -> CheckpointRef | None:
        """Block until nothing is in flight, and return the newest committed one, if there is any.

        It is the one a restart will begin with, also when `poll` has reported it before.

        Raises:
            CheckpointError: the newest save has failed, now or in an earlier `poll`.
        """
        self._finish()
        if self._failure is not None:
            raise CheckpointError(self._failure)
        self._unreported = None
        return self.last

    def restore(self, state: State) -> Manifest | None:
        """Load the checkpoint that `checkpoint.resumeFrom` names into `state`, in place.

        Call it once, before the first save, also when nothing is to be restored: it clears what
        a killed attempt left behind, and writes down from where training goes on. Every rank takes
        the checkpoint that rank 0 has verified.

        Returns:
            Its manifest, or None when training starts at step 0.

        Raises:
            ConfigError: the folder holds checkpoints of another job, the one to start from does
                not belong to this training, or it is not there.
            CheckpointError: the folder that was named is damaged, or does not fit `state`.
            OvertakenError: there is a higher claim on the folder.
        """
        self._course, source, self.last, self.best = self._agree_on_start()
        if self.is_enabled:
            self._shards.reserve(_tensors_of(state))
        if source is None:
            return None
        folder, manifest = source
        reach("restoring", manifest.step)
        self.load(folder, state)
        return manifest

    def load(self, folder: Path, state: State) -> None:
        """Read the committed checkpoint in `folder` into `state`, in place, on every rank.

        Raises:
            CheckpointError: it does not fit `state`.
        """
        try:
            began = time.perf_counter()
            self._shards.read(_tensors_of(state), folder, self._group)
            self._costs.loaded(time.perf_counter() - began)
            trainer = json.loads((folder / TRAINER_FILE).read_bytes())
        except (RankError, FileNotFoundError) as error:
            commit.refuse_deleted(folder)
            raise CheckpointError(f"checkpoint {folder} cannot be restored: {error}") from error
        if TRAINER_SECTION in state:
            state[TRAINER_SECTION].clear()
            state[TRAINER_SECTION].update(trainer)

    def load_best(self, state: State) -> CheckpointRef | None:
        """Load the checkpoint with the lowest held-out loss into `state`, in place.

        None, and a warning, when it does not verify; None as well when none was evaluated.
        """
        best = self.best
        if best is None:
            return None
        try:
            hashes = self._hashes()
            self._on_rank_0(
                lambda: hashes.lead(partial(commit.verify, Path(best.path))), beside=hashes.help
            )
        except (RankError, CheckpointError) as error:
            self._warn(f"the best checkpoint cannot be used ({error}); the last weights stay")
            return None
        self.load(Path(best.path), state)
        return best

    def check_space(self, state: State) -> None:
        """Refuse to start when disk or host memory cannot hold what `state` will need.

        Raises:
            ConfigError: there is less room than `checkpoint.keep` checkpoints and the one being
                written take; checkpoints that are there already count as room. Or the copy of this
                node's ranks in pinned memory is larger than what is free there.
        """
        if not self.is_enabled:
            return
        refuse_pinning(
            pinned_size(state), self._ranks_on_node, free_host_memory(), "a copy of the checkpoint"
        )
        free, held = self._on_rank_0(lambda: measure(self._root))
        size, keep = size_bytes(state), self._config.keep
        refuse_small_disk(self._root, size=size, keep=keep, free=free, held=held)

    def _agree_on_start(self) -> Start:
        """Let rank 0 choose and prepare the folder; all ranks return or raise alike."""
        hashes = self._hashes()

        def choose(confirm: commit.Confirm) -> Start:
            assert self._fence is not None, "rank 0 has it"
            return prepare_start(
                self._root, self._config, self._fingerprint, self._fence, self._warn, confirm
            )

        try:
            return self._on_rank_0(lambda: hashes.lead(choose), beside=hashes.help)
        except RankError as error:
            raise CheckpointError(
                f"spec.checkpoint.uri {self._root} cannot be used: {error}"
            ) from error

    def _hashes(self) -> SharedHashes:
        claim = None
        if self._fence is not None:
            claim = self._fence.holding(self._root).claim.path(self._root, Mark.HELD)
        return SharedHashes(
            self._group,
            self._waiting,
            rank=self._rank,
            ranks_on_node=self._ranks_on_node,
            claim=claim,
        )

    def _start(self, write: Callable[[], Written]) -> Future[Written]:
        future: Future[Written] = Future()

        def run() -> None:
            try:
                future.set_result(write())
            except Exception as error:  # for the caller that asks for the result
                future.set_exception(error)

        # A daemon: after the death of a peer it may wait in a collective for minutes, and the
        # process must be able to leave meanwhile.
        threading.Thread(target=run, name="save", daemon=True).start()
        return future

    def _finish(self) -> None:
        """Wait for the save in flight, and record its commit or its failure."""
        if self._in_flight is None:
            return
        (step, future), self._in_flight = self._in_flight, None
        try:
            ref, seconds, size, complaint = future.result()
        except (RankError, OSError, RuntimeError) as error:
            self._failure = self._sentence(step, error)
            self._warn(self._failure)
            self._costs.failed()
            return
        self.cadence.save_seconds = seconds
        beside = max(0.0, seconds - self._blocked_seconds)
        self._costs.committed(beside, size, self.cadence.interval_seconds)
        self.last = self._unreported = ref
        self.best = best([ref, self.best] if self.best else [ref])
        if complaint is not None:
            self._warn(complaint)

    def _sentence(self, step: int, error: Exception) -> str:
        before = f"step {self.last.step}" if self.last else "none"
        reason = str(error) if isinstance(error, RankError) else describe(error)
        advice = f"; make room in {self._root} or lower spec.checkpoint.keep"
        if isinstance(error, RuntimeError):  # a rank was lost, which says enough by itself
            advice = ""
        return (
            f"the checkpoint of step {step} was not written ({reason}); the last committed one "
            f"is {before}{advice}"
        )

    def _on_rank_0(self, work: Callable[[], T], beside: Callable[[], None] = do_nothing) -> T:
        """Call `work` on rank 0, and return its result or raise its TrainerError on every rank."""
        return on_rank_0(self._group, self._rank, work, beside, self._waiting)


def _tensors_of(state: State) -> State:
    return {name: part for name, part in state.items() if name != TRAINER_SECTION}


def _say_nothing(_: str) -> None:
    """Say nothing: ranks other than 0 see the same, and rank 0 reports it."""
