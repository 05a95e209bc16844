"""TensorBoard events of rank 0, through tensorboard's own writer.

`torch.utils.tensorboard` would cost two seconds of imports for the same file.
"""

from collections.abc import Callable
from pathlib import Path


class TensorBoardWriter:
    """Scalars of one attempt, in a new event file beside those from earlier attempts."""

    def __init__(self, folder: Path, *, clock: Callable[[], float]) -> None:
        """Open an event file in `folder`, the argument of `tensorboard --logdir`."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._clock = clock
        self._writer = EventFileWriter(str(folder))

    def purge(self, step: int) -> None:
        """Hide points of an earlier attempt from `step` on; this attempt computes them again."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=self._clock(), step=step, session_log=start))

    def scalars(self, step: int, values: dict[str, float | None]) -> None:
        """Write the values that are not None, by tag."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(
            value=[
                Summary.Value(tag=tag, simple_value=value)
                for tag, value in values.items()
                if value is not None
            ]
        )
        self._writer.add_event(Event(wall_time=self._clock(), step=step, summary=summary))

    def close(self) -> None:
        """Write queued events and end the writer's thread."""
        self._writer.close()
