"""Decoding efficiency: the speed-up that was reached, over the one that accepted length and forward times allow."""

import datasets
import evaluate
import numpy as np

_DESCRIPTION = """\
How much of the possible speed-up a speculative decoding loop reaches. A round that emits `accepted_length` tokens and
costs a verification and a draft allows the ideal speed-up `accepted_length * t(1) / (t(verify) + t(draft))`, with t(1)
the target-only seconds a token; efficiency is the measured speed-up over it: what the rest of the loop leaves. With
drafts that cost nothing the limit would be `accepted_length * t(1) / t(verify)`.
"""

_INPUTS = """\
Args:
    tokens, seconds: for each text the tokens that the decoding wrote, and how long that took.
    rounds, accepted: for each text its rounds and its accepted drafts.
    plain_steps: for each text the target steps without a draft, the prompt's own pass not counted.
    draft_seconds, verify_seconds: for each text. With `rounds`, `accepted` and `plain_steps` fields of
        `GenerationStatistics`.
    baseline_tokens, baseline_seconds: tokens and seconds of the target alone.

Returns:
    efficiency: `speedup / ideal_speedup`.
    speedup: see `decoding_speedup`.
    ideal_speedup: as above; sums over all texts, a plain step counted as a step of verification.
    free_draft_speedup: the limit with drafts that cost nothing.

Example:
    >>> metric = evaluate.load("evaluation/metrics/decoding_efficiency.py")
    >>> metric.compute(
    ...     tokens=[40], seconds=[0.5], rounds=[10], accepted=[30], plain_steps=[0], draft_seconds=[0.1],
    ...     verify_seconds=[0.3], baseline_tokens=[40], baseline_seconds=[1.0],
    ... )
    {'efficiency': 0.8, 'speedup': 2.0, 'ideal_speedup': 2.5, 'free_draft_speedup': 3.3333333333333335}
"""


def ideal_speedup(accepted, rounds, plain_steps, seconds_of_steps, baseline_tokens, baseline_seconds):
    """`accepted_length * t(1) / t(step)`; numbers or arrays of equal shape.

    `seconds_of_steps`: of all verifications and drafts for the ideal, of verifications for the limit of free drafts.
    """
    length = 1 + accepted / np.maximum(rounds, 1)
    return length * (baseline_seconds / baseline_tokens) * (rounds + plain_steps) / seconds_of_steps


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class DecodingEfficiency(evaluate.Metric):
    def _info(self):
        counts = ("tokens", "rounds", "accepted", "plain_steps", "baseline_tokens")
        times = ("seconds", "draft_seconds", "verify_seconds", "baseline_seconds")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {name: datasets.Value("int64") for name in counts}
                | {name: datasets.Value("float64") for name in times}
            ),
        )

    def _compute(self, **columns):
        total = {name: sum(values) for name, values in columns.items()}
        baseline = (total["baseline_tokens"], total["baseline_seconds"])
        rounds = (total["accepted"], total["rounds"], total["plain_steps"])
        ideal = ideal_speedup(*rounds, total["verify_seconds"] + total["draft_seconds"], *baseline)
        speedup = (total["tokens"] / total["seconds"]) / (baseline[0] / baseline[1])
        return {
            "efficiency": float(speedup / ideal),
            "speedup": speedup,
            "ideal_speedup": float(ideal),
            "free_draft_speedup": float(ideal_speedup(*rounds, total["verify_seconds"], *baseline)),
        }
