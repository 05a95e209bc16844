"""The series that a job shows while something holds it back: four ranks on two nodes.

What a step of each rank takes is given; what a page says follows from it, as in a synchronous run:
all ranks wait for the last one, and the last one waits for nobody.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from served_pages import line

RANKS = range(4)
NODES = ("node-0", "node-1")
_BYTES = 64e6  # of the one collective of a step, on the bus


@dataclass(frozen=True)
class Pace:
    """Seconds of one step, by rank.

    Attributes:
        transfer: of its collective, once the last rank is there.
    """

    compute: tuple[float, ...] = (0.1,) * 4
    data: tuple[float, ...] = (0.002,) * 4
    checkpoint: tuple[float, ...] = (0.001,) * 4
    transfer: float = 0.01
    is_stuck: bool = False

    @property
    def busy(self) -> tuple[float, ...]:
        """What each rank does before it comes to the collective."""
        parts = zip(self.compute, self.data, self.checkpoint, strict=True)
        return tuple(sum(one) for one in parts)


WELL = Pace()
FAULTS: Mapping[str, tuple[Pace, str | None]] = {
    "slow-rank": (replace(WELL, compute=(0.1, 0.1, 0.1, 0.12)), "compute"),
    "stuck-rank": (replace(WELL, is_stuck=True), "stuck"),
    "data-starvation": (replace(WELL, data=(0.002, 0.002, 0.002, 0.08)), "data"),
    "slow-storage": (replace(WELL, checkpoint=(0.05,) * 4), None),
    "slow-network": (replace(WELL, transfer=0.03), None),
}
"""What each fault does to a step, and the cause that the nodes of the job find for rank 3."""


class PlayedJob:
    """One job; a page is worked out when it is asked for."""

    def __init__(self, fault: str) -> None:
        self._pace, self._cause = WELL, FAULTS[fault][1]
        self._faulty = FAULTS[fault][0]
        self._at = self._stepped = time.time()
        self._totals: dict[tuple[str, int], float] = {}

    def break_down(self) -> None:
        """Let the fault begin."""
        self._go_on()
        self._pace = self._faulty

    @property
    def suspects(self) -> list[str]:
        """What the operator tells of the job, without the job's labels."""
        if self._pace is WELL or self._cause is None:
            return []
        return [f'node="{NODES[1]}",rank="3",cause="{self._cause}"}} 1']

    def page(self, node: int) -> str:
        """Return what the page of a node says now."""
        self._go_on()
        lines = []
        for rank in RANKS[2 * node : 2 * node + 2]:
            lines += [
                line("finetune_train_last_step_timestamp_seconds", self._stepped, rank=rank),
                line("finetune_train_step_duration_ewma_seconds", self._step_seconds, rank=rank),
                line("finetune_train_last_seen_age_seconds", self._at - self._stepped, rank=rank),
                line("finetune_train_steps_total", self._total("steps", rank), rank=rank),
            ]
            lines += [
                line(
                    "finetune_train_phase_seconds_total",
                    self._total(phase, rank),
                    rank=rank,
                    phase=phase,
                )
                for phase in ("data_wait", "forward", "checkpoint_blocking", "comm_exposed")
            ]
            lines += [
                line(
                    f"finetune_comm_{name}_total",
                    self._total(name, rank),
                    rank=rank,
                    op="all_reduce",
                    group="dp",
                    size="large",
                )
                for name in ("bus_bytes", "duration_seconds")
            ]
        return "\n".join(lines) + "\n"

    @property
    def _step_seconds(self) -> float:
        return max(self._pace.busy) + self._pace.transfer

    def _total(self, name: str, rank: int) -> float:
        return self._totals.get((name, rank), 0.0)

    def _go_on(self) -> None:
        now = time.time()
        passed, self._at = now - self._at, now
        if self._pace.is_stuck:
            for rank in RANKS:
                self._add(rank, 1.0, {"forward" if rank == 3 else "comm_exposed": passed})
            return
        self._stepped = now
        for rank in RANKS:
            waits = self._step_seconds - self._pace.busy[rank]
            self._add(
                rank,
                passed / self._step_seconds,
                {
                    "steps": 1,
                    "forward": self._pace.compute[rank],
                    "data_wait": self._pace.data[rank],
                    "checkpoint_blocking": self._pace.checkpoint[rank],
                    "comm_exposed": waits,
                    "duration_seconds": waits,
                    "bus_bytes": _BYTES,
                },
            )

    def _add(self, rank: int, times: float, amounts: Mapping[str, float]) -> None:
        for name, amount in amounts.items():
            self._totals[name, rank] = self._total(name, rank) + times * amount
