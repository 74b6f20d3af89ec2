"""Evaluation: every system on the same prompts, in one process, and the tables and figures that compare them.

`tasks` is what is asked, `systems` who answers, `records` the file that grows, `runner` the verb `eval`, `report` and
`figures` what is made of the records. `metrics` are modules for `evaluate.load`, and the only place of their formulas.
"""

from .arguments import EvalArguments
from .runner import run_eval

__all__ = ["EvalArguments", "run_eval"]
