"""The command that starts the learner, for whoever supervises it."""

import sys

from configs.services import LearnerConfig

ENVIRONMENT = {
    # Idle OpenMP threads that spin burn ten times the CPU time on a shared machine.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Policies are directories; a name that is not one must fail, not reach for a network.
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Needed on CUDA for the same batches to give the same weights.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def command(learner: LearnerConfig, report: str) -> tuple[list[str], dict[str, str]]:
    """Return the argument list and the extra environment of the learner's process.

    The process writes {"address": "127.0.0.1:PORT", "pulse": "127.0.0.1:PORT", "pid": N} to the file `report` once it
    answers, at `pulse` whether it gets on with its work (tasks.learner.pulse), watches its standard input if that is a
    pipe, and ends when the pipe closes.
    """
    entry = ["-m", "tasks.learner.worker", "--report", report]
    if learner.processes > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={learner.processes}"]
        return [sys.executable, *torchrun, *entry], dict(ENVIRONMENT)
    return [sys.executable, *entry], dict(ENVIRONMENT)
