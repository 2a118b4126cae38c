"""Times of functions, interleaved, and costs of compiled programs."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from tests.helpers import instructions


class Ratio(NamedTuple):
    """Median, first and last decile."""

    median: float
    low: float
    high: float

    def __str__(self):
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


# Of all threads of this process: what else runs on the machine does not count.
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
clock = "cpu"
LIMIT = 0.3  # seconds that a round may take, on average


def _seconds(fn: Callable, calls: int) -> float:
    now = CLOCKS[clock]
    start = now()
    for _ in range(calls):
        out = fn()
    # A call may return before its arrays are there.
    jax.block_until_ready(out)
    return (now() - start) / calls


def interleaved(
    fns: Sequence[Callable], repeats: int, sample: float = 4e-3, collect: bool = False
) -> list[list[float]]:
    """For each function, the seconds of a call in each round. A round runs all of them,
    in an order that changes, and each as often as fills `sample` seconds. After two
    rounds, none begins when they took `LIMIT` for each of `repeats`. Without garbage
    collection, as in `timeit`; `collect` cleans up between the rounds."""
    fns = list(fns)
    for fn in dict.fromkeys(fns):
        _seconds(fn, 1)  # compiles it
    once = _seconds(fns[-1], 1)
    if once < sample:
        once = min(_seconds(fn, 2) for _ in range(3))
    calls = max(1, round(sample / once))
    times = [[] for _ in fns]
    gc.collect()
    gc.disable()
    start = CLOCKS[clock]()
    for i in range(repeats):
        if i >= 2 and CLOCKS[clock]() - start > LIMIT * repeats:
            break
        order = [(i + k) % len(fns) for k in range(len(fns))]
        for k in order[:: 1 if i // len(fns) % 2 else -1]:
            times[k].append(_seconds(fns[k], calls))
        if collect:
            gc.collect()
    gc.enable()
    return times


def ratio(times: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Of the pairs, one from each round."""
    ratios = sorted(a / b for a, b in zip(times, baseline))
    tenth = len(ratios) // 10
    return Ratio(statistics.median(ratios), ratios[tenth], ratios[-1 - tenth])


class Comparison(NamedTuple):
    ratio: Ratio
    itself: Ratio  # the baseline to itself: what this machine can tell apart
    seconds: float
    rounds: int


def compare(fn: Callable, baseline: Callable, *how) -> Comparison:
    # Whatever runs twice in a row finds its data in the processor's cache.
    fns = [fn, baseline, fn, baseline]
    a, b, c, d = interleaved(fns, *how)
    both = [statistics.mean(pair) for pair in zip(a, c)]
    baselines = [statistics.mean(pair) for pair in zip(b, d)]
    seconds = statistics.median(both)
    return Comparison(ratio(both, baselines), ratio(d, b), seconds, len(both))


class Costs(NamedTuple):
    flops: float
    bytes: float
    temporaries: int
    memory: int  # temporaries and outputs
    instructions: int


def costs(compiled: Any) -> Costs:
    """What XLA says about a compiled program."""
    analysis, memory = compiled.cost_analysis(), compiled.memory_analysis()
    temporaries = memory.temp_size_in_bytes
    return Costs(
        analysis.get("flops", 0.0),
        analysis.get("bytes accessed", 0.0),
        temporaries,
        temporaries + memory.output_size_in_bytes,
        sum(instructions(compiled.as_text()).values()),
    )
