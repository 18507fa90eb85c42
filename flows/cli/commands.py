"""COMMANDS: the commands of the program with their groups, functions and help, and the overview that `--help` prints.

cyclopts imports a command's module when the command is called or its help is printed; the overview imports none.
"""

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
    """The function that does the work, as `module:function` with a module of this package."""
    help: str
    """The text of its help; the overview prints the first line."""
    examples: tuple[str, ...]
    """Arguments of calls that are shown in its help."""
    more: str = ""
    """What help says below them."""
    usage: str = ""
    """Its arguments in the line of usage, where their names alone do not say enough."""


COMMANDS = {
    "demo": Command(
        "Run",
        "run:demo",
        "Train a small model from nothing to good, on this machine.",
        ("", "kuhn_poker --name poker", "steps=5 --plain"),
        DEMOS,
        "[PRESET] [OVERRIDES]",
    ),
    "run": Command(
        "Run",
        "run:run",
        "Train with reinforcement learning; the same name resumes the run.",
        ("demo model.path=path/to/model --name first", "mine.toml training.learning_rate=1e-5"),
        ITEMS,
        CONFIG,
    ),
    "init": Command(
        "Run",
        "init:init",
        "Make a project that trains; existing files are not overwritten.",
        ("my-project", "chess --environment own_data", "moved --from rl.toml", "moved --from grpo.yaml"),
        INIT,
    ),
    "sft": Command(
        "Run",
        "run:sft",
        "Train on demonstrations (supervised).",
        ("sft_demo data.path=rows.jsonl model.path=path/to/model --name warm",),
        ITEMS,
        CONFIG,
    ),
    "eval": Command(
        "Run",
        "run:evaluate",
        "Score a policy on held-out examples.",
        ("demo --policy first", "demo --url https://host/v1 --model NAME --retry-errors 2"),
        ITEMS,
        CONFIG,
    ),
    "resume": Command(
        "Run",
        "run:resume",
        "Resume a run: finished work is cached, the rest is computed.",
        ("first", "first steps=40"),
        RUNS,
        "[RUN] [OVERRIDES]",
    ),
    "stop": Command("Run", "runs:stop", "Stop a run of this machine; `resume` goes on with it.", ("first",)),
    "replay": Command(
        "Run",
        "run:replay",
        "Do recorded steps again in a new run, from one stage on.",
        (
            "demo --set algorithm.type=rloo",
            "demo --from training --vary training.learning_rate=1e-4 --vary training.learning_rate=1e-5",
        ),
    ),
    "gate": Command(
        "Run",
        "gate:gate",
        "List the decisions at a run's gates, or answer one that waits.",
        ("first", 'first --approve --reason "rewards look right"'),
        usage="[RUN]",
    ),
    "join": Command(
        "Run",
        "join:join",
        (
            "Train beside the learner of a run on another machine.\n\n"
            "FILES and OVERRIDES are those of the run. It waits for one run after the other until it is stopped."
        ),
        ("qwen3_8b_node learner.nodes=2 --node 1",),
        ITEMS,
        CONFIG,
    ),
    "deploy": Command(
        "Run",
        "deploy:deploy",
        "Put deployments, work pool and automations on the Prefect server.",
        ("", "--pool gpu --slots 2"),
    ),
    "show": Command(
        "Look",
        "show:show",
        (
            "Show a run: curves, last steps, held-out scores.\n\n"
            "With OVERRIDES, it lists the stages that they would run again."
        ),
        ("", "demo --last 30 --timing", "demo training.learning_rate=1e-5"),
        RUNS,
        "[RUN] [OVERRIDES]",
    ),
    "runs": Command(
        "Look",
        "runs:runs",
        "List the runs of a store: state, steps, rewards, age, size.",
        ("", "--kind replay --state failed"),
    ),
    "status": Command(
        "Look",
        "status:status",
        (
            "Show what is running: runs, services, waiting gates, schedules.\n\n"
            "The exit status is 0 if a run is running, else 1."
        ),
        ("", "demo"),
        usage="[RUN]",
    ),
    "watch": Command(
        "Look",
        "watch:watch",
        "Follow any run in the live panel.",
        ("", "demo"),
        usage="[RUN]",
    ),
    "logs": Command(
        "Look",
        "runs:logs",
        "Print what the services of a run wrote to their logs.",
        ("demo", "demo engine --follow"),
        usage="[RUN] [SERVICE]",
    ),
    "check": Command(
        "Look",
        "plan:check",
        "Check a config and print the plan of its run; this starts nothing.",
        ("demo --load", "qwen3_gpu --gpu H200"),
        ITEMS,
        CONFIG,
    ),
    "config": Command(
        "Look",
        "config:config",
        "Explain settings: meaning, value, and where the value came from.",
        ("rollout.max_tokens", "training demo mine.toml"),
        ITEMS,
        f"[KEY] {CONFIG}",
    ),
    "doctor": Command(
        "Look", "doctor:doctor", "Check whether this machine is ready, and print what to do if not.", ("",)
    ),
    "lora-smoke": Command(
        "Look",
        "smoke:lora_smoke",
        (
            "Test whether this machine's engine serves adapters correctly.\n\n"
            "It runs three tests over random adapters: base and adapter in one batch, swaps, slowdown. It stores "
            "nothing, and needs a checkout of the project."
        ),
        ("model.path=path/to/model",),
        ITEMS,
        CONFIG,
    ),
    "gpu-smoke": Command(
        "Look",
        "smoke:gpu_smoke",
        (
            "Test whether this machine's GPU trains and samples correctly.\n\n"
            "It prints what was measured beside what is expected. The exit status is 1 where something is wrong. "
            "Without `model.path` the model is a small random one. It stores nothing, and needs a checkout of the "
            "project, whose tests it runs."
        ),
        ("", "model.path=path/to/model --tokens 16384"),
        ITEMS,
        CONFIG,
    ),
    "lineage": Command(
        "Look",
        "questions:lineage",
        "Show where a row comes from, and what was made from it.",
        ("demo:20 --up", "0f3a9c1d --json"),
        IDS,
    ),
    "why": Command(
        "Look", "questions:why", "Explain whether a rollout was trained on, and if not, why not.", ("0f3a9c1d",)
    ),
    "sql": Command(
        "Look",
        "sql:sql",
        "Query the tables of a store in SQL; this changes nothing.\n\nCtrl-C ends a query.",
        ("", '"select outcome, count(*) from demo.outcomes group by all"', '"from demo.updates" --output updates.csv'),
        QUERY,
        "[QUERY]",
    ),
    "view": Command(
        "Look",
        "view:view",
        "Show runs, rollouts and gradients in a browser; it only reads.",
        ("--run latest --open", "--save /runs/demo demo.html"),
        VIEW,
    ),
    "traces": Command(
        "Look",
        "traces:traces",
        "List the rollouts of a step: filter, sort and search.",
        (
            "demo --step 3 --sort reward --desc",
            "demo --outcome errored --limit 5",
            """demo --where "reply ~ 'a'\"""",
        ),
        TRACES,
        "[RUN]",
    ),
    "trace": Command(
        "Look",
        "trace:trace",
        "Show a rollout: its outcome, its messages, its tokens.",
        ("0f3a9c1d", "0f3a9c1d --color ratio --messages 0:2"),
        TRACE,
    ),
    "diff": Command(
        "Compare",
        "comparisons:diff",
        "Compare two runs: settings, shared work, figures.",
        ("demo slower", "demo slower --step 3"),
    ),
    "algorithms": Command(
        "Compare",
        "algorithms:algorithms",
        "Credit a run's rollouts with several algorithms, side by side.",
        ("demo", "demo grpo rloo --steps 3:10 --output page.md"),
        usage="RUN [NAMES]",
    ),
    "curves": Command(
        "Compare",
        "comparisons:curves",
        "Show the rewards of several runs by step, side by side.",
        ("demo slower", "demo slower --output curves.md"),
        usage="RUNS",
    ),
    "evals": Command(
        "Compare",
        "comparisons:evals",
        "List evaluations of runs, each with its difference to the first.",
        ("first", "first second --by tier"),
        usage="[RUNS]",
    ),
    "note": Command(
        "Correct",
        "note:note",
        "Write a note on a run or a rollout, or list the notes of a run.",
        ('demo "length grew from step 41 on" --tag odd', 'demo "empty tag" --trace 0f3a9c1d', "demo"),
        usage="RUN [TEXT]",
    ),
    "quarantine": Command(
        "Correct",
        "quarantine:quarantine",
        (
            "Mark rollouts that turned out to be unfit for training.\n\n"
            "Every batch, step and policy that used them is listed."
        ),
        ("""--where "reward > 0.9" --reason "checker was fooled" --dry-run""", "--list"),
    ),
    "repair": Command(
        "Correct",
        "maintenance:repair",
        "Find damage, repair logs, list work that can be computed again.",
        ("--deep --dry-run",),
    ),
    "maintain": Command(
        "Keep",
        "maintenance:maintain",
        "Compact tables and delete unused files.",
        ("", "--retain messages=30d --dry-run"),
    ),
    "gc": Command(
        "Keep",
        "maintenance:gc",
        "Remove whole runs; what a kept run needs stays.",
        ("--remove slower", "--keep demo --keep-last 3 --dry-run"),
    ),
    "track": Command(
        "Move",
        "track:track",
        "Send the figures of a recorded run to W&B or TensorBoard.",
        ("demo --to wandb", "demo --to wandb tracking.mode=online tracking.project=words"),
        TRACK,
        "[RUN] [OVERRIDES] --to CHOICE",
    ),
    "import": Command(
        "Move",
        "export:import_rollouts",
        "Import rollouts of other programs as a run.",
        ("traces.jsonl --name theirs",),
        IMPORT,
        "FILES [OVERRIDES]",
    ),
    "export": Command(
        "Move",
        "export:export_rollouts",
        "Export rollouts or weights, or copy a run to another store.",
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
    """Return the help of the program: every command by group, with the first line of its help."""
    lines = [f"Usage: {PROGRAM} COMMAND", "", ABOUT]
    width = max(map(len, COMMANDS))
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines += ["", f"{group}:"]
        for name, command in COMMANDS.items():
            if command.group == group:
                lines.append(f"  {name:<{width}}  {command.help.splitlines()[0]}")
    lines += ["", f"`{PROGRAM} COMMAND --help` says what a command takes, with examples."]
    return "\n".join([*lines, f"`{PROGRAM} --install-completion` completes words in bash, zsh and fish."])
