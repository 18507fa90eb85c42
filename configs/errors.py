"""The error of every config that cannot be used, and how two versions in messages differ."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return the end of a message that names the nearest of some known words; nothing where none is near."""
    near = get_close_matches(wrong, list(known), 1, 0.6)
    return f"; did you mean {near[0]}?" if near else ""


class ConfigError(ValueError):
    """A config that cannot be used: one line for each thing wrong with it, all at once; or one line alone."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        count = "a problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"The config has {count}; nothing was started.\n" + "\n".join(f"  {p}" for p in self.problems))


def differing_parts(a: str, b: str) -> tuple[str, str]:
    """Return the parts of two versions that the other does not have; each is a list of packages and files."""
    old, new = a.split(", "), b.split(", ")
    return (
        ", ".join(each for each in old if each not in new) or "nothing more",
        ", ".join(each for each in new if each not in old) or "nothing more",
    )
