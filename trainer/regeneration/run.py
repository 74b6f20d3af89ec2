"""The verb `regenerate`: from prompts to a file of the target's own answers."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datasets import Dataset
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from ...utils.chat import add_chat_template
from ...utils.devices import choose_device
from ...utils.fingerprints import checkpoint_fingerprints, hub_commit, text_fingerprint, tokenizer_fingerprint
from ...utils.folders import check_model_path
from ...utils.models import check_model_kind
from ...utils.provenance import collect_provenance, file_fingerprints
from .. import shared_key_attention  # noqa: F401  (registers the attention of that name)
from ..run import data_files, read_rows
from .arguments import RegenerateArguments
from .prompts import Conversation, Conversations, PromptRenderer, add_prompts
from .responses import ResponseFiles
from .server import ServerBackend
from .target import TargetBackend

ROW_FORMS = ("messages", "conversations", "prompt")


def run_regenerate(args: RegenerateArguments) -> dict[str, Any]:
    """Asks the target for what `args.output` lacks, and appends each answer when it is finished.

    Returns:
        `rows`, `answer_tokens`, `finish_reasons` and `skipped` (by reason) of the whole output, and under `new` the
        rows and tokens of this run, its seconds and tokens a second.

    Raises:
        ValueError: bad rows, a template that cannot do what is asked, or an output of other settings; before the
            target is loaded.
        OSError: files that cannot be read or written, or a server that is gone.
    """
    if args.server:
        check_model_path("target", args.target)  # of which only the tokenizer is wanted
    else:
        check_model_kind("target", args.target, args.target_revision)
    if args.device is not None:
        choose_device(args.device)
    rows, data = _load_rows(args)
    tokenizer = _load_tokenizer(args)
    renderer = PromptRenderer(tokenizer, args, _end_ids(args))
    settings = _settings(args, tokenizer, renderer, data)
    rows = rows.shuffle(seed=args.seed)
    if args.max_rows is not None:
        rows = rows.select(range(min(args.max_rows, len(rows))))

    provenance = collect_provenance(arguments=asdict(args), seed=args.seed)
    with ResponseFiles(args.output, settings, provenance, args.turns == "every") as files:
        rows = add_prompts(rows, renderer)
        conversations = Conversations(rows.select(_still_to_ask(rows, files)), renderer)
        rows_before, tokens_before = files.answers.rows, files.answers.tokens
        seconds = 0.0
        if len(conversations):
            if args.server:
                backend = ServerBackend(args, tokenizer, renderer.end_ids)
            else:
                backend = _load_target(args, renderer.end_ids)
            seconds = _ask(backend, conversations, files, total=len(rows))
        tokens = files.answers.tokens - tokens_before
        return {
            "output": args.output,
            "rows": files.answers.rows,
            "answer_tokens": files.answers.tokens,
            "finish_reasons": dict(files.answers.finish_reasons),
            "skipped": files.skip_reasons,
            "new": {
                "rows": files.answers.rows - rows_before,
                "answer_tokens": tokens,
                "seconds": round(seconds, 2),
                "tokens_per_second": round(tokens / seconds, 1) if seconds else 0.0,
            },
        }


def _still_to_ask(rows: Dataset, files: ResponseFiles) -> list[int]:
    """Indices of the rows that `files` lacks; those that cannot be asked are recorded there instead."""
    done, indices = files.done, []
    for index, (row_id, refusal) in enumerate(zip(rows["id"], rows["refusal"])):
        if row_id in done:
            continue
        if refusal:
            reason, _, detail = refusal.partition(": ")
            files.skip(row_id, reason, detail or None)
        else:
            indices.append(index)
    return indices


def _ask(
    backend: ServerBackend | TargetBackend, conversations: Conversations, files: ResponseFiles, total: int
) -> float:
    """Writes each conversation as it ends, under a progress bar over `total` rows; returns the seconds it took."""
    tokens_before, start = files.answers.tokens, time.perf_counter()
    done = total - len(conversations)
    with tqdm(total=total, initial=done, unit="row", desc="regenerate", smoothing=0.05) as progress:

        def finish(conversation: Conversation) -> None:
            files.write(conversation)
            rate = (files.answers.tokens - tokens_before) / (time.perf_counter() - start)
            progress.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
            progress.update()

        backend.run(conversations, finish)
    return time.perf_counter() - start


def _load_rows(args: RegenerateArguments) -> tuple[Dataset, Any]:
    """The rows with the columns of their form, their `index` and, if no two have the same, their `id`; and what the
    data is identified by."""
    rows = read_rows(args.data, args.data_split)
    for column in ROW_FORMS:
        if column in rows.column_names:
            others = [name for name in ("id", "tools", "chat_template_kwargs") if name in rows.column_names]
            rows = rows.select_columns([column, *others])
            if "id" in others and len({value for value in rows["id"] if value is not None}) < len(rows):
                rows = rows.remove_columns("id")
            if files := data_files(args.data):
                identity = file_fingerprints(files)
            else:
                identity = _digest(json.dumps(row, sort_keys=True, default=str).encode() for row in rows)
            return rows.add_column("index", list(range(len(rows)))), identity
    raise ValueError(f"data: found the columns {rows.column_names} in {args.data!r}, wanted one of {ROW_FORMS}")


def _load_tokenizer(args: RegenerateArguments) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(
        args.tokenizer or args.target, revision=None if args.tokenizer else args.target_revision
    )
    if args.chat_template is not None:
        tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8")
    elif not args.raw:
        add_chat_template(tokenizer, args.target, args.target_revision)
    if not tokenizer.chat_template and not args.raw:
        raise ValueError(
            f"chat_template: found none in the tokenizer of {args.tokenizer or args.target!r}, wanted a file with "
            "one, or raw for prompts that are strings"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError("tokenizer: found no end-of-sequence token, wanted the one that ends an answer")
    return tokenizer


def _end_ids(args: RegenerateArguments) -> set[int]:
    """The end tokens that the target's generation config has, if there is one."""
    try:
        ends = GenerationConfig.from_pretrained(args.target, revision=args.target_revision).eos_token_id
    except OSError:
        return set()
    return set(ends) if isinstance(ends, list) else {ends} - {None}


def _load_target(args: RegenerateArguments, end_ids: set[int]) -> TargetBackend:
    attention = {"attn_implementation": args.attn_implementation} if args.attn_implementation else {}
    target = AutoModelForCausalLM.from_pretrained(
        args.target,
        revision=args.target_revision,
        dtype=args.target_dtype,
        **attention,
        **(args.target_init_kwargs or {}),
    ).eval()
    if not hasattr(target, "hf_device_map"):
        target.to(choose_device(args.device))
    return TargetBackend(
        target,
        end_ids=end_ids,
        max_new_tokens=args.max_new_tokens,
        top_p=args.top_p,
        batch_size=args.batch_size,
        length_spread=args.length_spread,
        seed=args.seed,
    )


def _settings(
    args: RegenerateArguments, tokenizer: PreTrainedTokenizerBase, renderer: PromptRenderer, data: Any
) -> dict[str, Any]:
    """What a rerun must have in common with the run that it continues."""
    return args.sampling | {
        "target": _target_identity(args),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "chat_template": text_fingerprint(tokenizer.chat_template),
        "thinking_variable": renderer.thinking_variable,
        "thinking_share": args.thinking_share,
        "max_prompt_length": args.max_prompt_length,
        "turns": args.turns,
        "raw": args.raw,
        "cut_answers": args.cut_answers,
        "data": data,
    }


def _target_identity(args: RegenerateArguments) -> str | dict[str, str]:
    """The target's weights, as far as can be told without reading them all: of a folder the fingerprints of its files,
    the commit of a Hub id; on a server, its name there."""
    if args.server:
        return args.server_model or args.target
    return checkpoint_fingerprints(args.target) or hub_commit(args.target, args.target_revision) or args.target


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


__all__ = ["run_regenerate"]
