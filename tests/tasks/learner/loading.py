"""The memory of ranks that load: `python -m torch.distributed.run ... -m tests.tasks.learner.loading MODEL A FILE`."""

import json
import sys
from pathlib import Path
from threading import Event, Thread

from tasks.learner import model as model_module
from tasks.learner.distributed import end_rank, start_world
from tests.fixtures.policies import policy_of


def taken():
    """Return the bytes of this process's own memory; pages of files do not count."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def peak_of(action):
    """Return by how many bytes this process's memory grew at most during an action."""
    done, before, sizes = Event(), taken(), []

    def watch():
        while not done.wait(0.001):
            sizes.append(taken())

    watcher = Thread(target=watch)
    watcher.start()
    action()
    done.set()
    watcher.join()
    return max(sizes) - before


def main(model, small, out):
    """Write by how much each rank's memory grew."""
    world = start_world()
    model_module.prove = lambda *_: {}  # which takes what a short training step takes
    policy_of(small, dtype="float32")  # imports, and buffers of the ranks' connections
    grown = peak_of(lambda: policy_of(model, dtype="float32"))
    out.with_suffix(f".{world.rank}").write_text(json.dumps(grown) + "\n")
    end_rank()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
