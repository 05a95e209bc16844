"""Save checkpoints asynchronously and restore verified ones.

The loop owns one `CheckpointStore` per rank and calls the same methods at the same steps on every
rank. A save copies the state and returns. A thread writes a folder named by step and claim, and
when every rank's part is on disk, rank 0 adds the manifest, which commits the checkpoint. The
thread needs its own process group, because its collectives would otherwise interleave with
training's.
"""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from finetune_trainer.checkpoint import commit
from finetune_trainer.checkpoint.agreement import (
    RankError,
    describe,
    do_nothing,
    on_rank_0,
)
from finetune_trainer.checkpoint.cadence import Cadence
from finetune_trainer.checkpoint.commit import Fingerprint, Manifest
from finetune_trainer.checkpoint.division import own_part
from finetune_trainer.checkpoint.retention import best
from finetune_trainer.checkpoint.shards import Shards, State, TensorShards, on_this_gpu, size_bytes
from finetune_trainer.checkpoint.shared_hashes import SharedHashes
from finetune_trainer.checkpoint.space import measure, refuse_small_disk
from finetune_trainer.checkpoint.start import Start, prepare_start
from finetune_trainer.checkpoint.writing import TRAINER_FILE, CheckpointWriter, Written
from finetune_trainer.claims.fence import Fence
from finetune_trainer.claims.names import Mark
from finetune_trainer.config import CheckpointConfig, CheckpointRef, JobRef
from finetune_trainer.errors import CheckpointError
from finetune_trainer.failpoints import failpoint
from finetune_trainer.memory.host import free_host_memory, pinned_size, refuse_pinning
from finetune_trainer.telemetry.checkpoints import CheckpointCosts
from finetune_trainer.telemetry.slots import Block
from finetune_trainer.waiting import Waiting

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

TRAINER_SECTION = "trainer"  # plain JSON values, beside the tensors of the other sections


class CheckpointStore:
    """The checkpoints of a run, as seen by one rank.

    Attributes:
        is_enabled: Whether `checkpoint.enabled` allows saves; a checkpoint to start from is read in
            either case.
        last: The newest checkpoint that is known to be committed; the same on every rank.
        best: The committed checkpoint with the lowest held-out loss, if any was evaluated.
        cadence: Decides when a save is due, and has the duration of the newest one.
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
        held_out: str | None = None,
    ) -> None:
        """Open the store; the first access to the disk is `restore`.

        Args:
            config: Where and how often to save, and where to resume.
            rank: Rank of this process.
            world_size: Number of ranks.
            group: A gloo group over all ranks for this store alone; None for one process.
            job: Checkpoints of another job are refused on restore.
            fingerprint: Checkpoints with another fingerprint are refused on restore.
            fence: Proves on rank 0 that this process owns the folder; None on other ranks.
            warn: Receives, on rank 0, a sentence for each problem that does not end training.
            clock: Seconds since the epoch.
            shards: Writes states to files and reads them; DCP if None.
            ranks_on_node: Number of ranks that share the host's memory.
            costs: Records durations and sizes.
            waiting: Lets ranks wait for each other longer than the timeout of `group`.
            held_out: Fingerprint of the held-out rows; only losses of the same rows are compared.
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
        self._held_out = held_out
        self._fence = fence
        self._lineage: commit.Lineage | None = None
        self._warn = warn if rank == 0 else _drop
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
            held_out=held_out,
        )
        self._costs = costs or CheckpointCosts(Block.private())
        self._blocked_seconds = 0.0  # of the save in flight
        self._in_flight: tuple[int, Future[Written]] | None = None
        self._failure: str | None = None  # of the newest save, until the next one starts
        self._unreported: CheckpointRef | None = None

    def wants_save(self, step: int, now: float) -> bool:
        """Whether the interval between saves has passed; if so, a new interval starts.

        Clocks differ between ranks, so this is true only on rank 0; the others learn it from the
        agreement at the step boundary. It is false at steps that are saved by `everySteps`. `now`
        is in seconds of any clock.
        """
        if self._rank != 0 or not self.is_enabled or self.cadence.is_due(step):
            return False
        return self.cadence.is_elapsed(now)

    def save(self, step: int, state: State, *, eval_loss: float | None = None) -> float:
        """Start a save of the current `state`, and return the seconds the caller was blocked.

        `state` may change as soon as this returns. A save in flight is finished first. A step
        that is committed or in flight is not saved again. A failed save is reported to `warn`,
        leaves earlier checkpoints intact and never ends training. If checkpoints are disabled, this
        does nothing.

        Args:
            step: Optimizer steps in `state`.
            state: Sections of named tensors and plain values; section `trainer` is JSON.
            eval_loss: Held-out loss of this state, if it was evaluated.

        Raises:
            OvertakenError: the previous save found a higher claim; raised on every rank. `poll` and
                `wait` raise it, too.
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
        copy = self._shards.take(self._own_part(state))
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
            self._writer.write, draft, copy, trainer, lineage=self._lineage, started=started
        )
        self._in_flight = (step, self._start(write))
        self._blocked_seconds = time.perf_counter() - started
        self._costs.blocked(self._blocked_seconds, self.cadence.interval_seconds)
        return self._blocked_seconds

    def poll(self) -> CheckpointRef | None:
        """Return the checkpoint committed since the last `poll` or `wait`, if any; never blocks.

        Ranks learn of the same commit at slightly different times, so no collective may depend
        on the result.
        """
        if self._in_flight is not None and self._in_flight[1].done():
            self._finish()
        ref, self._unreported = self._unreported, None
        return ref

    def wait(self) -> CheckpointRef | None:
        """Block until no save is in flight, and return the newest committed checkpoint, if any.

        A restart resumes from that checkpoint. It is returned even if `poll` has reported it.

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

        Must be called once, before the first save, even if there is no checkpoint: it deletes
        leftovers of a killed attempt and records the starting point. Every rank loads the
        checkpoint that rank 0 has verified.

        Returns:
            The manifest, or None if training starts at step 0.

        Raises:
            ConfigError: the folder contains checkpoints of another job, or the checkpoint to start
                from is missing or belongs to another training.
            CheckpointError: the named checkpoint is damaged, or does not fit `state`.
            OvertakenError: there is a higher claim on the folder.
        """
        self._lineage, source, self.last, self.best = self._agree_on_start()
        if self.is_enabled:
            self._shards.reserve(self._own_part(state))
        if source is None:
            return None
        folder, manifest = source
        failpoint("restoring", manifest.step)
        self.load(folder, state)
        return manifest

    def has_other_held_out(self, manifest: Manifest) -> bool:
        """Whether a checkpoint is known to have other held-out rows than this run."""
        return manifest.has_other_held_out(self._held_out)

    def load(self, folder: Path, state: State) -> None:
        """Read the committed checkpoint in `folder` into `state`, in place, on every rank.

        Raises:
            CheckpointError: the checkpoint does not fit `state`.
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

        Returns:
            The checkpoint. None if none was evaluated, or, with a warning, if it is damaged.
        """
        best = self.best
        if best is None:
            return None
        try:
            hashes = self._hashes()
            self._on_rank_0(
                lambda: hashes.lead(partial(commit.verify, Path(best.path))),
                commit.Manifest,
                beside=hashes.help,
            )
        except (RankError, CheckpointError) as error:
            self._warn(f"the best checkpoint cannot be used ({error}); using the last weights")
            return None
        self.load(Path(best.path), state)
        return best

    def check_space(self, state: State) -> None:
        """Refuse to start if disk or host memory is too small for checkpoints of `state`.

        Raises:
            ConfigError: the disk has less room than `checkpoint.keep` checkpoints and the one being
                written need; existing checkpoints count as room. Or the copies of this node's
                ranks in pinned memory are larger than the free host memory.
        """
        if not self.is_enabled:
            return
        pinned = pinned_size(self._own_part(state))
        refuse_pinning(pinned, self._ranks_on_node, free_host_memory(), "a copy of the checkpoint")
        free, held = self._on_rank_0(lambda: measure(self._root), tuple[int, int])
        size, keep = size_bytes(state), self._config.keep
        refuse_small_disk(self._root, size=size, keep=keep, free=free, held=held)

    def _own_part(self, state: State) -> State:
        return own_part(_tensors_of(state), self._rank, self._world_size)

    def _agree_on_start(self) -> Start:
        """Choose the start and prepare the folder on rank 0; return or raise alike on all ranks."""
        hashes = self._hashes()

        def choose(confirm: commit.Confirm) -> Start:
            assert self._fence is not None, "rank 0 has it"
            return prepare_start(
                self._root,
                self._config,
                self._fingerprint,
                self._fence,
                self._warn,
                confirm,
                self._held_out,
            )

        try:
            return self._on_rank_0(lambda: hashes.lead(choose), Start, beside=hashes.help)
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
            except Exception as error:  # raised again by the caller that reads the result
                future.set_exception(error)

        # A daemon thread: if a peer dies it may block in a collective for minutes, and the process
        # must still be able to exit.
        threading.Thread(target=on_this_gpu(run), name="save", daemon=True).start()
        return future

    def _finish(self) -> None:
        """Wait for the save in flight, and record its commit or its failure."""
        if self._in_flight is None:
            return
        (step, future), self._in_flight = self._in_flight, None
        try:
            ref, seconds, size, warning = future.result()
        except (RankError, OSError, RuntimeError) as error:
            self._failure = self._failure_message(step, error)
            self._warn(self._failure)
            self._costs.failed()
            return
        self.cadence.save_seconds = seconds
        beside = max(0.0, seconds - self._blocked_seconds)
        self._costs.committed(beside, size, self.cadence.interval_seconds)
        self.last = self._unreported = ref
        self.best = best([ref, self.best] if self.best else [ref])
        if warning is not None:
            self._warn(warning)

    def _failure_message(self, step: int, error: Exception) -> str:
        before = f"step {self.last.step}" if self.last else "none"
        reason = str(error) if isinstance(error, RankError) else describe(error)
        advice = f"; make room in {self._root} or lower spec.checkpoint.keep"
        if isinstance(error, RuntimeError):  # a lost rank; more room would not help
            advice = ""
        return (
            f"the checkpoint of step {step} was not written ({reason}); the last committed one "
            f"is {before}{advice}"
        )

    def _on_rank_0(
        self, work: Callable[[], T], kind: Any, beside: Callable[[], None] = do_nothing
    ) -> T:
        """Call `work` on rank 0, and return its result or raise its TrainerError on every rank."""
        return on_rank_0(self._group, self._rank, work, kind, beside, self._waiting)


def _tensors_of(state: State) -> State:
    return {name: part for name, part in state.items() if name != TRAINER_SECTION}


def _drop(_: str) -> None:
    """Drop the warning: rank 0 reports it for all ranks."""
