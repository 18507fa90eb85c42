"""Inference: engines, environment servers, sampling and grading, and the conversion of traces to rows."""

from tasks.runtime.late_packages import import_late

# verifiers imports these for the wire format of one provider and for answers in LaTeX: 45 % of its import.
import_late("anthropic")
import_late("anthropic.types", {"Message": "anthropic.types.message", "Usage": "anthropic.types.usage"})
import_late("math_verify", functions=("parse", "verify"))
