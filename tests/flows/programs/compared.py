"""Two small runs that are compared within a flow of an embedded Prefect; says which artifacts it shows then."""

import json
import sys
from pathlib import Path

from flows.orchestration import server as prefect_api
from tests.fixtures.rehearsal import rehearse


def main(directory: Path) -> None:
    rehearse(directory / "store", "base", steps=1)
    store = rehearse(directory / "store", "spread", steps=1, algorithm={"type": "grpo", "normalise_std": True})
    with prefect_api.prefect_api(directory / "prefect"):
        from prefect import flow
        from prefect.client.orchestration import get_client

        from flows.replays.loop import publish_diff

        found = flow(name="compare")(publish_diff)(store, "base", "spread")
        with get_client(sync_client=True) as client:
            shown = {artifact.key: artifact.data for artifact in client.read_artifacts()}
    print("SAID", json.dumps({"found": found, "shown": shown}))


main(Path(sys.argv[1]))
