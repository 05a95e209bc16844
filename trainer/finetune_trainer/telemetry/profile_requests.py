"""Pass requests for a profile from the page of rank 0's node to rank 0."""

from threading import Lock

from finetune_trainer.telemetry.slots import Block, Word


class ProfileRequests:
    """Requests that rank 0 takes. Only one profile is requested or recorded at a time."""

    def __init__(self, block: Block) -> None:
        """Start without a profile; a request that an earlier process did not take stays open."""
        self._numbers = block.numbers
        self._numbers[Word.IS_PROFILING] = 0

    def take(self) -> int:
        """Return the number of steps that were requested since the last call, or 0."""
        asked = self._numbers[Word.PROFILES_ASKED]
        if asked == self._numbers[Word.PROFILES_TAKEN]:
            return 0
        self.begin()
        self._numbers[Word.PROFILES_TAKEN] = asked
        return int(self._numbers[Word.PROFILE_STEPS])

    def begin(self) -> None:
        """Refuse requests until `end`."""
        self._numbers[Word.IS_PROFILING] = 1

    def end(self) -> None:
        """Accept the next request."""
        self._numbers[Word.IS_PROFILING] = 0


_requesting = Lock()  # requests to the page run in threads


def request_profile(block: Block, steps: int) -> bool:
    """Request a profile from rank 0; return False if one is already requested or recorded."""
    numbers = block.numbers
    with _requesting:
        is_open = numbers[Word.PROFILES_ASKED] != numbers[Word.PROFILES_TAKEN]
        if is_open or numbers[Word.IS_PROFILING]:
            return False
        numbers[Word.PROFILE_STEPS] = steps
        numbers[Word.PROFILES_ASKED] += 1
    return True
