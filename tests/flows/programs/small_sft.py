"""A small supervised run that is cancelled in Prefect after its first step and then goes on; says where to look."""

import json
import sys
from collections.abc import Mapping
from typing import Any

from flows.cli import launch
from flows.orchestration import states as cancellation
from flows.runtime.prepare import prepare

cancellation.ASK_SECONDS = 0.0


def say(**values: object) -> None:
    print("SAID", json.dumps(values), flush=True)


def cancel_in_first_training(event: str, facts: Mapping[str, Any]) -> None:
    """Do what the button in Prefect's pages does, while the first step trains."""
    if (event, facts.get("stage"), facts.get("step")) == ("stage", "training", 0):
        from prefect.client.orchestration import get_client
        from prefect.runtime import flow_run
        from prefect.states import Cancelling

        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, Cancelling(), force=True)


def main(store: str, model: str, data: str) -> None:
    overrides = [
        f"model.path={model}",
        f"data.path={data}",
        "assignment.groups_per_step=4",
        "packing.tokens_per_row=256",
        "packing.updates_per_step=1",
        "engine.url=http://127.0.0.1:9",
    ]
    config = prepare("sft", ["sft_demo"], overrides, name="small", store=store, seed=1, steps=2)
    try:
        launch.run(config, (cancel_in_first_training,))
    except cancellation.RunCancelled as cancelled:
        say(cancelled=str(cancelled))
    found = launch.watch(config, plain=True)
    say(outcome=found, url=launch.begin_prefect(config).url)
    sys.stdin.readline()


main(*sys.argv[1:])
