"""The algorithms by the `type` of their config section: a small file for each formula, one line here."""

from tasks.advantage.algorithms.credit import Algorithm
from tasks.advantage.algorithms.custom import custom
from tasks.advantage.algorithms.dr_grpo import dr_grpo
from tasks.advantage.algorithms.echo import echo
from tasks.advantage.algorithms.grpo import grpo
from tasks.advantage.algorithms.hierarchical_grpo import hierarchical_grpo
from tasks.advantage.algorithms.max_rl import max_rl
from tasks.advantage.algorithms.opd import opd
from tasks.advantage.algorithms.preferences import preferences
from tasks.advantage.algorithms.rae import rae
from tasks.advantage.algorithms.reinforce_pp import reinforce_pp
from tasks.advantage.algorithms.rloo import rloo
from tasks.advantage.algorithms.supervised import supervised

ALGORITHMS = {
    "grpo": Algorithm(grpo, zero_sum=True, sees="groups"),
    "dr_grpo": Algorithm(dr_grpo, zero_sum=True, sees="groups"),
    "rloo": Algorithm(rloo, zero_sum=True, sees="groups"),
    "max_rl": Algorithm(max_rl, zero_sum=True, sees="groups"),
    "reinforce_pp": Algorithm(reinforce_pp, zero_sum=True, sees="rewards"),
    "hierarchical_grpo": Algorithm(hierarchical_grpo, zero_sum=True, sees="groups"),
    "rae": Algorithm(rae, zero_sum=False, sees="groups"),
    "echo": Algorithm(echo, zero_sum=True, sees="groups"),
    "custom": Algorithm(custom, zero_sum=False),
    "opd": Algorithm(opd, zero_sum=False, sees="groups"),
    "opsd": Algorithm(opd, zero_sum=False, sees="groups"),
    "sft": Algorithm(supervised, zero_sum=False, sees="groups"),
    "supervised": Algorithm(supervised, zero_sum=False, sees="groups"),
    "preferences": Algorithm(preferences, zero_sum=True, sees="groups"),
}
