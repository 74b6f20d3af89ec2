"""All checks together, and the verb."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import CONFIG_NAME, cached_file

from ... import modeling_hyperdflash  # noqa: F401  (registers the drafter with AutoModel)
from ...configuration_hyperdflash import HyperDFlashConfig
from ...generation_hyperdflash import check_drafter_fits
from ...utils.chat import add_chat_template
from ...utils.devices import choose_device
from ...utils.models import check_model_kind
from ...utils.provenance import PROVENANCE_FILE, file_fingerprints
from ..run import load_rows
from .arguments import DoctorArguments
from .case import Case, Finding, run_check
from .files import check_block, check_chat_template, check_config, check_finite, check_record, check_weights
from .fits import best_of, fits, read_streams
from .passes import (
    Acceptance,
    check_acceptance,
    check_causality,
    check_labels,
    check_layers,
    check_lm_head,
    check_mask_token,
    check_positions,
    check_rotary,
    measure_acceptance,
)
from .prompts import read_prompt
from .walks import walk

FILE_CHECKS = (check_config, check_record, check_weights, check_block, check_chat_template, check_mask_token)
PASS_CHECKS = (check_labels, check_positions, check_rotary, check_layers, check_lm_head, check_causality)


@dataclass
class Diagnosis:
    """All findings; `acceptance` is `None` where the drafter does not fit the target, or nothing was drafted."""

    findings: list[Finding]
    acceptance: Acceptance | None

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return all(finding.ok for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "ok": self.ok,
            "findings": [asdict(finding) for finding in self.findings],
            "acceptance": None if self.acceptance is None else self.acceptance.to_dict(),
        }


def diagnose(case: Case, max_new_tokens: int = 64) -> Diagnosis:
    """Runs all checks. The models are left as they were, in evaluation mode and with the target frozen.

    Args:
        case: models, prompts and what is known of them; walks, streams and acceptance are made here.
        max_new_tokens: what the target writes for a prompt, at most.
    """
    target, drafter = case.target.eval(), case.drafter.eval()
    try:
        check_drafter_fits(target, drafter)
    except ValueError as error:
        return Diagnosis([Finding("pair", False, str(error)), *run_check(check_record, case)], None)
    finite = run_check(check_finite, case)
    if not finite[0].ok:
        return Diagnosis(finite, None)
    walks = [walk(target, drafter, prompt.ids, max_new_tokens) for prompt in case.prompts]
    case.walks = [each for each in walks if each is not None]
    checks = [check_acceptance, *FILE_CHECKS]
    if case.walks:
        case.streams = read_streams(target, case.walks[0].ids)
        case.acceptance = measure_acceptance(case)
        checks += PASS_CHECKS
    findings = [finding for check in checks for finding in run_check(check, case)]
    if case.walks:
        findings.append(judge_fit(case))
    return Diagnosis(findings, case.acceptance)


def judge_fit(case: Case) -> Finding:
    """Whether the drafter fits the texts best as it is configured: the weights' own word on how they were trained.

    A better setting is reported under the check whose business it is; of several only the best.
    """
    vocabulary = case.target.config.get_text_config().vocab_size
    tokens = [case.recorded("mask_token_id"), HyperDFlashConfig.mask_token_id]
    if case.tokenizer is not None:
        tokens.append(case.tokenizer.mask_token_id)
    tokens = tuple(token for token in tokens if token is not None and token < vocabulary)
    texts = [(text.ids, text.prompt_length) for text in case.walks]
    configured, others = fits(case.target, case.drafter, texts, tokens)
    chance = math.log(vocabulary)
    if better := [
        fit for fit in others if fit.is_better and fit.nats < chance - 1
    ]:  # above, the drafter knows nothing
        better = best_of(better)
        return Finding(
            better.setting.check,
            False,
            f"found that the drafter fits the texts better with {better.setting.what} than as configured "
            f"({better.nats:.2f} nats a draft, {better.gain:.2f} less), wanted the configured setting to fit best: "
            f"{better.setting.advice}",
        )
    if configured.nats >= chance - 1:
        message = (
            f"not judged: the drafter is not trained ({configured.nats:.2f} nats a draft, chance is {chance:.2f})"
        )
    else:
        next_best = max(others, key=lambda fit: fit.gain)
        message = (
            f"of {len(others) + 1} settings none fits better than the configured one, {configured.nats:.2f} nats a "
            f"draft (the next: {next_best.setting.what}, {-next_best.gain:+.2f})"
        )
    return Finding("fit", True, message)


def read_record(args: DoctorArguments) -> dict[str, Any] | None:
    """`args.training`, or the `provenance.json` beside the drafter, or `None` if there is none.

    Raises:
        FileNotFoundError, ValueError: a file that is missing, or holds no mapping.
    """
    path = args.training
    if path is None:
        path = cached_file(args.drafter, PROVENANCE_FILE, _raise_exceptions_for_missing_entries=False)
        if path is None:
            return None
    elif not Path(path).is_file():
        raise FileNotFoundError(f"training: found no file {path!r}, wanted a provenance.json or a YAML file")
    text = Path(path).read_text(encoding="utf-8")
    record = json.loads(text) if str(path).endswith(".json") else yaml.safe_load(text)
    if not isinstance(record, dict):
        raise ValueError(
            f"training: found {type(record).__name__} in {str(path)!r}, wanted a mapping of names to values"
        )
    return record


def drafter_files(folder: str) -> dict[str, str]:
    """File name -> SHA-256 of a local drafter's configuration and weights: what a diagnosis is of."""
    path = Path(folder)
    return file_fingerprints([path / "config.json", *sorted(path.glob("*.safetensors"))]) if path.is_dir() else {}


def run_doctor(args: DoctorArguments) -> dict[str, Any]:
    """Loads the pair and the rows, and returns the [`Diagnosis`] as JSON values, with what was looked at.

    Raises:
        ValueError, OSError: rows, records or models that cannot be read, before the models' weights are.
    """
    for name in ("target", "drafter"):
        check_model_kind(name, getattr(args, name), drafter_types=("hyperdflash",))
    device = choose_device(args.device)
    record = read_record(args)
    rows = load_rows(args.data, args.data_split)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    add_chat_template(tokenizer, args.target)
    prompts = [read_prompt(row, tokenizer) for row in rows.select(range(min(args.rows, len(rows))))]
    vocabulary = AutoConfig.from_pretrained(args.target).get_text_config().vocab_size
    for row, prompt in enumerate(prompts):
        if not prompt.ids or not 0 <= min(prompt.ids) <= max(prompt.ids) < vocabulary:
            found = f"ids up to {max(prompt.ids)}" if prompt.ids else "nothing before the answer"
            raise ValueError(
                f"data: row {row}: found {found}, wanted token ids in 0..{vocabulary - 1} before an answer"
            )

    options = {"dtype": getattr(torch, args.dtype), "output_loading_info": True}
    target, target_loading = AutoModelForCausalLM.from_pretrained(args.target, **options)
    drafter, drafter_loading = AutoModel.from_pretrained(
        args.drafter, trust_remote_code=args.trust_remote_code, **options
    )
    case = Case(
        target=target.to(device),
        drafter=drafter.to(device),
        prompts=prompts,
        tokenizer=tokenizer,
        record=record,
        config_file=HyperDFlashConfig.get_config_dict(args.drafter)[0],
        target_folder=Path(cached_file(args.target, CONFIG_NAME)).parent,  # of a Hub id the snapshot in the cache
        loading={"target": target_loading, "drafter": drafter_loading},
        num_draft_tokens=args.num_draft_tokens,
    )
    looked_at = {"drafter": args.drafter, "target": args.target, "dtype": args.dtype, "rows": len(prompts)}
    looked_at["drafter_files"] = drafter_files(args.drafter)
    return {**looked_at, **diagnose(case, args.max_new_tokens).to_dict()}


__all__ = ["Diagnosis", "diagnose", "drafter_files", "run_doctor"]
