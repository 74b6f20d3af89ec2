"""Acceptance per slot: how often the first draft of a round is accepted, the second, and so on."""

import datasets
import evaluate
import numpy as np

_DESCRIPTION = """\
Acceptance of the drafts of speculative decoding by their slot in the round. Unconditional: of all rounds, in how many
was draft i accepted. Conditional: the same of the rounds in which it was verified and all drafts before it accepted.
"""

_INPUTS = """\
Args:
    accepted_per_slot: for each text a list: `[i]`, rounds in which draft i + 1 was accepted.
    reached_per_slot: for each text a list: `[i]`, rounds in which draft i + 1 was verified and all before it accepted.
    rounds: for each text its rounds.
    All three are fields of `GenerationStatistics`; every text must have equally many slots.

Returns:
    unconditional: `accepted / rounds` by slot; the sum is the accepted length without the bonus token.
    conditional: `accepted / reached` by slot, 0 for a slot that was never reached.

Raises:
    ValueError: texts with different numbers of slots.

Example:
    >>> metric = evaluate.load("evaluation/metrics/slot_acceptance.py")
    >>> metric.compute(accepted_per_slot=[[3, 1], [1, 1]], reached_per_slot=[[4, 3], [1, 1]], rounds=[4, 1])
    {'unconditional': [0.8, 0.4], 'conditional': [0.8, 0.5]}
"""


def share(accepted, of):
    """`accepted / of`, and 0 where there is nothing to take a share of; arrays that broadcast."""
    return np.asarray(accepted, dtype=float) / np.maximum(of, 1)


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class SlotAcceptance(evaluate.Metric):
    def _info(self):
        counts = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"accepted_per_slot": counts, "reached_per_slot": counts, "rounds": datasets.Value("int64")}
            ),
        )

    def _compute(self, accepted_per_slot, reached_per_slot, rounds):
        slots = {len(counts) for counts in [*accepted_per_slot, *reached_per_slot]}
        if len(slots) > 1:
            raise ValueError(f"accepted_per_slot, reached_per_slot: found {sorted(slots)} slots, wanted equally many")
        accepted = np.sum(accepted_per_slot, axis=0)  # [slots]
        return {
            "unconditional": share(accepted, sum(rounds)).tolist(),
            "conditional": share(accepted, np.sum(reached_per_slot, axis=0)).tolist(),
        }
