"""What the device makes of one large matrix product: DEVICE SIZE; prints FLOP/s as JSON."""

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

ROUNDS, PRODUCTS = 5, 20


def seconds_on(device: str, work: Callable[[], object]) -> float:
    """Return the device's time for `work`."""
    if device == "cpu":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last) / 1000)


def measure(device: str, size: int) -> float:
    """Return the median FLOP/s over the rounds, warmed up."""
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def work() -> None:
        for _ in range(PRODUCTS):
            one @ other

    work()
    seconds = statistics.median(seconds_on(device, work) for _ in range(ROUNDS))
    return 2 * size**3 * PRODUCTS / seconds


if __name__ == "__main__":
    print(json.dumps({"flops_per_second": measure(sys.argv[1], int(sys.argv[2]))}))
