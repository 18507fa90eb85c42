"""Messages for wrong configs, and the time to each, as build/wrong-configs.md: `python -m benchmarks.wrong_configs`.

Each command of tests/configs/wrong_configs.toml is given in a directory of its own, by a process forked from one that
has imported the program; what starting it takes is measured alone and added to each. A command must be refused with the
place and the word that the list names, and leave no log of a service behind.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from tests.fixtures.wrong_configs import PLUGINS, WrongConfig, write_files, wrong_configs

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "build/wrong-configs.md"
HEAD = """\
# Wrong configs

The messages for {count} configs that cannot work, and the seconds of the processor until each message. {start} s of
each are the start of the program. None of these commands started a service.

`stagecoach check` gives the same messages without a run. Those marked with * need the environment's own process: a run
asks it before it starts a service, and so does `stagecoach check --load`. The list is
[tests/configs/wrong_configs.toml](../tests/configs/wrong_configs.toml), and the tests go through it.
`python -m benchmarks.wrong_configs` makes this page.

Measured on {cores} cores with a load of {load}: half of the commands took at most {median} s of the processor, the
slowest {slowest} s. On a quiet machine each second of the processor does more.
"""


@dataclass(frozen=True)
class Answer:
    """What a command said, and what it took."""

    wrong: WrongConfig
    message: str
    seconds: float
    busy: float
    """Seconds of the processor, those of an environment's process included."""


def ask(wrong: WrongConfig, place: Path) -> Answer:
    """Give the command of a wrong config in an empty directory; fails unless it is refused as the list says."""
    write_files(place)
    said = place / "said"
    began = time.monotonic()
    child = os.fork()
    if not child:
        _be_the_command(wrong, place, said)
    _, status, used = os.wait4(child, 0)
    seconds = time.monotonic() - began
    text = said.read_text(encoding="utf-8").replace(str(place), "...")
    assert os.waitstatus_to_exitcode(status) == 2, f"{wrong}: {status}: {text}"
    assert wrong.place in text and wrong.says in text, f"{wrong}: {text}"
    logs = [*place.glob("stagecoach-store/logs/*/*.log"), *place.glob("stagecoach-store/logs/prefect*")]
    assert "nothing was" in text.lower() and not logs, f"{wrong}: {logs}"
    return Answer(wrong, _line(text, wrong), seconds, used.ru_utime + used.ru_stime)


def _be_the_command(wrong: WrongConfig, place: Path, said: Path) -> None:
    """Do a command in this process, which ends with it."""
    from flows import cli

    os.chdir(place)
    with said.open("w", encoding="utf-8") as sys.stderr:
        status = cli.main(wrong.argv)
    os._exit(status)


def start_up() -> tuple[float, float]:
    """Return the seconds of the clock and of the processor that the program takes to start, the least of three."""
    measured = []
    for _ in range(3):
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", "import flows.cli, flows.replays.loop"], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        measured.append((time.monotonic() - began, busy))
    return min(measured)


def _line(said: str, wrong: WrongConfig) -> str:
    """Return the line of a message that names the place, as one paragraph."""
    lines = [line.removeprefix("stagecoach: ").strip() for line in said.splitlines()]
    return next((line for line in lines if wrong.place in line and wrong.says in line), " ".join(lines))


def page(answers: Sequence[Answer], start: float, load: float) -> Iterator[str]:
    """Yield the lines of the page; `start` is what of each command is the start of the program."""
    busy = sorted(each.busy for each in answers)
    times = {"start": start, "median": busy[len(busy) // 2], "slowest": busy[-1]}
    seconds = {name: f"{each:.1f}" for name, each in times.items()}
    yield HEAD.format(count=len(answers), cores=os.cpu_count(), load=round(load), **seconds)
    for title, of_section in groupby(answers, lambda answer: answer.wrong.section):
        yield f"## {title}\n"
        yield "| Command | Message | Seconds |\n|---|---|---:|"
        for each in of_section:
            mark = " *" if each.wrong.asks else ""
            command, message = (text.replace("|", "\\|") for text in (str(each.wrong), each.message))
            yield f"| `{command}`{mark} | {_plain(message)} | {each.busy:.1f} |"
        yield ""


def _plain(text: str) -> str:
    """Return a text that Markdown shows as it is."""
    return "".join(f"\\{letter}" if letter in "*_<>[]`" else letter for letter in text)


def main() -> None:
    """Give all commands that are mistakes on this machine, and write the page."""
    os.environ |= {"PYTHONPATH": f"{PLUGINS}:{ROOT}", "HF_HUB_OFFLINE": "1"}
    sys.path.insert(0, str(PLUGINS))
    starting = start_up()
    import flows.replays.loop  # noqa: F401  # before it is forked

    answers, loads = [], []
    for wrong in wrong_configs():
        if wrong.applies:
            with tempfile.TemporaryDirectory() as place:
                os.environ["PREFECT_HOME"] = f"{place}/prefect"
                found = ask(wrong, Path(place).resolve())
            answers.append(replace(found, seconds=found.seconds + starting[0], busy=found.busy + starting[1]))
            loads.append(os.getloadavg()[0])
            print(f"{answers[-1].seconds:6.1f} s {answers[-1].busy:6.1f} s  {wrong}", flush=True)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join(page(answers, starting[1], sum(loads) / len(loads))).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
