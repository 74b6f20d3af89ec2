"""Decoding efficiency: the speed-up that was reached, over the one that accepted length and forward times allow."""

import datasets
import evaluate
import numpy as np

_DESCRIPTION = """\
How much of the possible speed-up a speculative decoding loop reaches. A round that emits `accepted_length` tokens and
costs a verification and a draft allows the ideal speed-up `accepted_length * t(1) / (t(verify) + t(draft))`, with t(1)
the target-only seconds a token; efficiency is the measured speed-up over it: what the rest of the loop leaves. With
drafts that cost nothing the limit would be `accepted_length * t(1) / t(verify)`. All are speed-ups behind the first
token of a text: its prompt's pass is the same with drafts and without, and is left out.
"""

_INPUTS = """\
Args:
    tokens, seconds: for each text the tokens that the decoding wrote, and how long that took.
    rounds, accepted: for each text its rounds and its accepted drafts.
    plain_steps: for each text the target steps without a draft, the prompt's own pass not counted.
    prefill_seconds, draft_seconds, verify_seconds: for each text. With `rounds`, `accepted` and `plain_steps` they
        are fields of `GenerationStatistics`.
    baseline_tokens, baseline_seconds, baseline_prefill_seconds: of the target alone, for each text.

Returns:
    efficiency: `speedup / ideal_speedup`.
    speedup: tokens a second, over those of the target alone, behind the first token.
    ideal_speedup: as above; sums over all texts, a plain step counted as a step of verification that gives one token.
    free_draft_speedup: the limit with drafts that cost nothing.

Example:
    >>> metric = evaluate.load("evaluation/metrics/decoding_efficiency.py")
    >>> metric.compute(
    ...     tokens=[41], seconds=[0.6], rounds=[10], accepted=[30], plain_steps=[0], prefill_seconds=[0.1],
    ...     draft_seconds=[0.1], verify_seconds=[0.3], baseline_tokens=[41], baseline_seconds=[1.1],
    ...     baseline_prefill_seconds=[0.1],
    ... )
    {'efficiency': 0.8, 'speedup': 2.0, 'ideal_speedup': 2.5, 'free_draft_speedup': 3.3333333333333335}
"""


def token_seconds(texts, tokens, seconds, prefill_seconds):
    """Seconds a token behind the first of a text; numbers or arrays of equal shape."""
    return (seconds - prefill_seconds) / np.maximum(tokens - texts, 1)


def ideal_speedup(accepted, rounds, plain_steps, seconds_of_steps, target_token_seconds):
    """Tokens of all steps times t(1), over the time of these steps; numbers or arrays of equal shape.

    `seconds_of_steps`: of all verifications and drafts for the ideal, of verifications for the limit of free drafts.
    `target_token_seconds`: t(1).
    """
    return (rounds + accepted + plain_steps) * target_token_seconds / seconds_of_steps


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class DecodingEfficiency(evaluate.Metric):
    def _info(self):
        counts = ("tokens", "rounds", "accepted", "plain_steps", "baseline_tokens")
        times = ("seconds", "prefill_seconds", "draft_seconds", "verify_seconds")
        times += ("baseline_seconds", "baseline_prefill_seconds")
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
        texts = len(columns["tokens"])
        total = {name: sum(values) for name, values in columns.items()}
        alone = token_seconds(texts, *(total[f"baseline_{name}"] for name in ("tokens", "seconds", "prefill_seconds")))
        speedup = alone / token_seconds(texts, total["tokens"], total["seconds"], total["prefill_seconds"])
        counts = (total["accepted"], total["rounds"], total["plain_steps"])
        ideal = ideal_speedup(*counts, total["verify_seconds"] + total["draft_seconds"], alone)
        return {
            "efficiency": float(speedup / ideal),
            "speedup": float(speedup),
            "ideal_speedup": float(ideal),
            "free_draft_speedup": float(ideal_speedup(*counts, total["verify_seconds"], alone)),
        }
