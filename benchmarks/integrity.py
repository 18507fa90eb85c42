"""What the checks of integrity cost: `python -m benchmarks.integrity`; figures in integrity.md.

Four things are done with the checks and without, in turn, and what is compared is processor time, of all threads and
in user and system mode, so that a busy machine changes little: a finished run of 20 small steps is called again, its
steps are replayed up to packing, its first weights are evaluated, and a policy of 1 GiB, weights and optimizer state,
is read into memory. The checks are digests of commits and heads of the logs, the newest commit by its head, and digests
of weights. Digests of rows are older than these and stay in both.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from storage.delta import log
from storage.policies import manifest
from storage.store import open_store
from tests.fixtures import evaluations
from tests.fixtures.rehearsal import play_stages, rehearse
from tests.fixtures.replays import RLOO, ask, walk

STEPS = 20
EVALUATION, EVALUATIONS = {"num_examples": evaluations.HELD_OUT, "attempts": 4}, 5
ROUNDS = {"resume": 21, "replay": 21, "evaluate": 21, "load": 7}
"""How many times each is done with the checks and without."""
FILES = {"model.safetensors": 2**28, "optimizer.safetensors": 3 * 2**28}
"""Bytes of a policy."""


@contextmanager
def unchecked() -> Iterator[None]:
    """Within the block, nothing is sealed or checked that this benchmark is about."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "commit_problem", lambda data: "")
        patch.setattr(log, "seal", lambda text: text.encode())
        patch.setattr(log, "head_path", lambda table: "")
        checks = manifest.check_files
        patch.setattr("storage.policies.store.check_files", lambda place, files, verify: checks(place, files, False))
        yield


def finished_run(place: Path) -> Path:
    """Make a store with a finished run of small steps."""
    with play_stages():
        rehearse(place, "base", steps=STEPS)
    return place


def run_with_held_out(place: Path) -> Path:
    """Make a store with a finished run of small steps whose environment has held-out examples."""
    evaluations.train(place, "base", evaluations.Sampler(), steps=STEPS)
    return place


def policy(place: Path) -> Path:
    """Make a store with one policy."""
    store = open_store(place)
    scratch = store.policies.scratch("k")
    for name, size in FILES.items():
        save_file({f"{number}": torch.rand(size // 4 // 16) for number in range(16)}, scratch / name)
    store.policies.publish(scratch, "k")
    return place


def resume(place: Path) -> None:
    """Go through the run once more, which finds all that it asks for."""
    with play_stages():
        rehearse(place, "base", steps=STEPS)


def replay(place: Path) -> None:
    """Compute advantage and packing of all steps by another algorithm."""
    walk(ask(place, overrides=(RLOO,), name="other"))


def evaluate(place: Path) -> None:
    """Evaluate the first weights on held-out examples, with other seeds each time."""
    for seed in range(EVALUATIONS):
        evaluations.evaluate(place, f"evaluated-{seed}", evaluations.Sampler(), evaluation=EVALUATION, seed=seed)


def load(place: Path) -> None:
    """Read weights and optimizer state into memory, as the first of a process that asks for them."""
    manifest._hashed.clear()
    directory = open_store(place).policies.directory("k")
    for name in FILES:
        for tensor in load_file(directory / name).values():
            tensor.clone()  # the file is mapped, and read only now


def seconds(work: Callable[[Path], None], original: Path) -> float:
    """Do work in a copy of a store and return its processor time; large files are linked, not copied."""
    with tempfile.TemporaryDirectory(dir=original.parent) as scratch:
        place = Path(shutil.copytree(original, Path(scratch) / "store", copy_function=link_large))
        begun = time.process_time()
        work(place)
        return time.process_time() - begun


def link_large(source: str, target: str) -> None:
    """Copy a small file, link a large one."""
    link = Path(source).stat().st_size > 2**20
    Path(target).hardlink_to(source) if link else shutil.copy2(source, target)


def main() -> None:
    """Do all in turn and print a table of ratios."""
    with tempfile.TemporaryDirectory() as directory:
        run, weights = finished_run(Path(directory, "run")), policy(Path(directory, "weights"))
        held_out = run_with_held_out(Path(directory, "held-out"))
        print("| | with, s | without, s | median of ratios | middle half of them | rounds |\n|---|---|---|---|---|---|")
        for work, place in ((resume, run), (replay, run), (evaluate, held_out), (load, weights)):
            spent: dict[bool, list[float]] = {True: [], False: []}
            for number in range(ROUNDS[work.__name__] + 1):
                for checked in (True, False) if number % 2 else (False, True):
                    with nullcontext() if checked else unchecked():
                        spent[checked].append(seconds(work, place))
            pairs = list(zip(spent[True], spent[False], strict=True))[1:]  # the first is of cold imports
            low, middle, high = statistics.quantiles((one / other for one, other in pairs), n=4)
            one, other = (statistics.median(each) for each in zip(*pairs, strict=True))
            print(
                f"| {work.__name__} | {one:.3f} | {other:.3f} | {middle:.2f} | {low:.2f} to {high:.2f} | {len(pairs)} |"
            )


if __name__ == "__main__":
    main()
