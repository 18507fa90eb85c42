"""The error of every config that cannot be used, and how two versions in messages differ."""

from collections.abc import Sequence


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
