"""The taskset that verifiers loads under the id `own_data`."""

import inspect
import math
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

import verifiers.v1 as vf
from pydantic import Field, FiniteFloat, SerializeAsAny

from own_data.errors import DataUnusable
from own_data.rows import examples
from own_data.scoring import last_number, scoring
from own_data.sources import Row, from_files, from_hub


class OwnDataData(vf.TaskData):
    """One row of the data."""

    key: str
    """Tells the row from all others."""
    answer: str
    """What the reply is compared with."""
    row: dict[str, Any] = Field(default_factory=dict)
    """All columns of the row."""


class Part(vf.BaseConfig):
    """One of several rewards."""

    function: str
    """`exact`, `contains`, `number`, or an import path."""
    weight: FiniteFloat = 1.0
    """Factor in the sum of the rewards."""


class OwnDataTaskConfig(vf.TaskConfig):
    """How replies are scored."""

    scoring: str | dict[str, Part] = "exact"
    """`exact`, `contains`, `number`, or an import path `package.module:function` of a function of reply, answer and
    row; or several by the names of the rewards that they give. The name of a single one is `answer`."""

    @property
    def parts(self) -> dict[str, Part]:
        """What scores, by the name of its reward."""
        return {"answer": Part(function=self.scoring)} if isinstance(self.scoring, str) else self.scoring


class OwnDataTask(vf.Task[OwnDataData, vf.State, OwnDataTaskConfig]):
    """Scores the last reply against the row's answer."""

    @property
    def key(self) -> str:
        """The row's id and a digest of what is in the row, whatever its place."""
        return self.data.key

    @vf.reward
    async def answer(self, task: OwnDataData, trace: vf.Trace) -> float | Mapping[str, float]:
        """What the scoring says of the last reply. Raises DataUnusable where that is no finite number."""
        for name, part in self.config.parts.items():
            found = scoring(part.function)(trace.last_reply, task.answer, task.row)
            value = await found if inspect.isawaitable(found) else found
            if not isinstance(value, Real) or not math.isfinite(value):
                raise DataUnusable(f"scoring {part.function!r} returned {value!r} for row {task.key}; want a number")
            if isinstance(self.config.scoring, str):
                return float(value)  # whose weight verifiers' own setting of rewards may change
            trace.record_reward(name, value, part.weight)
        return {}  # all are recorded


class OwnDataConfig(vf.TasksetConfig):
    """Which data, and which columns hold what."""

    task: SerializeAsAny[OwnDataTaskConfig] = OwnDataTaskConfig()
    """How replies are scored."""
    path: str = ""
    """A local file (.jsonl, .json, .csv, .tsv, .parquet; texts also in .gz), or a pattern of files."""
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
        yield from from_files(self.path) if self.path else from_hub(self.hub, self.subset, self.split)


class OwnDataTaskset(vf.Taskset[OwnDataTask, OwnDataConfig]):
    """The rows of a file or dataset."""

    def load(self) -> Iterator[OwnDataTask]:
        """Yield one task for each row. Raises DataUnusable, naming place and column, for what cannot be used."""
        config = self.config
        functions = {part.function: scoring(part.function) for part in config.task.parts.values()}
        for place, fields in examples(config.rows(), config.prompt_column, config.answer_column, config.id_column):
            self._require(place, fields, "number" in functions)
            yield OwnDataTask(OwnDataData(**fields, system_prompt=config.system or None), config.task)

    def _require(self, place: str, fields: Mapping[str, Any], wants_number: bool) -> None:
        config, prompt, answer = self.config, fields["prompt"], fields["answer"]
        if wants_number and last_number(answer) is None:
            raise DataUnusable(
                f"{place}, column {config.answer_column!r}: scoring is `number`, and {answer!r} holds none"
            )
        if config.system and not isinstance(prompt, str) and prompt[0]["role"] == "system":
            raise DataUnusable(
                f"{place}, column {config.prompt_column!r}: the messages begin with a system message of their own, and "
                "the setting `system` gives another"
            )
