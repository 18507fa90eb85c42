"""Commands that correct what is in a store and keep it in order: quarantine, repair, maintain, gc."""

from typing import Annotated

from flows.cli.arguments import Count, DryRun, Json, Number, StoreOption, UsageError, option

Runs = tuple[str, ...]
TrustLedger = Annotated[bool, option("delete also where runs or files contradict the ledger")]


def quarantine(
    *,
    where: Annotated[
        str, option('condition in SQL over the columns of rollouts: "reward > 0.9"', allow_leading_hyphen=True)
    ] = "",
    reason: Annotated[str, option("why they are unfit; the verdicts of a replay contain it")] = "",
    run: Annotated[str, option("only the rollouts of this run")] = "",
    dry_run: Annotated[bool, option("print what would be marked; record nothing")] = False,
    listing: Annotated[bool, option("list the recorded quarantines", name="--list")] = False,
    store: StoreOption = "",
    as_json: Json = False,
) -> int | None:
    """Mark rollouts that turned out to be unfit for training.

    Every batch, step and policy that used them is listed.
    """
    from flows.cli.quarantine import quarantine

    if not listing and not (where.strip() and (reason.strip() or dry_run)):
        raise UsageError("say which rollouts (--where) and why (--reason); --list shows what was marked before")
    return quarantine(where, reason, run, store, dry_run=dry_run, listing=listing, as_json=as_json)


def repair(
    *,
    deep: Annotated[bool, option("read every file and compare its digest")] = False,
    forget: Annotated[bool, option("forget damaged work that can be computed again")] = False,
    trust_ledger: TrustLedger = False,
    dry_run: DryRun = False,
    store: StoreOption = "",
    as_json: Json = False,
) -> int | None:
    """Find damage, repair logs, list work that can be computed again."""
    from flows.cli.maintenance import repair_store

    return repair_store(
        store=store, deep=deep, forget_damaged=forget, trust_ledger=trust_ledger, dry_run=dry_run, as_json=as_json
    )


def maintain(
    *,
    retention_hours: Annotated[Number, option("delete unused files that are older than this")] = 168.0,
    retain: Annotated[Runs, option("drop rows of a table that are older than this", "TABLE=30d")] = (),
    force: Annotated[bool, option("drop rows also from tables that later stages read")] = False,
    trust_ledger: TrustLedger = False,
    dry_run: DryRun = False,
    store: StoreOption = "",
    as_json: Json = False,
) -> int | None:
    """Compact tables and delete unused files."""
    from flows.cli.maintenance import maintain_store

    return maintain_store(
        store=store,
        retention_hours=retention_hours,
        retain=retain,
        force=force,
        trust_ledger=trust_ledger,
        dry_run=dry_run,
        as_json=as_json,
    )


def gc(
    *,
    keep: Annotated[Runs, option("keep this run, remove all others", "RUN")] = (),
    keep_last: Annotated[Count, option("keep the N newest runs as well", "N")] = 0,
    remove: Annotated[Runs, option("remove this run, keep all others", "RUN")] = (),
    force: Annotated[Runs, option("remove this run even if it is not finished", "RUN")] = (),
    policies: Annotated[str, option("weights that kept runs keep: all, last:N, or every:N and the last")] = "all",
    trust_ledger: TrustLedger = False,
    yes: Annotated[bool, option("do not ask")] = False,
    dry_run: DryRun = False,
    store: StoreOption = "",
    as_json: Json = False,
) -> int | None:
    """Remove whole runs; what a kept run needs stays."""
    from flows.cli.maintenance import collect_garbage

    return collect_garbage(
        store=store,
        keep=keep,
        keep_last=keep_last,
        remove=remove,
        force=force,
        policies=policies,
        trust_ledger=trust_ledger,
        yes=yes,
        dry_run=dry_run,
        as_json=as_json,
    )
