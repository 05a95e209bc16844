"""Where a rank's wall time goes: one clock that is always in exactly one phase.

The loop says what it does now; the page of the node adds the phase that runs, up to the moment it
is asked. So the phases of a rank sum to its wall time at any moment, also while it is stuck.

Six numbers of the block say which phase runs, since when, and what the phase before it came to.
They are written beside those in use, and one more switch counted makes them valid: a reader that
saw the same count before and after has not seen half of a switch, and a rank that is stopped in the
middle of one leaves the numbers as they were.

Some time is known to be of another phase only when it has passed: what the device did, what DDP
waited for. A counter cannot take it back; instead the next such time counts, so long as it was too
much, for the phase that was given too little.
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
_RECORDS = (int(Word.EVEN_RUNNING), int(Word.ODD_RUNNING))  # the first of six numbers each
_SWITCHES = int(Word.PHASE_SWITCHES)
_TOO_LITTLE = 1e-6  # seconds that are not worth paying back

Marks = Sequence[tuple[TimedPhase, float, Any]]
"""What the host entered, when, and the device's mark of it."""


class DeviceClock(Protocol):
    """How long a device takes for what it is asked to do, later than the host asks."""

    def mark(self) -> Any:
        """Note the moment at which the device comes to what it is asked next; never wait."""

    def seconds(self, earlier: Any, later: Any) -> float:
        """Return the time between two marks that the device has passed."""


class PhaseClock:
    """The clock of one rank; only its main thread may use it, but for `stop`.

    Attributes:
        phase: the phase that this rank is in; `enter` sets it.
    """

    def __init__(self, block: Block, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin in `other`, with the start of this process.

        What an earlier process of this rank left running counts up to then: nothing has noted when
        it ended, and the page may have shown as much.
        """
        self._numbers = block.numbers
        self._clock = clock
        self.phase = TimedPhase.OTHER
        self._device: DeviceClock | None = None
        self._marks: list[tuple[TimedPhase, float, Any]] = []
        self._owed = dict.fromkeys(_PHASES, 0.0)
        self._overpaid: set[TimedPhase] = set()  # were given more than `_TOO_LITTLE` too much
        self._has_stopped = False
        self._switches = int(self._numbers[Word.PHASE_SWITCHES])
        self._first: TimedPhase | None = None  # what the phase that runs counts for, until then
        self._until = 0.0
        self._since = self._take_over()

    def enter(self, phase: TimedPhase) -> TimedPhase:
        """Be in `phase` from now on, and return the phase before.

        This comes several times a step, where it must cost next to nothing: hence it is one piece.
        """
        now, before, first = self._clock(), self.phase, 0
        if self._device is not None:
            self._marks.append((phase, now, self._device.mark()))
        if self._has_stopped:
            return before
        if self._first is not None:
            self._pay_back(now)
        if phase in self._overpaid:
            first = self._borrow(phase, now)
        numbers = self._numbers
        left, place = _NUMBERS[before]
        total = numbers[place] + (now - self._since)
        self._switches = switches = self._switches + 1
        at = _RECORDS[switches & 1]
        numbers[at] = _NUMBERS[phase][0]
        numbers[at + 1] = now
        numbers[at + 2] = first
        numbers[at + 3] = self._until
        numbers[at + 4] = left
        numbers[at + 5] = total
        numbers[_SWITCHES] = switches
        numbers[place] = total
        self.phase, self._since = phase, now
        return before

    @contextmanager
    def within(self, phase: TimedPhase) -> Iterator[None]:
        """Be in `phase` meanwhile."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def spent(self, phase: TimedPhase) -> float:
        """Return what was counted for `phase` up to the last switch, by earlier processes too."""
        return self._numbers[_NUMBERS[phase][1]]

    def now(self) -> float:
        """Return the time by which phases are counted, in seconds."""
        return self._clock()

    def move(self, source: TimedPhase, target: TimedPhase, seconds: float) -> None:
        """Say that so much of what was counted for `source` was of `target`."""
        self._correct({source: -seconds, target: seconds})

    def follow(self, device: DeviceClock | None) -> None:
        """Go by what `device` does from now on; None goes by the host again."""
        self._device, self._marks = device, []
        if device is not None:
            self._marks = [(self.phase, self._clock(), device.mark())]

    def take_marks(self) -> Marks:
        """Return the marks up to now, for `count`; nothing where the host's time counts."""
        marks, self._marks = self._marks, self._marks[-1:]
        return marks

    def count(self, marks: Marks) -> None:
        """Go by the device in what lies between `marks`, all of which it has passed."""
        if self._device is None or len(marks) < 2:
            return
        wrong = dict.fromkeys(_PHASES, 0.0)
        for (phase, began, earlier), (_, ended, later) in pairwise(marks):
            wrong[phase] += self._device.seconds(earlier, later) - (ended - began)
        self._correct(wrong)

    def stop(self) -> None:
        """End the last phase; what comes later is not counted."""
        if not self._has_stopped:
            self._has_stopped = True
            now = self._clock()
            self._pay_back(now)
            self._write(_NUMBERS[self.phase][0], self._since, 0, now)

    def _correct(self, wrong: dict[TimedPhase, float]) -> None:
        for phase, seconds in wrong.items():
            self._owe(phase, seconds)

    def _owe(self, phase: TimedPhase, seconds: float) -> None:
        owed = self._owed[phase] = self._owed[phase] + seconds
        if owed < -_TOO_LITTLE:
            self._overpaid.add(phase)
        else:
            self._overpaid.discard(phase)

    def _borrow(self, phase: TimedPhase, now: float) -> int:
        """Let the first seconds of `phase`, which was given too much, count for what is owed most.

        Return the number of that phase; 0 where `phase` counts for itself.
        """
        owed = self._owed
        most = max(owed, key=owed.__getitem__)
        if owed[most] < _TOO_LITTLE:
            return 0
        self._first, self._until = most, now + min(owed[most], -owed[phase])
        return _NUMBERS[most][0]

    def _pay_back(self, now: float) -> None:
        """Count what the phase that runs has had for another until `now`."""
        first, self._first = self._first, None
        if first is None:
            return
        until = min(now, self._until)
        self._owe(first, self._since - until)
        self._owe(self.phase, until - self._since)
        self._write(_NUMBERS[first][0], self._since, _NUMBERS[self.phase][0], until)
        self._since = until

    def _take_over(self) -> float:
        """Begin in `other`; return when that was."""
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
        """Count from `since` to `now` for `left`, and let `running` run; 0 is no phase."""
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
    """Return the seconds of each phase in `Block.snapshot`, with the one that runs up to `now`.

    None leaves out what no switch has counted yet.
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
    """Return the phase that a rank is in, by `Block.snapshot`, and since when; None after its end.

    The time is of the machine's monotonic clock.
    """
    running, since, *_ = _record(numbers)
    return (_PHASES[int(running) - 1], since) if running else None


def _record(numbers: Sequence[float]) -> Sequence[float]:
    """Return what is valid: running, since, first, until, left, and seconds of that."""
    at = _RECORDS[int(numbers[Word.PHASE_SWITCHES]) % 2]
    return numbers[at : at + 6]
