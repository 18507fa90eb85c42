"""All commands: their groups, the functions that they call, examples, and the list of them that `--help` prints.

A command's module is imported when the command is called, or when its help or the list is printed.
"""

from importlib import import_module
from typing import NamedTuple

PROGRAM = "stagecoach"
ABOUT = "Post-training of language models with reinforcement learning, in durable stages."
ITEMS = """\
FILES are presets (demo, sft_demo, qwen3_gpu) or TOML files, merged from left to right.
OVERRIDES are written dotted.key=value, for example training.learning_rate=1e-5 or environments.0.max_turns=3.
"""
CONFIG = "[FILES] [OVERRIDES]"
DEMOS = """\
PRESET is one that has a demo; without it, `demo`. A wrong name lists them.
OVERRIDES are written dotted.key=value, for example steps=5.
"""
IMPORT = """\
FILES have a rollout in each line, as JSON.
OVERRIDES are written dotted.key=value, for example seed=3.
"""
RUNS = """\
RUN is a run of the store; without it, the newest.
OVERRIDES are written dotted.key=value, for example steps=40 or training.learning_rate=1e-5.
"""
INIT = """\
Without an option, the project is for your own data: a config, a reward function and examples.
It trains at the first try.
"""
IDS = """\
ID is a policy (RUN, RUN:VERSION), a batch row (RUN:STEP:ROW, KEY/ROW), a rollout (TRACE), a training sample \
(TRACE/BRANCH), an assignment (GROUP/MEMBER), an example (ENVIRONMENT/EXAMPLE), or any work by its KEY in the ledger.
The first eight characters of a trace or key are enough. If several runs use an ID, all of them are shown.
"""
QUERY = """\
A table by its name has each row once: select avg(reward) from traces where run = 'demo'
RUN.table has the rows that a run uses, also those that another run computed: select avg(reward) from "my-replay".traces
rollouts has a row for each rollout of a run, with its reply, prompt, outcome and advantage. Conditions use its columns.
outcomes and accounting have the outcome of every rollout. uses has the slices of each run.
Without a query, the command lists the tables and their columns.
"""
VIEW = """\
The page is on 127.0.0.1. It needs no account, loads nothing from other hosts, and only reads.
With another --host, visitors need a token: the printed address contains it, or STAGECOACH_VIEW_TOKEN sets it.
--save /runs/demo/steps/3 step3.html writes one page as a static file, and starts no server.
"""
TRACES = """\
The list has the columns of the viewer's step page: outcome, reward, advantage, num_turns and others.
The message for an unknown column lists all columns. Traces without a value come last.
A pipe gets one line for each trace, with complete ids.
--where takes a condition, as `quarantine --where` does. Without --step, it searches the whole run.
"""
TRACE = """\
ID is the id of a rollout; its first eight characters are enough. If several runs use it, --run chooses one.
Sampled messages are printed as tokens, coloured by --color; a pipe, or NO_COLOR, gets plain text.
"""
TRACK = """\
OVERRIDES are settings of the section tracking, for example tracking.mode=online.
The other settings are those of the run.
W&B writes files on this machine unless the mode is online.
"""


class Command(NamedTuple):
    """What is known of a command before it is imported."""

    group: str
    """The heading below which help lists it."""
    function: str
    """The function that it calls, `module:function` with a module of this package; its docstring is the help."""
    examples: tuple[str, ...]
    """Arguments of calls that are shown in its help."""
    more: str = ""
    """What help says below them."""
    usage: str = ""
    """Its arguments in the line of usage, where their names alone do not say enough."""


COMMANDS = {
    "demo": Command(
        "Run", "run:demo", ("", "kuhn_poker --name poker", "steps=5 --plain"), DEMOS, "[PRESET] [OVERRIDES]"
    ),
    "run": Command(
        "Run",
        "run:run",
        ("demo model.path=path/to/model --name first", "mine.toml training.learning_rate=1e-5"),
        ITEMS,
        CONFIG,
    ),
    "init": Command(
        "Run",
        "init:init",
        ("my-project", "chess --environment own_data", "moved --from rl.toml", "moved --from train_grpo.py"),
        INIT,
    ),
    "sft": Command(
        "Run", "run:sft", ("sft_demo data.path=rows.jsonl model.path=path/to/model --name warm",), ITEMS, CONFIG
    ),
    "eval": Command(
        "Run",
        "run:evaluate",
        ("demo --policy first", "demo --url https://host/v1 --model NAME --retry-errors 2"),
        ITEMS,
        CONFIG,
    ),
    "resume": Command("Run", "run:resume", ("first", "first steps=40"), RUNS, "[RUN] [OVERRIDES]"),
    "stop": Command("Run", "run:stop", ("first",)),
    "replay": Command(
        "Run",
        "run:replay",
        (
            "demo --set algorithm.type=rloo",
            "demo --from training --vary training.learning_rate=1e-4 --vary training.learning_rate=1e-5",
        ),
    ),
    "gate": Command("Run", "run:gate", ("first", 'first --approve --reason "rewards look right"'), usage="[RUN]"),
    "join": Command("Run", "run:join", ("qwen3_8b_node learner.nodes=2 --node 1",), ITEMS, CONFIG),
    "deploy": Command("Run", "run:deploy", ("", "--pool gpu --slots 2")),
    "show": Command(
        "Look",
        "show:show",
        ("", "demo --last 30 --timing", "demo training.learning_rate=1e-5"),
        RUNS,
        "[RUN] [OVERRIDES]",
    ),
    "runs": Command("Look", "show:runs", ("", "--kind replay --state failed")),
    "status": Command("Look", "show:status", ("", "demo"), usage="[RUN]"),
    "watch": Command("Look", "watch:watch", ("", "demo", "demo --read"), usage="[RUN]"),
    "logs": Command("Look", "show:logs", ("demo", "demo engine --follow"), usage="[RUN] [SERVICE]"),
    "check": Command("Look", "show:check", ("demo --load", "qwen3_gpu --gpu H200"), ITEMS, CONFIG),
    "config": Command(
        "Look", "show:config", ("rollout.max_tokens", "training demo mine.toml"), ITEMS, f"[KEY] {CONFIG}"
    ),
    "doctor": Command("Look", "show:doctor", ("",)),
    "lora-smoke": Command("Look", "show:lora_smoke", ("model.path=path/to/model",), ITEMS, CONFIG),
    "gpu-smoke": Command("Look", "show:gpu_smoke", ("", "model.path=path/to/model --tokens 16384"), ITEMS, CONFIG),
    "lineage": Command("Look", "show:lineage", ("demo:20 --up", "0f3a9c1d --json"), IDS),
    "why": Command("Look", "show:why", ("0f3a9c1d",)),
    "sql": Command(
        "Look",
        "show:sql",
        ("", '"select outcome, count(*) from demo.outcomes group by all"', '"from demo.updates" --output updates.csv'),
        QUERY,
        "[QUERY]",
    ),
    "view": Command("Look", "show:view", ("--run latest --open", "--save /runs/demo demo.html"), VIEW),
    "traces": Command(
        "Look",
        "show:traces",
        (
            "demo --step 3 --sort reward --desc",
            "demo --outcome errored --limit 5",
            """demo --where "reply ~ 'a'\"""",
        ),
        TRACES,
        "[RUN]",
    ),
    "trace": Command("Look", "show:trace", ("0f3a9c1d", "0f3a9c1d --color ratio --messages 0:2"), TRACE),
    "diff": Command("Compare", "diff:diff", ("demo slower", "demo slower --step 3")),
    "algorithms": Command(
        "Compare", "diff:algorithms", ("demo", "demo grpo rloo --steps 3:10 --output page.md"), usage="RUN [NAMES]"
    ),
    "curves": Command("Compare", "diff:curves", ("demo slower", "demo slower --output curves.md"), usage="RUNS"),
    "evals": Command("Compare", "diff:evals", ("first", "first second --by tier"), usage="[RUNS]"),
    "note": Command(
        "Correct",
        "note:note",
        ('demo "length grew from step 41 on" --tag odd', 'demo "empty tag" --trace 0f3a9c1d', "demo"),
        usage="RUN [TEXT]",
    ),
    "quarantine": Command(
        "Correct", "store:quarantine", ("""--where "reward > 0.9" --reason "checker was fooled" --dry-run""", "--list")
    ),
    "repair": Command("Correct", "store:repair", ("--deep --dry-run",)),
    "maintain": Command("Keep", "store:maintain", ("", "--retain messages=30d --dry-run")),
    "gc": Command("Keep", "store:gc", ("--remove slower", "--keep demo --keep-last 3 --dry-run")),
    "track": Command(
        "Move",
        "track:track",
        ("demo --to wandb", "demo --to wandb tracking.mode=online tracking.project=words"),
        TRACK,
        "[RUN] [OVERRIDES] --to CHOICE",
    ),
    "import": Command("Move", "export:import_rollouts", ("traces.jsonl --name theirs",), IMPORT, "FILES [OVERRIDES]"),
    "export": Command(
        "Move",
        "export:export_rollouts",
        ("demo --format sft --kept --to good.parquet", "demo --format weights --to dir"),
        usage="[RUN] --format CHOICE --to PATH",
    ),
}
"""All commands by name, in the order in which help lists them."""


def epilogue(name: str) -> str:
    """Return what the help of a command ends with: examples, and what is to be known of its arguments."""
    lines = [" ".join(part for part in (PROGRAM, name, example) if part) for example in COMMANDS[name].examples]
    return "\n".join(
        ["Examples:", *(f"  {line}" for line in lines), *(["", COMMANDS[name].more] if COMMANDS[name].more else [])]
    )


def overview() -> str:
    """Return the help of the program: every command by group, with the first line of its function's docstring."""
    lines = [f"Usage: {PROGRAM} COMMAND", "", ABOUT]
    width = max(map(len, COMMANDS))
    for group in dict.fromkeys(each.group for each in COMMANDS.values()):
        lines += ["", f"{group}:"]
        lines += [f"  {name:<{width}}  {summary(name)}" for name, each in COMMANDS.items() if each.group == group]
    lines += ["", f"`{PROGRAM} COMMAND --help` says what a command takes, with examples."]
    return "\n".join([*lines, f"`{PROGRAM} --install-completion` completes words in bash, zsh and fish."])


def summary(name: str) -> str:
    """Return the first line of the docstring of the function that a command calls; imports the function's module."""
    module, _, function = COMMANDS[name].function.partition(":")
    documentation: str = getattr(import_module(f"{__package__}.{module}"), function).__doc__
    return documentation.partition("\n")[0]
