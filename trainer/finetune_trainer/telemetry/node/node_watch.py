"""Looks at the ranks of this node every second or two, and has them judged on rank 0's node.

A thread of the page's process runs it. It takes what the ranks have written into memory, and what
the kernel says of their processes; it asks no rank, driver or disk for anything.
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

from finetune_trainer.config import SUSPECTS_FILE, ContractModel, Phase, Suspect, Suspects, metrics
from finetune_trainer.files import replace_text
from finetune_trainer.telemetry.boundary import read_boundary
from finetune_trainer.telemetry.collectives.groups import CHECKPOINT
from finetune_trainer.telemetry.node.evidence import STALLS_KEPT, Evidence, evidence_folder
from finetune_trainer.telemetry.node.judge import Judge
from finetune_trainer.telemetry.node.looks import RankLook
from finetune_trainer.telemetry.node.node_ranks import NodeRanks, RankNow
from finetune_trainer.telemetry.node.peers import News, NewsDesk, RankZero, Reply, send
from finetune_trainer.telemetry.node.recorders import ask_recorder, begun_in
from finetune_trainer.telemetry.node.slow import SlowPace
from finetune_trainer.telemetry.node.stuck import STOPPED, StuckPace
from finetune_trainer.telemetry.phases import running_phase
from finetune_trainer.telemetry.slots import Word, layout_of_node
from finetune_trainer.telemetry.witness import recorder_socket

ENV_WATCH_SPEED = "FINETUNE_WATCH_SPEED"  # for tests, which cannot wait: 10 divides times by 10
WATCH_FILE = "watch.json"
RANK_ZERO_FILE = "rank-zero.json"
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_BETWEEN_QUESTIONS = 10.0
_NODES_A_SECOND = 50  # that rank 0's node hears with little work
_ENQUEUED = tuple(
    layout_of_node().place(metrics.COMM_ENQUEUED, group)
    for group in metrics.GROUPS
    if group != CHECKPOINT
)
_TRAINING = frozenset({Phase.TRAINING, Phase.EVALUATING})


class WatchConfig(ContractModel):
    """What a node's page must know to find who holds the run back.

    Attributes:
        run_dir: where evidence goes.
        node: this node's name.
        num_nodes: of the job.
        hang_seconds: after which ranks end themselves; None for never.
        word: by which rank 0's node knows the job's own nodes.
        speed: how much faster than usual ranks are judged.
    """

    run_dir: str
    attempt: int
    node: str
    num_nodes: int
    hang_seconds: int | None = None
    word: str
    speed: Annotated[float, Field(gt=0)] = 1.0


@dataclass
class _Quiet:
    """A rank that has not got on since it was somewhere.

    Attributes:
        asked_at: when its recorder was asked last, or when it got there.
        recorded: what that said.
    """

    where: object
    asked_at: float
    recorded: int | None = None


class NodeWatch:
    """The watch of one node."""

    def __init__(
        self,
        config: WatchConfig,
        ranks: NodeRanks,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; `folder` is what the ranks share with their page."""
        self._config, self._ranks, self._folder, self._clock = config, ranks, folder, clock
        self._epoch = time.time() - clock()  # once, so that times do not jump
        self._judge = _judge(config)
        self._evidence = Evidence(ranks, folder, Path(config.run_dir), config.attempt)
        seconds = max(_SECONDS_BETWEEN_LOOKS, config.num_nodes / _NODES_A_SECOND)
        self._interval = seconds / config.speed
        self._complained = ""
        self._quiet: dict[int, _Quiet] = {}
        self._writing: Thread | None = None
        self._written: tuple[Suspect, ...] | None = None  # there may be some of an earlier attempt
        self.desk: NewsDesk | None = None
        if ranks.has_rank_zero:
            self.desk = NewsDesk(config.word, clock, interval=self._interval)
        self.suspects: tuple[Suspect, ...] = ()
        self.scores: Mapping[int, float] = {}

    def start(self) -> None:
        """Watch from a thread as long as this process lives."""
        Thread(target=self._run, name="watch", daemon=True).start()

    def look(self) -> None:
        """Look at the ranks once."""
        looks = tuple(self._recall(_look(one)) for one in self._ranks.now())
        desk = self.desk
        reply = self._judge_all(desk, looks) if desk is not None else self._ask(looks)
        self.scores = reply.scores
        if reply.stall:
            self._evidence.collect(reply.stall)

    def _recall(self, look: RankLook) -> RankLook:
        """Return the look with what torch's recorder knows, where the rank does not get on."""
        now, where = self._clock(), (look.process_start, look.boundary, look.position)
        quiet = self._quiet.get(look.rank)
        if quiet is None or quiet.where != where:
            quiet = self._quiet[look.rank] = _Quiet(where, now)
        if now - quiet.asked_at > _SECONDS_BETWEEN_QUESTIONS / self._config.speed:
            quiet.asked_at = now
            if look.process not in STOPPED:
                dump = ask_recorder(self._folder / recorder_socket(look.rank), with_ring=False)
                quiet.recorded = None if dump is None else begun_in(dump)
        return look.model_copy(update={"recorded": quiet.recorded})

    def _run(self) -> None:
        while True:
            time.sleep(self._interval)
            self.look()

    def _judge_all(self, desk: NewsDesk, looks: tuple[RankLook, ...]) -> Reply:
        desk.hear(self._config.node, looks)
        now = self._epoch + self._clock()
        found = self._judge.look(now, desk.seen(), is_training=self._is_training())
        folder = None
        if found.num_stalls <= STALLS_KEPT:
            folder = evidence_folder(self._config.attempt, found.num_stalls)
        self.suspects = tuple(
            one.model_copy(update={"evidence": folder}) if one.score is None else one
            for one in found.suspects
        )
        self._publish()
        desk.tell(found.scores, found.num_stalls)
        return desk.reply(looks)

    def _publish(self) -> None:
        """Write who is suspected now where those read it who read files; a disk may not answer."""
        is_busy = self._writing is not None and self._writing.is_alive()
        if self.suspects == self._written or is_busy:
            return
        self._written = self.suspects
        # What goes wrong in it is printed by the interpreter, into the log of the node.
        self._writing = Thread(target=self._write, args=(self.suspects,), daemon=True)
        self._writing.start()

    def _write(self, suspects: tuple[Suspect, ...]) -> None:
        path = Path(self._config.run_dir) / SUSPECTS_FILE
        if suspects:
            news = Suspects(attempt=self._config.attempt, suspects=suspects)
            replace_text(path, news.to_json())
        else:
            path.unlink(missing_ok=True)

    def _ask(self, looks: tuple[RankLook, ...]) -> Reply:
        """Send the looks to rank 0's node, once it is known where that is."""
        try:
            to = RankZero.read(self._folder / RANK_ZERO_FILE)
        except FileNotFoundError:
            return Reply()
        news = News(word=to.word, node=self._config.node, ranks=looks)
        try:
            return send(to, news)
        except (OSError, HTTPException, ValidationError, ValueError) as error:
            self._complain(f"the page of rank 0's node at {to.host}:{to.port} is not told: {error}")
            return Reply()

    def _complain(self, sentence: str) -> None:
        """Print what is wrong, once as long as it stays the same."""
        if sentence != self._complained:
            self._complained = sentence
            print(f"warning: {sentence}", file=sys.stderr, flush=True)

    def _is_training(self) -> bool:
        text = self._ranks.progress()
        return text is not None and json.loads(text).get("phase") in _TRAINING


def read_watch(folder: Path, ranks: NodeRanks) -> NodeWatch | None:
    """Return the watch that `folder` has the configuration of; None where it has none."""
    try:
        config = WatchConfig.read(folder / WATCH_FILE)
    except FileNotFoundError:
        return None
    return NodeWatch(config, ranks, folder)


def _judge(config: WatchConfig) -> Judge:
    """Return a judge who has evidence kept before ranks that hang end themselves."""
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


def _look(rank: RankNow) -> RankLook:
    running = running_phase(rank.numbers)
    return RankLook(
        rank=rank.rank,
        process_start=int(rank.numbers[Word.PROCESS_START]),
        process=rank.process.state if rank.process is not None else None,
        phase=running[0].value if running is not None else None,
        boundary=read_boundary(rank.numbers),
        position=_position(rank.numbers),
    )


def _position(numbers: Sequence[float]) -> int | None:
    """Return how many collectives of training a rank has begun; None where nothing is known.

    Those of checkpoints are another thread's, which no step waits for.
    """
    known = [numbers[place] for place in _ENQUEUED if numbers[place] == numbers[place]]
    return int(sum(known)) if known else None
