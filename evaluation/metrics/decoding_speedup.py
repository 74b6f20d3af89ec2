"""Speed-up: tokens a second of a decoding, over those of the target alone."""

import datasets
import evaluate

_DESCRIPTION = """\
Speed-up of a decoding over target-only decoding: the ratio of their tokens a second over the same prompts, measured in
the same process. The two may write different numbers of tokens, as they do when sampling.
"""

_INPUTS = """\
Args:
    tokens: for each text the tokens that the decoding wrote.
    seconds: for each text how long that took, the prompt's own pass included.
    baseline_tokens, baseline_seconds: the same for the target alone.

Returns:
    speedup: `tokens_per_second / baseline_tokens_per_second`.
    tokens_per_second, baseline_tokens_per_second: over all texts together, sums over sums.

Example:
    >>> metric = evaluate.load("evaluation/metrics/decoding_speedup.py")
    >>> metric.compute(tokens=[10, 20], seconds=[1.0, 2.0], baseline_tokens=[10, 20], baseline_seconds=[2.0, 4.0])
    {'speedup': 2.0, 'tokens_per_second': 10.0, 'baseline_tokens_per_second': 5.0}
"""


def speedup(tokens, seconds, baseline_tokens, baseline_seconds):
    """`(tokens / seconds) / (baseline_tokens / baseline_seconds)`; numbers or arrays of equal shape."""
    return (tokens / seconds) / (baseline_tokens / baseline_seconds)


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class DecodingSpeedup(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {
                    "tokens": datasets.Value("int64"),
                    "seconds": datasets.Value("float64"),
                    "baseline_tokens": datasets.Value("int64"),
                    "baseline_seconds": datasets.Value("float64"),
                }
            ),
        )

    def _compute(self, tokens, seconds, baseline_tokens, baseline_seconds):
        sums = [sum(values) for values in (tokens, seconds, baseline_tokens, baseline_seconds)]
        return {
            "speedup": speedup(*sums),
            "tokens_per_second": sums[0] / sums[1],
            "baseline_tokens_per_second": sums[2] / sums[3],
        }
