"""The taskset that verifiers loads under the id `own_data`."""

import inspect
import math
from collections.abc import Iterator
from numbers import Real
from typing import Any

import verifiers.v1 as vf
from pydantic import Field, SerializeAsAny

from own_data.errors import DataUnusable
from own_data.rows import Columns, Example, examples
from own_data.scoring import last_number, scoring
from own_data.sources import Row, from_file, from_hub


class OwnDataData(vf.TaskData):
    """One row of the data."""

    key: str
    """Tells the row from all others."""
    answer: str
    """What the reply is compared with."""
    row: dict[str, Any] = Field(default_factory=dict)
    """All columns of the row."""


class OwnDataTaskConfig(vf.TaskConfig):
    """How replies are scored."""

    scoring: str = "exact"
    """`exact`, `contains`, `number`, or an import path `package.module:function` of a function of reply, answer and
    row."""


class OwnDataTask(vf.Task[OwnDataData, vf.State, OwnDataTaskConfig]):
    """Scores the last reply against the row's answer."""

    @property
    def key(self) -> str:
        """The row's id and a digest of what is in the row, whatever its place."""
        return self.data.key

    @vf.reward
    async def answer(self, task: OwnDataData, trace: vf.Trace) -> float:
        """What the scoring says of the last reply. Raises DataUnusable where that is no finite number."""
        found = scoring(self.config.scoring)(trace.last_reply, task.answer, task.row)
        value = await found if inspect.isawaitable(found) else found
        if not isinstance(value, Real) or not math.isfinite(value):
            raise DataUnusable(f"scoring {self.config.scoring!r} returned {value!r} for row {task.key}; want a number")
        return float(value)


class OwnDataConfig(vf.TasksetConfig):
    """Which data, and which columns hold what."""

    task: SerializeAsAny[OwnDataTaskConfig] = OwnDataTaskConfig()
    """How replies are scored."""
    path: str = ""
    """A local file of JSON lines (.jsonl) or Parquet (.parquet)."""
    hub: str = ""
    """The id of a dataset of the hub, or a local directory of data files, in place of `path`; needs `datasets`."""
    subset: str = ""
    """The dataset's configuration of that name; empty takes its default."""
    split: str = "train"
    """The dataset's split."""
    prompt_column: str = "prompt"
    """Holds the user's text, or a list of messages that ends with the user's."""
    answer_column: str = "answer"
    """Holds what the reply is compared with, a text or a number."""
    id_column: str = ""
    """Holds a name that is each row's own; empty tells rows by their content."""
    system: str = ""
    """A system prompt for every row; empty is none."""

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows, each with its place. Raises DataUnusable unless one of `path` and `hub` is given."""
        if bool(self.path) == bool(self.hub):
            raise DataUnusable("give the taskset either `path`, a local file, or `hub`, a dataset of the hub")
        yield from from_file(self.path) if self.path else from_hub(self.hub, self.subset, self.split)


class OwnDataTaskset(vf.Taskset[OwnDataTask, OwnDataConfig]):
    """The rows of a file or dataset."""

    def load(self) -> Iterator[OwnDataTask]:
        """Yield one task for each row. Raises DataUnusable, naming place and column, for what cannot be used."""
        config = self.config
        scoring(config.task.scoring)
        for example in examples(config.rows(), Columns(config.prompt_column, config.answer_column, config.id_column)):
            self._require(example)
            system = {"system_prompt": config.system} if config.system else {}
            data = OwnDataData(key=example.key, prompt=example.prompt, answer=example.answer, row=example.row, **system)
            yield OwnDataTask(data, config.task)

    def _require(self, example: Example) -> None:
        config = self.config
        if config.task.scoring == "number" and last_number(example.answer) is None:
            raise DataUnusable(
                f"{example.place}, column {config.answer_column!r}: scoring is `number`, and {example.answer!r} holds "
                "none"
            )
        if config.system and not isinstance(example.prompt, str) and example.prompt[0]["role"] == "system":
            raise DataUnusable(
                f"{example.place}, column {config.prompt_column!r}: the messages begin with a system message of their "
                "own, and the setting `system` gives another"
            )
