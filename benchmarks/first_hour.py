"""Times a new user: `python -m benchmarks.first_hour [--cache]`.

A clone of the last commit, README's commands, data of one's own, a trained model, with an empty home directory.
Packages are fetched anew, or with `--cache` come from where the package manager keeps them.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMANDS = (
    ("clone", ".", f"git clone --quiet {ROOT} stagecoach"),
    ("install", "stagecoach", "make install"),
    ("make a project", ".", "stagecoach init my-project"),
    ("check it", "my-project", "stagecoach check config.toml"),
    ("train", "my-project", "stagecoach run config.toml --name first --plain"),
    ("look at it", "my-project", "stagecoach traces first"),
)
MAX_SECONDS, MAX_AFTER_INSTALL = 8 * 60, 3 * 60


def main() -> None:
    """Print a table of seconds in markdown, what was learnt and the machine; end with status 1 above a bound."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cache", action="store_true")
    given = options.parse_args()
    seconds: dict[str, float] = {}
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}")
    print("\n| step | seconds |\n|---|---:|")
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        path = f"{place}/stagecoach/.venv/bin:{os.environ['PATH']}"
        variables = {"PATH": path, "HOME": directory, "LANG": "C.UTF-8"}
        kept = ("PIP_", "UV_", "SSL_", "HTTP", "http", "NO_PROXY", "no_proxy")  # how packages are reached
        variables |= {name: value for name, value in os.environ.items() if name.startswith(kept)}
        variables["UV_CACHE_DIR"] = str(Path.home() / ".cache/uv" if given.cache else place / "cache")
        for name, folder, command in COMMANDS:
            began = time.perf_counter()
            done = subprocess.run(
                command.split(), cwd=place / folder, env=variables, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise SystemExit(f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
            seconds[name] = time.perf_counter() - began
            print(f"| {name}: `{command.replace(str(ROOT), 'CHECKOUT')}` | {seconds[name]:.1f} |", flush=True)
            if name == "make a project":
                write_data(place / "my-project/examples.jsonl")
            if name == "train":
                rewards = [float(reward) for reward in re.findall(r"reward ([-\d.]+)", done.stdout)]
        total, after = sum(seconds.values()), sum(list(seconds.values())[2:])
        print(f"| all | {total:.1f} |\n| after the installation | {after:.1f} |")
        print(f"\nreward of the first step {rewards[0]:.2f}, of the last three {sum(rewards[-3:]) / 3:.2f}")
    raise SystemExit(total > MAX_SECONDS or after > MAX_AFTER_INSTALL)


def write_data(file: Path) -> None:
    """Write examples of one's own in place of the sample's: short words of the docs."""
    text = "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
    words = sorted({*re.findall(r"\b[a-z]{3,5}\b", text)})
    rows = ({"prompt": f"Reverse inside <rev>: {word}", "answer": word[::-1]} for word in words)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
