"""Launch: start a flow from the command line, with everything that must live as long as it."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from configs.run import RunConfig
from flows import prefect_api
from flows.prepare import prepare
from flows.rooms import EngineRoom
from flows.session import Session, Watcher, log_directory, open_session, recorded


def launch(kind: str, files: Sequence[str], overrides: Sequence[str], watchers: tuple[Watcher, ...], **settings: Any) -> Any:
    """Resolve the config and run the flow of `kind`; return what the flow returns.

    `settings` are name, store, seed, steps, and for an evaluation policy. Raises ConfigError and what flows raise.
    """
    policy = settings.pop("policy", "") or ""
    return run(prepare(kind, files, overrides, policy=policy, **settings), watchers, policy=policy)


def run(
    config: RunConfig, watchers: tuple[Watcher, ...] = (), policy: str = "", engine: EngineRoom | None = None
) -> Any:
    """Run the flow of a resolved config: services and Prefect side by side, then the flow; or nothing at all.

    Work that is all in the ledger needs neither Prefect nor services; the watchers are told so.
    """
    with open_session(config, watchers, engine, policy) as session:
        missing = session.missing()
        session.tell("plan", missing=missing)
        if not missing:
            return _found(session)
        api = prefect_api.begin(log_directory(config).parent / "prefect", config.prefect.startup_seconds)
        session.begin(missing)
        with prefect_api.termination_reported():
            session.tell("prefect", url=api.wait().ui_url)
            return _call(session, policy)


def _found(session: Session) -> Any:
    with recorded(session):
        found = import_module(f"flows.{session.config.kind}").run(session)
        return found if isinstance(found, dict) else found.to_json()


def _call(session: Session, policy: str) -> Any:
    from prefect import tags

    config = session.config
    flow = getattr(import_module(f"flows.{config.kind}"), config.kind)
    last = {"policy": policy} if config.kind == "evaluate" else {"steps": config.steps}
    with tags(*prefect_api.run_tags(config.name)):
        return flow(name=config.name, store=config.store, seed=config.seed, **last)
