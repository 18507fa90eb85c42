"""How full packed rows are, and how fast they are found: `python -m benchmarks.packing`.

Compares best-fit decreasing and rows balanced over ranks with plain first-fit and with padded batches in random order,
on log-normal sample lengths. Prints the tables of packing.md.
"""

import platform
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from statistics import median

import numpy as np

from tasks.packing.bin_packing import Rows, best_fit, estimated_costs, pack

BATCH_SIZE = 8
"""Samples in a padded batch."""
DISTRIBUTIONS = (
    ("mean 600, limit 4096", 600, 0.9, 4096),
    ("mean 3000, limit 32768", 3000, 0.9, 32_768),
    ("hard: mean 2500, limit 4096", 2500, 0.5, 4096),
)


def lengths_of(count: int, mean: float, sigma: float, limit: int) -> list[int]:
    """Return log-normal sample lengths with this mean before they are cut at `limit`."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    numbers: list[int] = np.clip(drawn, 16, limit).astype(int).tolist()
    return numbers


def first_fit(lengths: Sequence[int], capacity: int) -> Rows:
    """Return rows where each sample, as it comes, goes into the first row with room, found by a plain scan."""
    rows: Rows = []
    room: list[int] = []
    for sample, length in enumerate(lengths):
        row = next((i for i, space in enumerate(room) if space >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(sample)
        room[row] -= length
    return rows


def padded(lengths: Sequence[int], capacity: int) -> float:
    """Return the share of real tokens in batches of BATCH_SIZE in random order, padded to the longest of each."""
    order = np.random.default_rng(1).permutation(len(lengths))
    shuffled = np.asarray(lengths)[order]
    cost = sum(batch.max() * len(batch) for batch in np.array_split(shuffled, -(-len(shuffled) // BATCH_SIZE)))
    return float(shuffled.sum() / cost)


def timed(work: Callable[[], Rows], repeats: int) -> tuple[Rows, float]:
    """Return the rows and the median processor seconds it took to find them."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        rows = work()
        seconds.append(time.process_time() - start)
    return rows, median(seconds)


def compare_fill(count: int, distributions: Sequence[tuple[str, int, float, int]], repeats: int) -> None:
    """Print fill and speed of best fit, first fit and padding for `count` samples."""
    for name, mean, sigma, limit in distributions:
        lengths = lengths_of(count, mean, sigma, limit)
        for method, work in (("best-fit decreasing", best_fit), ("first-fit", first_fit)):
            rows, seconds = timed(lambda: work(lengths, limit), repeats if work is best_fit else 1)  # noqa: B023
            fill = sum(lengths) / (len(rows) * limit)
            print(f"| {count:,} | {name} | {method} | {fill:.2%} | {count / seconds:,.0f} | {seconds * 1e3:,.1f} |")
        print(f"| {count:,} | {name} | padded, {BATCH_SIZE} at a time | {padded(lengths, limit):.2%} | | |")


def compare_balance() -> None:
    """Print how long ranks wait for the slowest row of a micro-step, balanced against full rows."""
    for count, num_ranks, mean, limit in ((256, 8, 600, 4096), (2048, 8, 600, 4096), (2048, 64, 3000, 32_768)):
        lengths = lengths_of(count, mean, 0.9, limit)
        costs = estimated_costs(lengths)
        full = best_fit(lengths, limit)
        full += [[] for _ in range(-len(full) % num_ranks)]
        full.sort(key=lambda row: -costs[row].sum())
        balanced, seconds = timed(lambda: pack(lengths, limit, num_ranks), 5)  # noqa: B023
        spans = []
        for rows in (balanced, full):
            by_step = np.array([costs[row].sum() for row in rows]).reshape(-1, num_ranks)
            spans.append(by_step.max(axis=1).sum() * num_ranks / by_step.sum())
        print(f"| {count:,} | {num_ranks} | {limit:,} | {spans[0]:.3f} | {spans[1]:.3f} | {seconds * 1e3:.1f} |")


def main() -> None:
    """Print all tables."""
    print(f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, Python {platform.python_version()}\n")
    print("| samples | lengths | method | fill | samples/s | ms |\n| --- | --- | --- | --- | --- | --- |")
    compare_fill(10_000, DISTRIBUTIONS, repeats=5)
    compare_fill(100_000, DISTRIBUTIONS[:2], repeats=3)  # first-fit takes minutes on the hard one
    print("\n| samples | ranks | limit | balanced | full rows | ms |\n| --- | --- | --- | --- | --- | --- |")
    compare_balance()


if __name__ == "__main__":
    main()
