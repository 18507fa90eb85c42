"""The report of a mutation run: shares by module and group, and every mutant that survived, with the reason why."""

from collections import Counter
from dataclasses import dataclass

ENOUGH = 0.98
"""Share of the mutants of each group that must be killed, of those that change anything."""
GROUPS = ("advantage", "masks", "packing", "loss", "evaluation")
PARTS = {
    "tasks.advantage": "advantage",
    "tasks.advantage.algorithms.echo": "masks",
    "tasks.arrays": "packing",
    "tasks.arrays.finding": "masks",
    "tasks.arrays.parse_errors": "masks",
    "tasks.evaluation": "evaluation",
    "tasks.filtering": "masks",
    "tasks.learner": "loss",
    "tasks.packing": "packing",
}
"""The group of each module, or of all below a package; the longest name decides."""


@dataclass(frozen=True)
class Survivor:
    """A mutant that no test noticed."""

    module: str
    function: str
    removed: str
    added: str
    reason: str
    """Why it changes nothing that a test could see; empty where that is not so."""


def module_of(mutant):
    """Return the module of a mutant, by its name `package.module.x_function__mutmut_1`."""
    return mutant.partition(".x")[0]


def group_of(module):
    """Return the group that a module is of."""
    return PARTS[max((part for part in PARTS if f"{module}.".startswith(f"{part}.")), key=len)]


def killed(counts):
    """Return how many mutants made a test fail, or a loop endless."""
    return counts["killed"] + counts["timeout"]


def page(counts, survivors, made, unchecked):
    """Return the report as Markdown, and whether enough mutants were killed in every group.

    `made` says when and where, and `unchecked` how many more mutants there are that were not run.
    """
    same = Counter(each.module for each in survivors if each.reason)
    every = {module: count + Counter(same=same[module]) for module, count in counts.items()}
    groups = {group: Counter[str]() for group in GROUPS}
    for module, count in every.items():
        groups[group_of(module)].update(count)
    lines = [_line(f"**{group}**", count) for group, count in groups.items() if count.total()]
    modules = [_line(f"`{module.replace('.', '/')}.py`", count) for module, count in every.items()]
    equivalent = [each for each in survivors if each.reason]
    open_ = [each for each in survivors if not each.reason]
    text = TEXT.format(
        unchecked=f" {unchecked:,} other mutants were not run." if unchecked else "",
        made=made, enough=ENOUGH, total=_line("all", sum(groups.values(), Counter())),
        groups="\n".join(lines), modules="\n".join(modules), equivalent=_listed(equivalent), open=_listed(open_),
    )  # fmt: skip
    return text, all(killed(count) >= ENOUGH * telling(count) for count in groups.values())


def telling(counts):
    """Return how many mutants change anything; `same` counts those among the survivors that do not."""
    return counts.total() - 2 * counts["same"]


def _line(name, counts):
    total, same = counts.total() - counts["same"], counts["same"]
    left = total - killed(counts) - same
    share = f"{killed(counts) / max(telling(counts), 1):.1%}"
    return f"| {name} | {total:,} | {killed(counts):,} | {same} | {left} | {share} |"


def _listed(survivors):
    """Return a list of survivors by function: the line as it is, the line that no test told from it, and why."""
    lines = []
    for each in sorted(survivors, key=lambda each: (each.function, each.removed, each.added)):
        added = f"`{each.added}`" if each.added else "nothing"
        lines.append(f"- `{each.function}`: {added} for `{each.removed}`." + (f" {each.reason}" if each.reason else ""))
    return "\n".join(lines) or "None."


TEXT = """\
# Mutation testing

`make mutate`, {made}, mutmut 3.8.1.
A mutant is the code with one small change: another operator, constant, argument or text. It is killed if a test fails
on it, or does not end. Texts of messages are mutated too: a refusal must say what, where, what is safe and what to do,
so tests hold it to the word. `same` are survivors that change nothing that a test could see, each listed below with the
reason; `share` is of the others, and each of the five groups must reach {enough:.0%}.{unchecked}

| group | mutants | killed | same | survived | share |
| --- | --- | --- | --- | --- | --- |
{groups}
{total}

## By module

| module | mutants | killed | same | survived | share |
| --- | --- | --- | --- | --- | --- |
{modules}

## Survivors that change nothing

The reasons are kept in `tests/mutation/equivalent.toml`, by function and changed line.

{equivalent}

## Survivors that a test could tell

{open}
"""
