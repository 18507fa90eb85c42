"""The command verify: one page of proof that the records of a store or a run are what they say."""

from pathlib import Path
from typing import Annotated, Any

from configs.store import default_store
from flows.cli.arguments import Json, StoreOption, option
from flows.cli.output import print_report
from flows.reporting.formats import one_line, say

MAX_LINE = 400


def verify(
    target: Annotated[str, option("a store, or a run of the store; all of it without", "STORE|RUN")] = "",
    /,
    *,
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Print what is proven; return 1 if something is wrong, else 0. Raises LayoutError, NotThere for an unknown run."""
    from flows.queries.proof import prove
    from flows.queries.store_reader import StoreReader
    from storage.maintenance.repair import inspect_logs
    from storage.roots import open_root

    is_store = "/" in target or Path(target).is_dir()
    address = (target if target and is_store else store) or default_store()
    run = "" if is_store else target
    if damages := inspect_logs(open_root(address)):
        checks = [{"check": "logs", "wrong": len(damages), "first_wrong": f"{damages[0].table}: {damages[0].what[0]}"}]
    else:
        checks = prove(StoreReader.at(address), run)
    is_wrong = any(check["wrong"] for check in checks)
    is_proven = not is_wrong and not any(check["unproven"] for check in checks)
    if as_json:
        print_report({"store": address, "run": run, "wrong": is_wrong, "proven": is_proven, "checks": checks}, True)
    else:
        for check in checks:
            say(one_line(_line(check), MAX_LINE))
        say("WRONG" if is_wrong else "proven" if is_proven else "nothing is wrong; not all of it is proven")
    return int(is_wrong)


def _line(check: dict[str, Any]) -> str:
    """Return a check as a line: its counts, the first counter-example, the first reason of no proof, its claim."""
    counts = [f"{check[kind]:,} {kind}" for kind in ("proven", "wrong", "unproven") if check.get(kind)]
    texts = [f"{check[name]}; " for name in ("first_wrong", "why_unproven") if check.get(name)]
    return f"{check['check']}: {', '.join(counts) or 'nothing to check'}; {''.join(texts)}{check.get('claim', '')}"
