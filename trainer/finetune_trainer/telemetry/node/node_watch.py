"""Take snapshots of this node's ranks every second or two, and judge them on rank 0's node.

Runs in a thread of the page's process. It reads what the ranks have written to memory and the
kernel's data about their processes; it sends no request to a rank, driver or disk.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from threading import Thread
from typing import Annotated

from pydantic import Field, ValidationError

from finetune_trainer.config import (
    SUSPECTS_FILE,
    ContractModel,
    Phase,
    Progress,
    Suspect,
    Suspects,
    metrics,
)
from finetune_trainer.files import replace_text
from finetune_trainer.telemetry.boundary import read_boundary
from finetune_trainer.telemetry.collectives.groups import CHECKPOINT
from finetune_trainer.telemetry.node.evidence import MAX_STALLS, Evidence, evidence_folder
from finetune_trainer.telemetry.node.judge import Judge
from finetune_trainer.telemetry.node.node_ranks import NodeRanks, RankNow
from finetune_trainer.telemetry.node.peers import News, NewsDesk, RankZero, Reply, send
from finetune_trainer.telemetry.node.recorder_client import num_begun, query_recorder
from finetune_trainer.telemetry.node.slow import SlowPace
from finetune_trainer.telemetry.node.snapshots import RankSnapshot
from finetune_trainer.telemetry.node.stuck import STOPPED, StuckPace
from finetune_trainer.telemetry.phases import running_phase
from finetune_trainer.telemetry.slots import Word, layout_of_node
from finetune_trainer.telemetry.witness import recorder_socket

ENV_WATCH_SPEED = "FINETUNE_WATCH_SPEED"  # for tests: 10 divides all times by 10
WATCH_FILE = "watch.json"
RANK_ZERO_FILE = "rank-zero.json"
_SECONDS_BETWEEN_POLLS = 1.0
_SECONDS_BETWEEN_QUERIES = 10.0
_NODES_A_SECOND = 50  # requests that rank 0's node can serve with little work
_ENQUEUED = tuple(
    layout_of_node().place(metrics.COMM_ENQUEUED, group)
    for group in metrics.GROUPS
    if group != CHECKPOINT
)
_TRAINING = frozenset({Phase.TRAINING, Phase.EVALUATING})


class WatchConfig(ContractModel):
    """Settings with which a node's page finds ranks that hold the run back.

    Attributes:
        run_dir: Folder for evidence.
        node: Name of this node.
        num_nodes: Nodes of the job.
        hang_seconds: Time after which hanging ranks end themselves; None for never.
        word: Secret by which rank 0's node recognises the job's own nodes.
        has_key: Whether each node derives `word` from the attempt's key, so that it is not sent.
        speed: Factor by which ranks are judged faster than usual.
    """

    run_dir: str
    attempt: int
    node: str
    num_nodes: int
    hang_seconds: int | None = None
    word: str
    has_key: bool = False
    speed: Annotated[float, Field(gt=0)] = 1.0


@dataclass
class _Quiet:
    """A rank without progress.

    Attributes:
        where: Its last known position.
        asked_at: When its recorder was last queried, or when the rank got to `where`.
        recorded: Result of that query.
    """

    where: object
    asked_at: float
    recorded: int | None = None


class NodeWatch:
    """Watch of one node."""

    def __init__(
        self,
        config: WatchConfig,
        ranks: NodeRanks,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; `folder` is shared by the ranks and their page."""
        self._config, self._ranks, self._folder, self._clock = config, ranks, folder, clock
        self._epoch = time.time() - clock()  # computed once, so that times do not jump
        self._judge = _judge(config)
        self._evidence = Evidence(ranks, folder, Path(config.run_dir), config.attempt)
        seconds = max(_SECONDS_BETWEEN_POLLS, config.num_nodes / _NODES_A_SECOND)
        self._interval = seconds / config.speed
        self._complained = ""
        self._quiet: dict[int, _Quiet] = {}
        self._writing: Thread | None = None
        # None rather than empty, because an earlier attempt may have left a file.
        self._written: tuple[Suspect, ...] | None = None
        self.desk: NewsDesk | None = None
        if ranks.has_rank_zero:
            self.desk = NewsDesk(config.word, clock, interval=self._interval)
        self.suspects: tuple[Suspect, ...] = ()
        self.scores: Mapping[int, float] = {}

    def start(self) -> None:
        """Watch from a thread until this process ends."""
        Thread(target=self._run, name="watch", daemon=True).start()

    def look(self) -> None:
        """Take one snapshot of the ranks and judge or send it."""
        ranks, desk = self._ranks.now(), self.desk
        looks = tuple(self._add_recorded(_snapshot(one)) for one in ranks)
        reply = self._judge_all(desk, ranks, looks) if desk is not None else self._ask(looks)
        self.scores = reply.scores
        if reply.stall:
            self._evidence.collect(reply.stall)

    def _add_recorded(self, look: RankSnapshot) -> RankSnapshot:
        """Add the number from torch's recorder to the snapshot of a rank without progress."""
        now, where = self._clock(), (look.process_start, look.boundary, look.position)
        quiet = self._quiet.get(look.rank)
        if quiet is None or quiet.where != where:
            quiet = self._quiet[look.rank] = _Quiet(where, now)
        if now - quiet.asked_at > _SECONDS_BETWEEN_QUERIES / self._config.speed:
            quiet.asked_at = now
            if look.process not in STOPPED:
                dump = query_recorder(self._folder / recorder_socket(look.rank), with_ring=False)
                quiet.recorded = None if dump is None else num_begun(dump)
        return look.model_copy(update={"recorded": quiet.recorded})

    def _run(self) -> None:
        while True:
            time.sleep(self._interval)
            self.look()

    def _judge_all(
        self, desk: NewsDesk, ranks: Sequence[RankNow], looks: tuple[RankSnapshot, ...]
    ) -> Reply:
        desk.store(self._config.node, looks)
        now = self._epoch + self._clock()
        found = self._judge.look(now, desk.seen(), is_training=self._is_training())
        folder = None
        if found.num_stalls <= MAX_STALLS:
            folder = evidence_folder(ranks, self._config.attempt, found.num_stalls)
        self.suspects = tuple(
            one.model_copy(update={"evidence": folder}) if one.score is None else one
            for one in found.suspects
        )
        self._publish()
        desk.set_results(found.scores, found.num_stalls)
        return desk.reply(looks)

    def _publish(self) -> None:
        """Write the suspects to the run directory, in a thread in case the disk hangs."""
        is_busy = self._writing is not None and self._writing.is_alive()
        if self.suspects == self._written or is_busy:
            return
        self._written = self.suspects
        # The interpreter prints exceptions of the thread into the log of the node.
        self._writing = Thread(target=self._write, args=(self.suspects,), daemon=True)
        self._writing.start()

    def _write(self, suspects: tuple[Suspect, ...]) -> None:
        """Write the suspects, unless the run directory belongs to a later attempt by now."""
        path = Path(self._config.run_dir) / SUSPECTS_FILE
        try:
            attempt = Progress.read(path.with_name("progress.json")).attempt
        except (OSError, ValidationError):
            attempt = None
        if attempt != self._config.attempt:
            self._written = None  # rank 0 may not have reported yet, so the next look tries again
            return
        if suspects:
            news = Suspects(attempt=self._config.attempt, suspects=suspects)
            replace_text(path, news.to_json())
        else:
            path.unlink(missing_ok=True)

    def _ask(self, looks: tuple[RankSnapshot, ...]) -> Reply:
        """Send the snapshots to rank 0's node, once its address is known."""
        try:
            to = RankZero.read(self._folder / RANK_ZERO_FILE)
        except FileNotFoundError:
            return Reply()
        word = self._config.word if self._config.has_key else to.word
        news = News(word=word, node=self._config.node, ranks=looks)
        try:
            return send(to, news)
        except (OSError, HTTPException, ValidationError, ValueError) as error:
            self._complain(
                f"the metrics page of rank 0's node at {to.host}:{to.port} is not updated: {error}"
            )
            return Reply()

    def _complain(self, sentence: str) -> None:
        """Print a problem once for as long as it does not change."""
        if sentence != self._complained:
            self._complained = sentence
            print(f"warning: {sentence}", file=sys.stderr, flush=True)

    def _is_training(self) -> bool:
        text = self._ranks.progress()
        return text is not None and json.loads(text).get("phase") in _TRAINING


def read_watch(folder: Path, ranks: NodeRanks) -> NodeWatch | None:
    """Return the watch configured in `folder`; None without a configuration."""
    try:
        config = WatchConfig.read(folder / WATCH_FILE)
    except FileNotFoundError:
        return None
    return NodeWatch(config, ranks, folder)


def _judge(config: WatchConfig) -> Judge:
    """Return a judge that names stuck ranks, and so saves evidence, before they end themselves."""
    slow, stuck, speed = SlowPace(), StuckPace(), config.speed
    return Judge(
        replace(slow, window_seconds=slow.window_seconds / speed),
        replace(
            stuck,
            seconds=stuck.seconds / speed,
            long_seconds=stuck.long_seconds / speed,
            most_seconds=None if config.hang_seconds is None else config.hang_seconds / 2,
        ),
    )


def _snapshot(rank: RankNow) -> RankSnapshot:
    running = running_phase(rank.numbers)
    return RankSnapshot(
        rank=rank.rank,
        process_start=int(rank.numbers[Word.PROCESS_START]),
        process=rank.process.state if rank.process is not None else None,
        phase=running[0].value if running is not None else None,
        boundary=read_boundary(rank.numbers),
        position=_position(rank.numbers),
    )


def _position(numbers: Sequence[float]) -> int | None:
    """Return the number of collectives that a rank's training has begun; None if not known.

    Collectives of checkpoints are left out: they run in another thread and no step waits for them.
    """
    known = [numbers[place] for place in _ENQUEUED if numbers[place] == numbers[place]]
    return int(sum(known)) if known else None
