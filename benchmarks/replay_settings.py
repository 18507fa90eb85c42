"""What another setting over recorded rollouts costs beside sampling: `python -m benchmarks.replay_settings [STORE]`.

Five advantage settings over all recorded steps of the demo, against two steps of its rollouts, both done here and now.
STORE is a store with a finished `stagecoach demo` in it, which is copied; without it a demo is run first, for minutes.
Of the rollouts the last two of four steps count, when engine and environments are up and warm.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from flows.cli.run import run_config
from flows.replays.config import prepare_replay
from flows.replays.loop import loop_replay
from flows.replays.request import ReplayRequest
from flows.runtime.session import open_session
from storage.store import open_store
from tasks.runtime.prefect_task import StageTask
from tasks.runtime.stage import Ref

RUN = "demo"
SETTINGS = (
    ("algorithm.type=rloo",),
    ("algorithm.normalise_std=true",),
    ("algorithm.normalise_std=true", "algorithm.epsilon=1e-3"),
    ("algorithm.normalise_std=true", "algorithm.epsilon=1e-2"),
    ("algorithm.normalise_std=true", "algorithm.epsilon=1e-1"),
)
STAGES = {"advantage": 1, "packing": 2}
"""Where the replays end, and how many stages of each step they do again."""
SAMPLED_STEPS = 2


def main() -> None:
    """Measure both and print a table of ratios."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "store"
        _fill(root, Path(sys.argv[1]) if len(sys.argv) > 1 else None)
        copies = {until: shutil.copytree(root, Path(directory) / until) for until in STAGES}
        sampling, around = _sampling(str(root))
        StageTask.__call__ = _plain  # type: ignore[method-assign]
        # Each in a store of its own, so that one does not find what the other has computed.
        rows = [(until, _seconds(lambda i=until: _replays(str(copies[i]), i))) for until in STAGES]  # type: ignore[misc]
    print(f"\nlast {SAMPLED_STEPS} of {2 * SAMPLED_STEPS} steps of rollouts: {sampling:.2f} s; in all {around:.1f}\n")
    print(f"| {len(SETTINGS)} settings over all steps | seconds | ratio to {SAMPLED_STEPS} steps of rollouts |")
    print("|---|---|---|")
    for until, seconds in rows:
        print(f"| up to {until} | {seconds:.2f} | {seconds / sampling:.2f} |")


def _plain(self: StageTask, step: int, work: Callable[[], Ref], label: str = "", tags: Sequence[str] = ()) -> Ref:
    return work()


def _fill(root: Path, finished: Path | None) -> None:
    if finished is not None:
        shutil.copytree(finished, root)
    else:
        subprocess.run([sys.executable, "-m", "flows.cli", "demo", "--plain", "--store", str(root)], check=True)


def _sampling(store: str) -> tuple[float, float]:
    """Sample steps again under another temperature; return the seconds of the last ones and those of everything."""
    asked = ReplayRequest(
        RUN,
        "rollout",
        "rollout",
        f"0:{2 * SAMPLED_STEPS}",
        ["rollout.temperature=1.01"],
        name="sampled",
        store=store,
        policies="recorded",
    )
    around = _seconds(lambda: run_config(prepare_replay(asked)))
    entries = open_store(store).ledger.entries(run="sampled", stage="rollout")
    spent = [(entry.finished_at - entry.started_at).total_seconds() for entry in entries if not entry.part]
    return sum(spent[-SAMPLED_STEPS:]), around


def _replays(store: str, until: str) -> None:
    """Do a replay for each setting, in one process and without Prefect, as library code would."""
    for number, setting in enumerate(SETTINGS):
        name = f"{until}-{number}"
        asked = ReplayRequest(RUN, "advantage", until, overrides=setting, name=name, store=store)
        with open_session(prepare_replay(asked)) as session:
            outcome = loop_replay(session)
        assert outcome["num_computed"] == STAGES[until] * len(outcome["steps"]), f"{name} found work of another"


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
