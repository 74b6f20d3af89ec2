"""Checks of files and records: what stands in the drafter's folder, in the target's, and what training recorded."""

from __future__ import annotations

from collections.abc import Generator

import torch
from transformers import GenerationConfig

from ...conversion.checkpoint import Checkpoint
from ...utils.fingerprints import text_fingerprint
from ..target_modules import TargetModules, stored_names
from .case import Case
from .record import DRAFTING_FIELDS


def check_config(case: Case) -> Generator[str, None, str]:
    """Every field that changes a draft stands in `config.json`, and the target's epsilons are the target's."""
    config, target = case.drafter.config, case.target.config.get_text_config()
    for name in DRAFTING_FIELDS:
        value = getattr(config, name)
        if case.config_file is not None and case.config_file.get(name) is None and value is not None:
            yield (
                f"config.json: {name}: found no value, wanted one: {value!r} was filled in by default; write what "
                "training used"
            )
    for name, wanted in (("hc_eps", target.hc_eps), ("target_rms_norm_eps", target.rms_norm_eps)):
        if (found := getattr(config, name)) != wanted:
            yield f"config.json: {name}: found {found}, wanted {wanted}, the target's; write that"
    if case.config_file is None:
        return "no config.json at hand"
    return "config.json states every field that changes a draft"


def check_record(case: Case) -> Generator[str, None, str]:
    """The drafter's config is the one that training recorded."""
    recorded = {name: case.recorded(name) for name in DRAFTING_FIELDS}
    for name, wanted in recorded.items():
        found = getattr(case.drafter.config, name)
        if wanted is not None and found != wanted:
            yield f"config.json: {name}: found {found!r}, wanted {wanted!r}, as training recorded; write that"
    compared = sum(wanted is not None for wanted in recorded.values())
    return f"{compared} fields are as training recorded" if compared else "the config of training: not recorded"


def check_finite(case: Case) -> Generator[str, None, str]:
    """No weight is infinite or not a number; nothing else can be said of one that is."""
    for name, model in (("drafter", case.drafter), ("target", case.target)):
        wrong = [key for key, tensor in model.named_parameters() if not tensor.isfinite().all()]
        if wrong:
            yield f"{name}: found numbers that are not finite in {len(wrong)} tensors, as {wrong[0]}, wanted none"
    return "all numbers are finite"


def check_weights(case: Case) -> Generator[str, None, str]:
    """All weights come from the checkpoints: none was left fresh, none was ignored, none has changed since."""
    for name, info in case.loading.items():
        for kind, what in (("missing_keys", "fresh"), ("mismatched_keys", "fresh"), ("unexpected_keys", "aside")):
            if keys := sorted(map(str, info.get(kind) or ())):
                yield (
                    f"{name}: found {len(keys)} tensors that loading left {what}, {keys[0]} among them, wanted none: "
                    "checkpoint and config do not fit (tied weights?)"
                )
    if case.target_folder is None:
        return "none is fresh, none was left aside; the target's checkpoint: not at hand"
    borrowed = TargetModules.of(case.target).tensors()
    names = {name: stored_names(name) for name in borrowed}
    if case.target.config.get_text_config().tie_word_embeddings:
        names["lm_head.weight"] += names["model.embed_tokens.weight"]
    checkpoint = Checkpoint(case.target_folder, set().union(*names.values()))
    for name, tensor in borrowed.items():
        try:
            stored = checkpoint.read(checkpoint.find([[stored_name] for stored_name in names[name]])[0])
        except (ValueError, FileNotFoundError) as error:
            yield f"target: {error}"
            continue
        if not torch.equal(stored.to(tensor.dtype), tensor.detach().cpu()):
            yield (
                f"target: {name}: found other values than in {case.target_folder.name}, wanted the checkpoint's: "
                "it was left fresh or changed; load the target again"
            )
    return f"none is fresh, none was left aside; {len(borrowed)} borrowed tensors equal the checkpoint's"


def check_block(case: Case) -> Generator[str, None, str]:
    """Serving asks for as many drafts as a block holds, or for as many as it is meant to."""
    config, default = case.drafter.config, GenerationConfig._get_default_generation_params()["num_assistant_tokens"]
    most = config.geometry.num_draft_tokens
    wanted = most if case.num_draft_tokens is None else case.num_draft_tokens
    asked: dict[str, int | None] = {"num_draft_tokens": wanted}
    for name, model in (("drafter", case.drafter), ("target", case.target)):
        found = model.generation_config.num_assistant_tokens
        asked[f"num_assistant_tokens of the {name}'s generation config"] = None if found == default else found
    for name in ("num_assistant_tokens", "num_speculative_tokens"):
        asked[f"{name} of the record"] = case.recorded(name)
    for name, found in asked.items():
        if found is not None and found > most:
            yield (
                f"{name}: found {found}, wanted at most {most}: a block of {config.block_size} slots holds no more; "
                "set block_size to what training used, or ask for less"
            )
        elif found is not None and found != wanted:
            yield (
                f"{name}: found {found}, wanted {wanted}, with a block of {config.block_size} slots; set it, or say "
                f"`--num_draft_tokens {found}` if shorter drafts are meant"
            )
    return f"{wanted} drafts a round, with a block of {config.block_size} slots"


def check_chat_template(case: Case) -> Generator[str, None, str]:
    """Training reads before an answer what decoding is given, under the template that was recorded."""
    for row, prompt in enumerate(case.prompts):
        if prompt.problem is not None:
            yield f"row {row}: {prompt.problem}"
            break  # the others have the same
    wanted = case.recorded("chat_template_sha256")
    found = None if case.tokenizer is None else text_fingerprint(case.tokenizer.chat_template)
    if wanted is None:
        return "rows and prompts begin alike; the template of training: not recorded"
    if found != wanted:
        yield (
            f"found a template with the target whose SHA-256 begins {str(found)[:12]}, wanted {wanted[:12]}, as "
            "training recorded: serve with that one, or train again"
        )
    return "rows and prompts begin alike, with the template that training recorded"
