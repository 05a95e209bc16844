"""How long a GPU takes for what it is asked, by events that nobody waits for."""

import torch

from finetune_trainer.telemetry.phases import DeviceClock


class CudaClock:
    """The time of the current stream of a GPU."""

    def mark(self) -> torch.cuda.Event:
        """Put an event into the stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        """Return the time between two events that are over."""
        milliseconds: float = earlier.elapsed_time(later)
        return milliseconds / 1000


def device_clock(device: torch.device) -> DeviceClock | None:
    """Return the clock of `device`; None for a CPU, on which the host computes itself."""
    return CudaClock() if device.type == "cuda" else None
