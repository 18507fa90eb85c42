"""A training run whose store is in S3: `python -m tests.storage.s3.training_run DIRECTORY URL MODEL NAME KILL`.

The run of `tests.fixtures.dying_run`, without Prefect: everything is real but the sampling. It dies at the moment KILL,
if that is not empty, and writes what it made to `DIRECTORY/outcome.json`.
"""

import json
import sys
from pathlib import Path

from flows.runtime.prepare import prepare
from tests.fixtures.driving import SETTINGS
from tests.fixtures.dying_run import Moments, kill_self, replace_sampling, without_prefect


def main(directory: Path, url: str, model: str, name: str, kill: str) -> None:
    """Run, or go on with, the run."""
    moments = Moments(directory, {kill: kill_self})
    moments.watch()
    replace_sampling(directory, moments, backwards=False)
    config = prepare("train", ["demo"], [*SETTINGS, f"model.path={model}"], name=name, store=url)
    (directory / "outcome.json").write_text(json.dumps(without_prefect(config)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
