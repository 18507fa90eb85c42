"""Samples a group in a process of its own, and says which packages that took and how the rollouts ended."""

import json
import sys

import pyarrow as pa

from configs.run import RunConfig, View
from tasks.inference.sampling import rollouts
from tests.tasks.inference.hosts import KEY, assigned


def main() -> None:
    """Read what to sample from standard input, as JSON; print names of imported packages and error classes."""
    told = json.loads(sys.stdin.read())
    with pa.OSFile(told["examples"]) as source:
        examples = pa.ipc.open_file(source).read_all()
    config = RunConfig.model_validate(told["config"])
    name = config.environments[0].name
    ended: list[str | None] = []
    rollouts.sample(
        assigned(name, examples["example_id"].to_pylist()[:1], 2),
        examples,
        engine_url=told["engine"],
        api_key=KEY,
        addresses={name: told["address"]},
        policy={"key": "policy", "version": 0},
        step=0,
        config=View(config, ("rollout", "environments", "engine", "model"), "rollout"),
        on_group=lambda _, tables: ended.extend(tables["traces"]["error_class"].to_pylist()),
    )
    print(json.dumps({"packages": sorted({each.partition(".")[0] for each in sys.modules}), "ended": ended}))


if __name__ == "__main__":
    main()
