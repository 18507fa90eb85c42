"""Commands that exchange rollouts and weights with other programs: import, export."""

from pathlib import Path
from typing import Annotated, Literal

from flows.cli.arguments import Name, StoreOption, UsageError, named_policy, option, split_items


def import_rollouts(
    *items: Annotated[str, option("FILES of rollouts, and OVERRIDES; see below", "FILE... [OVERRIDES]")],
    model: Annotated[str, option("model whose tokenizer is used for texts", "DIR")] = "",
    environment: Annotated[str, option("the environment of all rollouts", "NAME")] = "",
    skip_bad: Annotated[bool, option("leave out lines that cannot be imported")] = False,
    held_out: Annotated[bool, option("import attempts at held-out examples too, to train on them")] = False,
    name: Name = "",
    store: StoreOption = "",
) -> int | None:
    """Import rollouts of other programs as a run."""
    from flows.exchange.imports import ImportRequest, import_files, outcome_lines

    files, overrides = split_items(items)
    if not files:
        raise UsageError("import needs a file: stagecoach import traces.jsonl --name RUN")
    paths = [Path(file) for file in files]
    request = ImportRequest(paths, overrides, name, store, model, environment, skip_bad=skip_bad, held_out=held_out)
    print("\n".join(outcome_lines(import_files(request))))
    return 0


def export_rollouts(
    run: Annotated[str, option("the run, with the rewards and verdicts that rollouts have there", "RUN")] = "",
    /,
    *,
    form: Annotated[Literal["verifiers", "sft", "weights"], option("what to write", name="--format")],
    target: Annotated[str, option("a file; for weights a directory", "PATH", name="--to")],
    where: Annotated[
        str, option('condition in SQL over the columns of rollouts: "keep and reward > 0.9"', allow_leading_hyphen=True)
    ] = "",
    held_out: Annotated[bool, option("also attempts at held-out examples")] = False,
    quarantined: Annotated[bool, option("also rollouts in quarantine")] = False,
    policy: Annotated[str, option("the policy, RUN:VERSION or its KEY; without it, the run's last", "RUN:V")] = "",
    force: Annotated[bool, option("replace the file, or the directory of weights, at PATH")] = False,
    store: StoreOption = "",
) -> int | None:
    """Export rollouts or weights. Raises UsageError for an option of the other one, and what `export` raises."""
    from configs.store import default_store
    from flows.exchange.export import RolloutChoice, export

    if not run and not (form == "weights" and policy):
        raise UsageError("export needs a RUN or, for weights, a policy (--policy)")
    if policy and form != "weights":
        raise UsageError("--policy chooses weights: give it with --format weights")
    if form == "weights" and (where or held_out or quarantined):
        raise UsageError("--where, --held-out and --quarantined choose rollouts: weights are exported without them")
    choice = RolloutChoice(run, where, held_out, quarantined)
    written = export(
        form, Path(target).expanduser(), choice, named_policy(store, policy), store or default_store(), force
    )
    noun = {"verifiers": "episodes", "sft": "samples", "weights": "files"}[form]
    print(f"{Path(target).expanduser()}: {written.number} {noun}")
    if written.num_quarantined:
        print(f"left out: {written.num_quarantined} rollouts in quarantine (--quarantined keeps them)")
    return 0
