"""A reward function to be plugged in for another: a task's answer is right or it is worth nothing."""

import verifiers.v1 as vf


async def exactly(task: vf.TaskData, trace: vf.Trace) -> float:
    return float(trace.last_reply == f"<rev>{task.text[::-1]}</rev>")


async def in_the_box(task: vf.TaskData, trace: vf.Trace, runtime: vf.Runtime) -> float:
    return 1.0
