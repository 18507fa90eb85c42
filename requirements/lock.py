"""Make both locks of pyproject.toml:  lock.py [ARGUMENT OF uv pip compile ...]

The gpu lock comes first, then the cpu lock within its versions: packages in both have the same. Versions stay as they
are while they fit; `--upgrade` takes the newest, `--upgrade-package NAME` those of one package. A lock holds for every
Python and platform that pyproject.toml names, with the hashes of the files for these.
"""

import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

FOLDER = Path(__file__).parent
EXTRAS = {
    "gpu": ["--extra=gpu"],
    "cpu": ["--extra=cpu", f"--override={FOLDER / 'overrides.txt'}", f"--constraint={FOLDER / 'gpu.txt'}"],
}
WITHOUT_HASHES = {"cpu": {"torch"}}
"""Its CPU builds are not on the package index, and which one is taken is decided when it is installed."""


def main(*arguments: str) -> int:
    """Write both locks; return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        for lock, extras in EXTRAS.items():
            compiled = Path(folder) / "requirements.txt"
            # What it holds already is preferred.
            shutil.copy(FOLDER / f"{lock}.txt", compiled)
            compile_lock("pyproject.toml", "--extra=dev", *extras, *arguments, f"--output-file={compiled}")
            files = compile_lock(str(compiled), "--no-deps", "--format=pylock.toml")
            text = render(tomllib.loads(files)["packages"], WITHOUT_HASHES.get(lock, set()))
            (FOLDER / f"{lock}.txt").write_text(text, encoding="utf-8")
    return 0


def compile_lock(*arguments: str) -> str:
    """Have uv resolve requirements for every Python and platform; return what it prints.

    It asks the package index alone, and not what pip is set up with on this machine: that may lack other platforms.
    """
    uv = str(Path(sys.executable).with_name("uv"))
    command = [uv, "pip", "compile", "--universal", "--python-version=3.11", "--no-annotate", "--no-header", "--quiet"]
    return subprocess.run([*command, *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout


def render(packages: list[dict], without_hashes: set[str]) -> str:
    """Return the lines of a lock: what pip and uv read, without the condition that is the same for nearly all."""
    ((always, _),) = Counter(package.get("marker", "") for package in packages).most_common(1)
    lines = []
    for package in packages:
        name, marker = package["name"], package.get("marker", "")
        line = f"{name}=={package['version']}" + (f" ; {marker}" if marker != always else "")
        files = [*package.get("wheels", []), *([package["sdist"]] if "wheels" not in package else [])]
        hashes = [each["hashes"]["sha256"] for each in files if "musllinux" not in each["url"]]
        if name not in without_hashes:
            line += "".join(f" \\\n    --hash=sha256:{each}" for each in sorted(hashes))
        lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
