"""Accepted length: how many tokens a verification round emits, with and without the bonus token."""

import datasets
import evaluate
import numpy as np

_DESCRIPTION = """\
Mean accepted length of speculative decoding. A round is one draft and its verification by one step of the target; it
emits the accepted drafts and one token of the target's own, the bonus token.
"""

_CITATION = """\
@article{hyperdflash2026,
  title={HyperDFlash: MHC-Aligned Block Speculative Decoding with Gated Residual Reduction},
  author={Lin, Luxi and Peng, Shuang and Ma, Rui and Hua, Junhao and Fan, Shuwei and Qin, Zhengda and Wang, Qiang and
          Sun, Hongjian and Chen, Fangmin and Liu, Songwei},
  journal={arXiv preprint arXiv:2606.26744},
  year={2026}
}
"""

_INPUTS = """\
Args:
    accepted_per_round: for each text a list: accepted drafts, round by round, as in `GenerationStatistics`.

Returns:
    accepted_length: tokens a round with the bonus token, `1 + accepted / rounds`: the paper's tau (section 3.4).
    accepted_drafts: without it, `accepted / rounds`.
    rounds, accepted: of all texts together. A text of many rounds weighs more than one of few.

Example:
    >>> metric = evaluate.load("evaluation/metrics/accepted_length.py")
    >>> metric.compute(accepted_per_round=[[3, 0, 6], [1]])
    {'accepted_length': 3.5, 'accepted_drafts': 2.5, 'rounds': 4, 'accepted': 10}
"""


def accepted_length(accepted, rounds):
    """`1 + accepted / rounds`, and 1 where there was no round; numbers or arrays of equal shape."""
    return 1 + np.asarray(accepted, dtype=float) / np.maximum(rounds, 1)


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class AcceptedLength(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"accepted_per_round": datasets.Sequence(datasets.Value("int64"))}),
        )

    def _compute(self, accepted_per_round):
        rounds = sum(len(accepted) for accepted in accepted_per_round)
        accepted = sum(sum(accepted) for accepted in accepted_per_round)
        length = float(accepted_length(accepted, rounds))
        return {
            "accepted_length": length,
            "accepted_drafts": length - 1,
            "rounds": rounds,
            "accepted": accepted,
        }
