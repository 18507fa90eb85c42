"""The command deploy: deployments, work pool and automations on a Prefect server."""

from typing import Annotated

from flows.cli.arguments import Count, StoreOption, option


def deploy(
    *,
    pool: Annotated[str, option("work pool; one for each machine or kind of machine")] = "stagecoach",
    slots: Annotated[Count, option("how many runs with an engine or a learner may run at the same time")] = 1,
    file: Annotated[
        str, option("another file of deployments than the one of the program, flows/orchestration/prefect.yaml")
    ] = "",
    store: StoreOption = "",
) -> int:
    """Put deployments, work pool and automations on the Prefect server. Raises DeployRefused, PrefectUnreachable."""
    from flows.orchestration.settings import required_url

    # Prefect is imported when the command is called, not for its help, and only where its settings can be read.
    required_url("nothing was deployed")
    from flows.orchestration.deployments import main

    return main(pool=pool, store=store, slots=slots, file=file)
