"""A package of the interface that verifiers had before tasksets: it is not bridged, and has to be told so."""

import verifiers as vf


def load_environment(**settings: object) -> "vf.Environment":
    return vf.SingleTurnEnv(**settings)
