"""The duel after someone took its reward functions out."""

import verifiers.v1 as vf


class DuelTask(vf.Task[vf.TaskData]):
    pass


class SilentTaskset(vf.Taskset[DuelTask, vf.TasksetConfig]):
    def load(self) -> list[DuelTask]:
        return []


__all__ = ["SilentTaskset"]
