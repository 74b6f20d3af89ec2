"""Regeneration: prompts go through the target, and what it answers becomes training data.

`arguments` says what can be chosen, `prompts` turns rows of any form into what the target is asked, `target` and
`server` are the two ways to ask it, `responses` is the file that grows, `run` the verb.
"""

from .arguments import RegenerateArguments
from .run import run_regenerate

__all__ = ["RegenerateArguments", "run_regenerate"]
