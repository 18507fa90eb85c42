"""COMMANDS: the commands of the program, each with its group, its function and its help.

cyclopts imports a command's module when the command is called or its help is printed; the overview imports none.
"""

from typing import NamedTuple

PROGRAM = "stagecoach"
ABOUT = "Post-training of language models with reinforcement learning, in durable stages."
ITEMS = """\
FILES are presets (demo, sft_demo, qwen3_gpu) or TOML files, merged from left to right.
OVERRIDES are written dotted.key=value, for example training.learning_rate=1e-5 or environments.0.max_turns=3."""
RUNS = """\
RUN is a run of the store; without it, the newest.
OVERRIDES are written dotted.key=value, for example steps=40 or training.learning_rate=1e-5."""


class Command(NamedTuple):
    """A command before its module is imported."""

    group: str
    """The heading below which the overview lists it."""
    call: str
    """The function that does the work, as `module:function` with a module of this package, and its positional arguments
    in the line of usage, where their names alone do not say enough."""
    help: str
    """A summary, which the overview prints, what else there is to say, calls as examples, and notes on arguments."""


COMMANDS = {
    "demo": Command(
        "Run",
        "run:demo [PRESET] [OVERRIDES]",
        """Train a small model from nothing to good, on this machine.

Examples:
  stagecoach demo
  stagecoach demo kuhn_poker --name poker
  stagecoach demo steps=5 --plain

PRESET is one that has a demo; without it, `demo`. A wrong name lists them.
OVERRIDES are written dotted.key=value, for example steps=5.""",
    ),
    "run": Command(
        "Run",
        "run:run [FILES] [OVERRIDES]",
        f"""Train with reinforcement learning; the same name resumes the run.

Examples:
  stagecoach run demo model.path=path/to/model --name first
  stagecoach run mine.toml training.learning_rate=1e-5

{ITEMS}""",
    ),
    "init": Command(
        "Run",
        "init:init",
        """Make a project that trains; existing files are not overwritten.

Examples:
  stagecoach init my-project
  stagecoach init chess --environment own_data
  stagecoach init moved --from rl.toml
  stagecoach init moved --from grpo.yaml

Without an option, the project is for your own data: a config, a reward function and examples.
It trains at the first try.""",
    ),
    "sft": Command(
        "Run",
        "run:sft [FILES] [OVERRIDES]",
        f"""Train on demonstrations (supervised).

Examples:
  stagecoach sft sft_demo data.path=rows.jsonl model.path=path/to/model --name warm

{ITEMS}""",
    ),
    "eval": Command(
        "Run",
        "run:evaluate [FILES] [OVERRIDES]",
        f"""Score a policy on held-out examples.

Examples:
  stagecoach eval demo --policy first
  stagecoach eval demo --url https://host/v1 --model NAME --retry-errors 2

{ITEMS}""",
    ),
    "resume": Command(
        "Run",
        "run:resume [RUN] [OVERRIDES]",
        f"""Resume a run: finished work is cached, the rest is computed.

Examples:
  stagecoach resume first
  stagecoach resume first steps=40

{RUNS}""",
    ),
    "stop": Command(
        "Run",
        "runs:stop",
        """Stop a run of this machine; `resume` goes on with it.

Examples:
  stagecoach stop first""",
    ),
    "replay": Command(
        "Run",
        "run:replay",
        """Do recorded steps again in a new run, from one stage on.

Examples:
  stagecoach replay demo --set algorithm.type=rloo
  stagecoach replay demo --set training.learning_rate=1e-4 --dry-run""",
    ),
    "gate": Command(
        "Run",
        "gate:gate [RUN]",
        """List the decisions at a run's gates, or answer one that waits.

Examples:
  stagecoach gate first
  stagecoach gate first --approve --reason "rewards look right"
""",
    ),
    "join": Command(
        "Run",
        "join:join [FILES] [OVERRIDES]",
        f"""Train beside the learner of a run on another machine.

FILES and OVERRIDES are those of the run. It waits for one run after the other until it is stopped.

Examples:
  stagecoach join qwen3_8b_node learner.nodes=2 --node 1

{ITEMS}""",
    ),
    "deploy": Command(
        "Run",
        "deploy:deploy",
        """Put deployments, work pool and automations on the Prefect server.

Examples:
  stagecoach deploy
  stagecoach deploy --pool gpu --slots 2""",
    ),
    "show": Command(
        "Look",
        "show:show [RUN]",
        """Show a run: curves, last steps, held-out scores.

RUN:STEP is one step of it.

Examples:
  stagecoach show
  stagecoach show demo --last 30
  stagecoach show demo:3""",
    ),
    "runs": Command(
        "Look",
        "runs:runs",
        """List the runs of a store: state, steps, rewards, age, size.

Examples:
  stagecoach runs""",
    ),
    "status": Command(
        "Look",
        "runs:status",
        """Show what is running: runs, services, waiting gates.

The exit status is 0 if a run is running, else 1.

Examples:
  stagecoach status""",
    ),
    "watch": Command(
        "Look",
        "runs:watch [RUN]",
        """Follow any run in the live panel.

Examples:
  stagecoach watch
  stagecoach watch demo""",
    ),
    "check": Command(
        "Look",
        "check:check [FILES] [OVERRIDES]",
        f"""Check a config and print the plan of its run; this starts nothing.

Examples:
  stagecoach check demo --load
  stagecoach check qwen3_gpu --gpu H200

{ITEMS}""",
    ),
    "config": Command(
        "Look",
        "config:config [KEY] [FILES] [OVERRIDES]",
        f"""Explain settings: meaning, value, and where the value came from.

Examples:
  stagecoach config rollout.max_tokens
  stagecoach config training demo mine.toml

{ITEMS}""",
    ),
    "doctor": Command(
        "Look",
        "doctor:doctor",
        """Check whether this machine is ready, and print what to do if not.

Examples:
  stagecoach doctor""",
    ),
    "lora-smoke": Command(
        "Look",
        "smoke:lora_smoke [FILES] [OVERRIDES]",
        f"""Test whether this machine's engine serves adapters correctly.

It runs three tests over random adapters: base and adapter in one batch, swaps, slowdown. It stores nothing, and \
needs a checkout of the project.

Examples:
  stagecoach lora-smoke model.path=path/to/model

{ITEMS}""",
    ),
    "gpu-smoke": Command(
        "Look",
        "smoke:gpu_smoke [FILES] [OVERRIDES]",
        f"""Test whether this machine's GPU trains and samples correctly.

It prints what was measured beside what is expected. The exit status is 1 where something is wrong. Without \
`model.path` the model is a small random one. It stores nothing, and needs a checkout of the project, whose \
tests it runs.

Examples:
  stagecoach gpu-smoke
  stagecoach gpu-smoke model.path=path/to/model --tokens 16384

{ITEMS}""",
    ),
    "lineage": Command(
        "Look",
        "questions:lineage",
        """Show where a row comes from, and what was made from it.

Examples:
  stagecoach lineage demo:20 --up
  stagecoach lineage 0f3a9c1d --json

ID is a policy (RUN, RUN:VERSION), a batch row (RUN:STEP:ROW, KEY/ROW), a rollout (TRACE), a training sample \
(TRACE/BRANCH), an assignment (GROUP/MEMBER), an example (ENVIRONMENT/EXAMPLE), or any work by its KEY in the \
ledger.
The first eight characters of a trace or key are enough. If several runs use an ID, all of them are shown.""",
    ),
    "why": Command(
        "Look",
        "questions:why",
        """Explain whether a rollout was trained on, and if not, why not.

Examples:
  stagecoach why 0f3a9c1d""",
    ),
    "sql": Command(
        "Look",
        "sql:sql [QUERY]",
        """Query the tables of a store in SQL; this changes nothing.

Ctrl-C ends a query.

Examples:
  stagecoach sql
  stagecoach sql "select outcome, count(*) from demo.outcomes group by all"
  stagecoach sql "from demo.updates" --output updates.csv

A table by its name has each row once: select avg(reward) from traces where run = 'demo'
RUN.table has the rows that a run uses, also those that another run computed: select avg(reward) from \
"my-replay".traces
rollouts has a row for each rollout of a run, with its reply, prompt, outcome and advantage. Conditions use its \
columns.
outcomes and accounting have the outcome of every rollout. uses has the slices of each run.
Without a query, the command lists the tables and their columns.""",
    ),
    "view": Command(
        "Look",
        "view:view",
        """Show runs, rollouts and gradients in a browser; it only reads.

Examples:
  stagecoach view --run latest --open
  stagecoach view --save /runs/demo demo.html

The page is on 127.0.0.1. It needs no account, loads nothing from other hosts, and only reads.
With another --host, visitors need a token: the printed address contains it, or STAGECOACH_VIEW_TOKEN sets it.
--save /runs/demo/steps/3 step3.html writes one page as a static file, and starts no server.""",
    ),
    "traces": Command(
        "Look",
        "traces:traces [RUN]",
        """List the rollouts of a step, or those that meet a condition.

Examples:
  stagecoach traces demo --step 3 --sort reward --desc
  stagecoach traces demo --step 3 --where "outcome = 'errored'" --limit 5
  stagecoach traces demo --where "reply ~ 'a'"

The list has the columns of the viewer's step page: outcome, reward, advantage, num_turns and others.
The message for an unknown column lists all columns. Traces without a value come last.
A pipe gets one line for each trace, with complete ids.
--where takes a condition, as `quarantine --where` does. Without --step, it searches the whole run.""",
    ),
    "trace": Command(
        "Look",
        "trace:trace",
        """Show a rollout: its outcome, its messages, its tokens.

Examples:
  stagecoach trace 0f3a9c1d
  stagecoach trace 0f3a9c1d --color ratio --messages 0:2

ID is the id of a rollout; its first eight characters are enough. If several runs use it, --run chooses one.
Sampled messages are printed as tokens, coloured by --color; a pipe, or NO_COLOR, gets plain text.""",
    ),
    "diff": Command(
        "Compare",
        "comparisons:diff",
        """Compare two runs: settings, shared work, figures.

Examples:
  stagecoach diff demo slower
  stagecoach diff demo slower --step 3""",
    ),
    "evals": Command(
        "Compare",
        "comparisons:evals [RUNS]",
        """List evaluations of runs, each with its difference to the first.

Examples:
  stagecoach evals first
  stagecoach evals first second --by tier""",
    ),
    "note": Command(
        "Correct",
        "note:note RUN [TEXT]",
        """Write a note on a run or a rollout, or list the notes of a run.

Examples:
  stagecoach note demo "length grew from step 41 on" --tag odd
  stagecoach note demo "empty tag" --trace 0f3a9c1d
  stagecoach note demo""",
    ),
    "quarantine": Command(
        "Correct",
        "quarantine:quarantine",
        """Mark rollouts that turned out to be unfit for training.

Every batch, step and policy that used them is listed.

Examples:
  stagecoach quarantine --where "reward > 0.9" --reason "checker was fooled" --dry-run
  stagecoach quarantine --list""",
    ),
    "repair": Command(
        "Correct",
        "maintenance:repair",
        """Find damage, repair logs, list work that can be computed again.

Examples:
  stagecoach repair --deep --dry-run""",
    ),
    "maintain": Command(
        "Keep",
        "maintenance:maintain",
        """Compact tables and delete unused files.

Examples:
  stagecoach maintain
  stagecoach maintain --retain messages=30d --dry-run""",
    ),
    "gc": Command(
        "Keep",
        "maintenance:gc",
        """Remove whole runs; what a kept run needs stays.

Examples:
  stagecoach gc --keep demo --keep-last 3
  stagecoach gc --remove slower --yes""",
    ),
    "track": Command(
        "Move",
        "track:track [RUN] [OVERRIDES] --to CHOICE",
        """Send the figures of a recorded run to W&B or TensorBoard.

Examples:
  stagecoach track demo --to wandb
  stagecoach track demo --to wandb tracking.mode=online tracking.project=words

OVERRIDES are settings of the section tracking, for example tracking.mode=online.
The other settings are those of the run.
W&B writes files on this machine unless the mode is online.""",
    ),
    "import": Command(
        "Move",
        "export:import_rollouts FILES [OVERRIDES]",
        """Import rollouts of other programs as a run.

Examples:
  stagecoach import traces.jsonl --name theirs

FILES have a rollout in each line, as JSON.
OVERRIDES are written dotted.key=value, for example seed=3.""",
    ),
    "export": Command(
        "Move",
        "export:export_rollouts [RUN] --format CHOICE --to PATH",
        """Export rollouts or weights.

Examples:
  stagecoach export demo --format sft --where keep --to good.parquet
  stagecoach export demo --format weights --to dir""",
    ),
}
"""All commands by name, in the order in which help lists them."""


def overview() -> str:
    """Return the help of the program: every command by group, with the summary of its help."""
    lines = [f"Usage: {PROGRAM} COMMAND", "", ABOUT]
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines += ["", f"{group}:"]
        summaries = (
            (name, command.help.partition("\n")[0]) for name, command in COMMANDS.items() if command.group == group
        )
        lines += [f"  {name:<{max(map(len, COMMANDS))}}  {summary}" for name, summary in summaries]
    lines += ["", f"`{PROGRAM} COMMAND --help` says what a command takes, with examples."]
    return "\n".join([*lines, f"`{PROGRAM} --install-completion` completes words in bash, zsh and fish."])
