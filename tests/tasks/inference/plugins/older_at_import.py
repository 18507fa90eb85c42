"""The same, failing already when it is imported."""

import verifiers as vf

RUBRIC = vf.Rubric(funcs=[])


def load_environment() -> object:
    return vf.SingleTurnEnv(rubric=RUBRIC)
