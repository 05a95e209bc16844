"""Where a rank's wall time goes: one clock that is always in exactly one phase.

The loop says what it does now; the page of the node adds the phase that runs, up to the moment it
is asked. So the phases of a rank sum to its wall time at any moment, also while it is stuck.

Five numbers of the block say which phase runs, since when, and what the phase before it came to.
They are written beside those in use, and one more switch counted makes them valid: a reader that
saw the same count before and after has not seen half of a switch, and a rank that is stopped in the
middle of one leaves the numbers as they were.

Some time is known to be of another phase only when it has passed: what the device did, what DDP
waited for. A counter cannot take it back; the clock instead counts the next such time for the
phase that was given too little.
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
_RECORDS = (int(Word.EVEN_RUNNING), int(Word.ODD_RUNNING))  # the first of four numbers each
_SWITCHES = int(Word.PHASE_SWITCHES)

Marks = Sequence[tuple[TimedPhase, float, Any]]
"""What the host entered, when, and the device's mark of it."""


class DeviceClock(Protocol):
    """How long a device takes for what it is asked to do, later than the host asks."""

    def mark(self) -> Any:
        """Note the moment at which the device comes to what it is asked next; never wait."""

    def seconds(self, earlier: Any, later: Any) -> float:
        """Return the time between two marks that the device has passed."""


class PhaseClock:
    """The clock of one rank; only its main thread may use it, but for `stop`."""

    def __init__(self, block: Block, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin in `other`, with the start of this process.

        What an earlier process of this rank left running counts up to then: nothing has noted when
        it ended, and the page may have shown as much.
        """
        self._numbers = block.numbers
        self._clock = clock
        self._phase = TimedPhase.OTHER
        self._device: DeviceClock | None = None
        self._marks: list[tuple[TimedPhase, float, Any]] = []
        self._owed: dict[TimedPhase, float] | None = None
        self._has_stopped = False
        self._switches = int(self._numbers[Word.PHASE_SWITCHES])
        self._shown, self._since = self._take_over()

    def enter(self, phase: TimedPhase) -> TimedPhase:
        """Be in `phase` from now on, and return the phase before.

        This comes several times a step, where it must cost next to nothing: hence it is one piece.
        """
        now, before, shown = self._clock(), self._phase, phase
        self._phase = phase
        if self._device is not None:
            self._marks.append((phase, now, self._device.mark()))
        if self._owed is not None:
            seconds = now - self._since
            self._owed[before] += seconds
            self._owed[self._shown] -= seconds
            shown = self._most_owed(phase)
        if self._has_stopped:
            return before
        numbers = self._numbers
        left, place = _NUMBERS[self._shown]
        total = numbers[place] + (now - self._since)
        self._switches = switches = self._switches + 1
        at = _RECORDS[switches & 1]
        numbers[at] = _NUMBERS[shown][0]
        numbers[at + 1] = now
        numbers[at + 2] = left
        numbers[at + 3] = total
        numbers[_SWITCHES] = switches
        numbers[place] = total
        self._shown, self._since = shown, now
        return before

    @property
    def phase(self) -> TimedPhase:
        """The phase that this rank is in."""
        return self._phase

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
            self._marks = [(self._phase, self._clock(), device.mark())]

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
            self._write(_NUMBERS[self._shown][0], self._since, 0, self._clock())

    def _correct(self, wrong: dict[TimedPhase, float]) -> None:
        if self._owed is None:
            self._owed = dict.fromkeys(_PHASES, 0.0)
        for phase, seconds in wrong.items():
            self._owed[phase] += seconds

    def _most_owed(self, phase: TimedPhase) -> TimedPhase:
        """Return the phase to count for during `phase`: itself, unless it was given too much."""
        owed = self._owed
        if owed is None or owed[phase] >= 0:
            return phase
        most = max(owed, key=owed.__getitem__)
        return most if owed[most] > 0 else phase

    def _take_over(self) -> tuple[TimedPhase, float]:
        numbers, started = self._numbers, self._clock() - seconds_since_start()
        was_running, since, left, left_seconds = _record(numbers)
        if left:
            numbers[_PLACES[int(left) - 1]] = left_seconds
        began = max(started + (TICK_SECONDS if was_running else 0.0), since)
        self._write(int(was_running), since, _NUMBERS[TimedPhase.OTHER][0], began)
        return TimedPhase.OTHER, began

    def _write(self, left: int, since: float, running: int, now: float) -> None:
        """Count from `since` to `now` for `left`, and let `running` run; 0 is no phase."""
        numbers = self._numbers
        self._switches += 1
        at = _RECORDS[self._switches % 2]
        numbers[at] = running
        numbers[at + 1] = now
        numbers[at + 2] = left
        if left:
            place = _PLACES[left - 1]
            total = numbers[place] + (now - since)
            numbers[at + 3] = total
            numbers[Word.PHASE_SWITCHES] = self._switches
            numbers[place] = total
        else:
            numbers[Word.PHASE_SWITCHES] = self._switches


def read_phases(numbers: Sequence[float], now: float | None) -> dict[TimedPhase, float]:
    """Return the seconds of each phase in `Block.snapshot`, with the one that runs up to `now`.

    None leaves out what no switch has counted yet.
    """
    seconds = {phase: numbers[place] for phase, place in zip(_PHASES, _PLACES, strict=True)}
    running, since, left, left_seconds = _record(numbers)
    if left:
        seconds[_PHASES[int(left) - 1]] = left_seconds
    if running and now is not None:
        seconds[_PHASES[int(running) - 1]] += max(0.0, now - since)
    return seconds


def running_phase(numbers: Sequence[float]) -> tuple[TimedPhase, float] | None:
    """Return the phase that runs in `Block.snapshot`, and since when; None where none does.

    The time is of the machine's monotonic clock.
    """
    running, since, _, _ = _record(numbers)
    return (_PHASES[int(running) - 1], since) if running else None


def _record(numbers: Sequence[float]) -> tuple[float, float, float, float]:
    at = _RECORDS[int(numbers[Word.PHASE_SWITCHES]) % 2]
    return numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3]
