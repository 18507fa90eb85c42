"""A verifiers taskset: work out a chain of operations with a calculator, one call each."""

from sample_calc_tools.taskset import CalcToolsTaskset

__all__ = ["CalcToolsTaskset"]
