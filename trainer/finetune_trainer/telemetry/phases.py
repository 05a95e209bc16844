"""Account for a rank's wall time with a clock that is always in exactly one phase.

The loop reports its current phase; the node's page adds the running phase up to the moment of a
scrape. The phases of a rank therefore sum to its wall time at any moment, even while it is stuck.

Six numbers in the block describe the running phase, its start, and the total of the previous phase.
A switch writes them to the unused copy and then increments the switch counter, which makes the copy
valid. A reader that sees the same counter before and after has not read half of a switch, and a
rank that is stopped during a switch leaves the old numbers intact.

Some time is known to belong to another phase only after it has passed, such as work of the device
and waits of DDP. Because a counter cannot decrease, a phase that was credited with too much time
gives its next seconds to the phase that got too little.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

from finetune_trainer.config.metrics import PHASE_SECONDS, TimedPhase
from finetune_trainer.telemetry.processes import TICK_SECONDS, seconds_since_start
from finetune_trainer.telemetry.slots import Block, Word, layout_of_node

_PHASES = tuple(TimedPhase)
_PLACES = tuple(layout_of_node().place(PHASE_SECONDS, phase.value) for phase in _PHASES)
_NUMBERS = {phase: (index + 1, _PLACES[index]) for index, phase in enumerate(_PHASES)}
_RECORDS = (int(Word.EVEN_RUNNING), int(Word.ODD_RUNNING))  # first of six numbers
_SWITCHES = int(Word.PHASE_SWITCHES)
_TOO_LITTLE = 1e-6  # seconds; smaller errors are not corrected

Marks = Sequence[tuple[TimedPhase, float, Any]]
"""Phases entered by the host, each with the time and the device's mark."""


class DeviceClock(Protocol):
    """Measures when a device executes the work that the host has queued."""

    def mark(self) -> Any:
        """Mark the moment at which the device starts the next queued work; never waits."""

    def seconds(self, earlier: Any, later: Any) -> float:
        """Return the time between two marks, both of which the device has passed."""


class PhaseClock:
    """Phase clock of one rank; only its main thread may use it, except for `stop`.

    Attributes:
        phase: Current phase of this rank, set by `enter`.
    """

    def __init__(self, block: Block, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin in `other` at the start of this process.

        A phase that an earlier process of this rank left running counts until then: its end was not
        recorded, and the page may already have shown that time.
        """
        self._numbers = block.numbers
        self._clock = clock
        self.phase = TimedPhase.OTHER
        self._device: DeviceClock | None = None
        self._marks: list[tuple[TimedPhase, float, Any]] = []
        self._balance = dict.fromkeys(_PHASES, 0.0)
        self._over_credited: set[TimedPhase] = set()  # over-credited by more than `_TOO_LITTLE`
        self._has_stopped = False
        self._listener: Callable[[TimedPhase], None] | None = None
        self._switches = int(self._numbers[Word.PHASE_SWITCHES])
        # Credited in place of `phase` until `_credited_until`.
        self._credited: TimedPhase | None = None
        self._credited_until = 0.0
        self._since = self._take_over()

    def enter(self, phase: TimedPhase) -> TimedPhase:
        """Enter `phase` and return the previous phase.

        It runs several times per step and must be nearly free, so it is a single function.
        """
        if self._listener is not None:
            self._listener(phase)
        now, before, first = self._clock(), self.phase, 0
        if self._device is not None:
            self._marks.append((phase, now, self._device.mark()))
        if self._has_stopped:
            return before
        if self._credited is not None:
            self._end_repayment(now)
        if phase in self._over_credited:
            first = self._begin_repayment(phase, now)
        numbers = self._numbers
        left, place = _NUMBERS[before]
        total = numbers[place] + (now - self._since)
        self._switches = switches = self._switches + 1
        at = _RECORDS[switches & 1]
        numbers[at] = _NUMBERS[phase][0]
        numbers[at + 1] = now
        numbers[at + 2] = first
        numbers[at + 3] = self._credited_until
        numbers[at + 4] = left
        numbers[at + 5] = total
        numbers[_SWITCHES] = switches
        numbers[place] = total
        self.phase, self._since = phase, now
        return before

    @contextmanager
    def within(self, phase: TimedPhase) -> Iterator[None]:
        """Be in `phase` during the block."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def spent(self, phase: TimedPhase) -> float:
        """Return the seconds of `phase` up to the last switch, earlier processes included."""
        return self._numbers[_NUMBERS[phase][1]]

    def now(self) -> float:
        """Return the time of this clock, in seconds."""
        return self._clock()

    def listen(self, listener: Callable[[TimedPhase], None] | None) -> None:
        """Call `listener` with each phase just before it is entered; None ends the calls."""
        self._listener = listener

    def move(self, source: TimedPhase, target: TimedPhase, seconds: float) -> None:
        """Transfer seconds that were counted for `source` to `target`."""
        self._correct({source: -seconds, target: seconds})

    def follow(self, device: DeviceClock | None) -> None:
        """Attribute time by the work of `device` from now on; None returns to the host's time."""
        self._device, self._marks = device, []
        if device is not None:
            self._marks = [(self.phase, self._clock(), device.mark())]

    def take_marks(self) -> Marks:
        """Return the marks up to now, for `count`; empty while the host's time counts."""
        marks, self._marks = self._marks, self._marks[-1:]
        return marks

    def count(self, marks: Marks) -> None:
        """Attribute the time between `marks` by the device, which has passed all of them."""
        if self._device is None or len(marks) < 2:
            return
        wrong = dict.fromkeys(_PHASES, 0.0)
        for (phase, began, earlier), (_, ended, later) in pairwise(marks):
            wrong[phase] += self._device.seconds(earlier, later) - (ended - began)
        self._correct(wrong)

    def stop(self) -> None:
        """End the last phase; later time is not counted."""
        if not self._has_stopped:
            self._has_stopped = True
            now = self._clock()
            self._end_repayment(now)
            self._write(_NUMBERS[self.phase][0], self._since, 0, now)

    def _correct(self, wrong: dict[TimedPhase, float]) -> None:
        for phase, seconds in wrong.items():
            self._adjust_balance(phase, seconds)

    def _adjust_balance(self, phase: TimedPhase, seconds: float) -> None:
        owed = self._balance[phase] = self._balance[phase] + seconds
        if owed < -_TOO_LITTLE:
            self._over_credited.add(phase)
        else:
            self._over_credited.discard(phase)

    def _begin_repayment(self, phase: TimedPhase, now: float) -> int:
        """Credit the first seconds of an over-credited phase to the phase that is owed the most.

        Returns:
            The number of that phase; 0 if `phase` counts for itself.
        """
        owed = self._balance
        most = max(owed, key=owed.__getitem__)
        if owed[most] < _TOO_LITTLE:
            return 0
        self._credited, self._credited_until = most, now + min(owed[most], -owed[phase])
        return _NUMBERS[most][0]

    def _end_repayment(self, now: float) -> None:
        """End the credit that the running phase gives to another one at `now`."""
        first, self._credited = self._credited, None
        if first is None:
            return
        until = min(now, self._credited_until)
        self._adjust_balance(first, self._since - until)
        self._adjust_balance(self.phase, until - self._since)
        self._write(_NUMBERS[first][0], self._since, _NUMBERS[self.phase][0], until)
        self._since = until

    def _take_over(self) -> float:
        """Begin in `other` and return the time at which it began."""
        numbers, started = self._numbers, self._clock() - seconds_since_start()
        was_running, since, first, until, left, left_seconds = _record(numbers)
        if left:
            numbers[_PLACES[int(left) - 1]] = left_seconds
        began = max(started + (TICK_SECONDS if was_running else 0.0), since)
        if first:
            until = min(began, until)
            self._write(int(first), since, int(was_running), until)
            since = until
        self._write(int(was_running), since, _NUMBERS[TimedPhase.OTHER][0], began)
        return began

    def _write(self, left: int, since: float, running: int, now: float) -> None:
        """Count `since` to `now` for phase `left` and switch to `running`; 0 means no phase."""
        numbers = self._numbers
        self._switches += 1
        at = _RECORDS[self._switches % 2]
        numbers[at] = running
        numbers[at + 1] = now
        numbers[at + 2] = 0
        numbers[at + 4] = left
        if left:
            place = _PLACES[left - 1]
            total = numbers[place] + (now - since)
            numbers[at + 5] = total
            numbers[Word.PHASE_SWITCHES] = self._switches
            numbers[place] = total
        else:
            numbers[Word.PHASE_SWITCHES] = self._switches


def read_phases(numbers: Sequence[float], now: float | None) -> dict[TimedPhase, float]:
    """Return the seconds of each phase in `Block.snapshot`, with the running phase up to `now`.

    With None, the running phase's unfinished time is left out.
    """
    seconds = {phase: numbers[place] for phase, place in zip(_PHASES, _PLACES, strict=True)}
    running, since, first, until, left, left_seconds = _record(numbers)
    if left:
        seconds[_PHASES[int(left) - 1]] = left_seconds
    if running and now is not None:
        now = max(now, since)
        if first:
            seconds[_PHASES[int(first) - 1]] += min(now, until) - since
            since = min(now, until)
        seconds[_PHASES[int(running) - 1]] += now - since
    return seconds


def running_phase(numbers: Sequence[float]) -> tuple[TimedPhase, float] | None:
    """Return a rank's current phase in `Block.snapshot` and its start; None after the rank's end.

    The time is on the machine's monotonic clock.
    """
    running, since, *_ = _record(numbers)
    return (_PHASES[int(running) - 1], since) if running else None


def _record(numbers: Sequence[float]) -> Sequence[float]:
    """Return the valid numbers: running, since, first, until, left, and the seconds of left."""
    at = _RECORDS[int(numbers[Word.PHASE_SWITCHES]) % 2]
    return numbers[at : at + 6]
