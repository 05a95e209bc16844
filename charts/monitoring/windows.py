"""All time ranges of rules, alerts and dashboards, which can be shortened together."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Windows:
    """Times in seconds.

    Attributes:
        interval: Time between two evaluations of a rule.
        rate: Range of rates; at least four times the scrape interval.
        share: Range of shares of time for occasional work, such as a checkpoint, and of alerts on
            events.
        past: Range over which a job's network is compared with its earlier performance.
        silence: Shortest time without a step that counts as a hang.
        shortly: Duration of a condition that is rarely a false alarm.
        lasting: Duration of a condition that other causes may fulfil for a moment.
        long: Duration of a condition that a start or an evaluation also fulfils.
    """

    interval: float = 30
    rate: float = 300
    share: float = 1800
    past: float = 21_600
    silence: float = 120
    shortly: float = 60
    lasting: float = 300
    long: float = 900

    def divided(self, by: float) -> "Windows":
        """Return all times divided by a number, for tests."""
        return Windows(**{one.name: getattr(self, one.name) / by for one in fields(self)})


def duration(seconds: float) -> str:
    """Return a time in PromQL's form: `5m`, `90s`, `500ms`."""
    for unit, size in (("h", 3600), ("m", 60), ("s", 1)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds * 1000:.0f}ms"


def iso_duration(seconds: float) -> str:
    """Return a time in whole minutes in Azure's form: `PT5M`.

    Raises:
        ValueError: the time is not in whole minutes.
    """
    if seconds % 60:
        raise ValueError(f"{seconds} s are not whole minutes, which Azure's rules need")
    return f"PT{seconds // 60:.0f}M"
