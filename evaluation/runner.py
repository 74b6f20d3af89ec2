"""The verb `eval`: every system on every prompt, in one process and in turns, then the report."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from .. import modeling_hyperdflash  # noqa: F401  (registers the drafter and installs the hooks)
from ..baselines import modeling_mtp  # noqa: F401  (registers the MTP module)
from ..trainer.regeneration.arguments import RegenerateArguments
from ..trainer.regeneration.prompts import PromptRenderer
from ..utils.chat import add_chat_template
from ..utils.devices import choose_device
from ..utils.fingerprints import checkpoint_fingerprints, text_fingerprint, tokenizer_fingerprint
from ..utils.models import check_model_kind
from ..utils.provenance import collect_provenance
from .arguments import MODES, EvalArguments
from .records import RecordFile, read_records
from .report import write_report
from .systems import PROMPT_LOOKUP, TARGET, System, load_assistants, read_systems
from .tasks import Prompt, load_prompts

THINKING_MODE = MODES[1]
WARM_UP_TOKENS = 32


def run_eval(args: EvalArguments) -> dict[str, Any]:
    """Decodes what `args.output` lacks, then writes the report on all that it has.

    Returns:
        The report, as in `report.json`, and under `markdown` the text of `report.md`.

    Raises:
        ValueError: bad options, tasks, systems, or an output of other settings; before a model is loaded.
        OSError: files that cannot be read or written, or a Hub that cannot be reached.
    """
    if args.report_only:
        records, heads = read_records(args.records or [args.output])
        return write_report(Path(args.output), records, heads, args.bootstrap, args.seed)

    check_model_kind("target", args.target)
    device = choose_device(args.device)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    systems = read_systems(args.systems, args.target, args.trust_remote_code)
    target_type = AutoConfig.from_pretrained(args.target, trust_remote_code=args.trust_remote_code).model_type
    if target_type != "deepseek_v4" and any(system.name == PROMPT_LOOKUP for system in systems):
        raise ValueError(f"systems: found {PROMPT_LOOKUP} for a target of type {target_type!r}, wanted 'deepseek_v4'")
    prompts = load_prompts(args.tasks, args.data, args.per_task)
    renderer = _make_renderer(args)
    settings = _settings(args, device, systems, prompts, renderer)
    if args.shard is not None:
        first, step = map(int, args.shard.split("/"))
        prompts = prompts[first::step]

    with RecordFile(Path(args.output), args.shard, settings) as file:
        evaluation = Evaluation(args, systems, prompts, renderer, file)
        if evaluation.left:
            logging.disable_progress_bar()
            options = {"dtype": args.dtype, "trust_remote_code": args.trust_remote_code}
            target = AutoModelForCausalLM.from_pretrained(args.target, **options).to(device).eval()
            load_assistants(systems, args.dtype, device, args.trust_remote_code)
            evaluation.warm_up(target)
            file.add_run(
                collect_provenance(
                    target=args.target,
                    systems={system.label: system.path for system in systems},
                    parameters=_count_parameters(target, systems),
                    dtype=str(target.dtype).removeprefix("torch."),
                    machine=describe_machine(device),
                )
            )
            evaluation.run(target)
    records, heads = read_records([args.output])
    return write_report(Path(args.output), records, heads, args.bootstrap, args.seed)


class Evaluation:
    """All texts of a run: which there are, which are left, and the loop that writes them.

    Prompt by prompt, and for each in all modes and at all temperatures, turn by turn, the systems decode one after the
    other; the order rotates, so that a drift of the machine hits all alike. A turn's prompt holds the system's own
    answers to the turns before it. Greedy texts are compared with the target's.
    """

    def __init__(
        self,
        args: EvalArguments,
        systems: list[System],
        prompts: list[Prompt],
        renderer: PromptRenderer,
        file: RecordFile,
    ):
        self.args, self.systems, self.prompts, self.renderer, self.file = args, systems, prompts, renderer, file
        self.conditions = [(mode, temperature) for mode in args.modes for temperature in args.temperatures]
        answers = sum(len(prompt.parts) for prompt in prompts)
        self.total = answers * len(self.conditions) * len(systems)

    @property
    def left(self) -> int:
        """How many texts are not there yet."""
        return self.total - len(self.file.records)

    def warm_up(self, target: PreTrainedModel) -> None:
        """Each system decodes a few tokens, greedy and sampled: what happens only once shall not be measured.

        Raises:
            ValueError: an assistant that does not fit the target, or cannot draft so many tokens.
        """
        input_ids = torch.tensor([self.renderer.render(self.prompts[0].parts[0], False, {})], device=target.device)
        length = min(WARM_UP_TOKENS, self.args.max_new_tokens)
        for temperature in self.args.temperatures:
            for system in self.systems:
                kwargs = self._generate_kwargs(temperature) | {"max_new_tokens": length}
                system.decode(target, input_ids, self.args.seed, **kwargs)

    def run(self, target: PreTrainedModel) -> None:
        """Appends a record for each text that is left, under a progress bar with rate and end time."""
        done, seconds, tokens = len(self.file.records), 0.0, 0
        with tqdm(total=self.total, initial=done, unit="text", desc="eval", smoothing=0.05) as progress:
            for record in self._decode_all(target):
                seconds, tokens = seconds + record["seconds"], tokens + record["tokens"]
                progress.set_postfix_str(f"{tokens / seconds:.0f} tokens/s", refresh=False)
                progress.update()

    def _decode_all(self, target: PreTrainedModel) -> Iterator[dict[str, Any]]:
        for place, prompt in enumerate(self.prompts):
            for number, condition in enumerate(self.conditions):
                shift = (place + number) % len(self.systems)
                order = self.systems[shift:] + self.systems[:shift]
                for turn in range(len(prompt.parts)):
                    yield from self._decode_turn(target, prompt, turn, condition, order)

    def _decode_turn(
        self,
        target: PreTrainedModel,
        prompt: Prompt,
        turn: int,
        condition: tuple[str, float],
        order: list[System],
    ) -> Iterator[dict[str, Any]]:
        mode, temperature = condition
        waiting: list[dict[str, Any]] = []  # greedy texts that the target's is to be compared with, once it is there
        for system in order:
            if (prompt.task, prompt.id, turn, mode, temperature, system.label) in self.file.records:
                continue
            record = self._decode(target, prompt, turn, condition, system)
            yield record
            waiting.append(record)
            reference = self.file.records.get((prompt.task, prompt.id, turn, mode, temperature, TARGET))
            if system.name == TARGET:
                reference = record
            if temperature == 0 and reference is None:
                continue
            for record in waiting:
                if temperature == 0:
                    record |= self._compare(target, prompt, record, reference)
                self.file.append(record)
            waiting = []

    def _decode(
        self,
        target: PreTrainedModel,
        prompt: Prompt,
        turn: int,
        condition: tuple[str, float],
        system: System,
    ) -> dict[str, Any]:
        mode, temperature = condition
        prompt_ids = self._prompt_ids(prompt, turn, condition, system.label)
        digest = hashlib.sha256(json.dumps([self.args.seed, prompt.task, prompt.id, turn, *condition]).encode())
        decoded = system.decode(
            target,
            torch.tensor([prompt_ids], device=target.device),
            int.from_bytes(digest.digest()[:4], "big") >> 1,
            **self._generate_kwargs(temperature),
        )
        return {
            "task": prompt.task,
            "id": prompt.id,
            "turn": turn,
            "turns": len(prompt.parts),
            "mode": mode,
            "temperature": temperature,
            "system": system.label,
            "prompt_tokens": len(prompt_ids),
            "tokens": len(decoded.ids),
            "seconds": decoded.seconds,
            "cpu_seconds": decoded.cpu_seconds,
            "finish_reason": "stop" if decoded.ids[-1] in self.renderer.end_ids else "length",
            "identical": None,
            "margin": None,
            "statistics": decoded.statistics.to_dict(),
            "ids": decoded.ids,
        }

    def _prompt_ids(self, prompt: Prompt, turn: int, condition: tuple[str, float], label: str) -> list[int]:
        """What the system is given at `turn`: all parts up to it, with its own answers between them."""
        messages, thinking = list(prompt.parts[0]), condition[0] == THINKING_MODE
        for earlier in range(turn):
            answer = self.file.records[(prompt.task, prompt.id, earlier, *condition, label)]
            messages += [self.renderer.message(answer["ids"], thinking), *prompt.parts[earlier + 1]]
        return self.renderer.render(messages, thinking, {})

    def _compare(
        self, target: PreTrainedModel, prompt: Prompt, record: dict[str, Any], reference: dict[str, Any]
    ) -> dict[str, Any]:
        """`identical` to the target's text, and the `margin` of the two tokens' logits where they part.

        The margin is of one full forward of the target: near 0 is a tie that rounding decides. `None` for texts that
        are identical, and for those whose prompts already differ, after an earlier turn that parted.
        """
        ids, wanted = record["ids"], reference["ids"]
        condition = (record["mode"], record["temperature"])
        given, same = (
            self._prompt_ids(prompt, record["turn"], condition, each["system"]) for each in (record, reference)
        )
        if given != same:
            return {"identical": False}
        at = next((place for place, pair in enumerate(zip(ids, wanted)) if pair[0] != pair[1]), None)
        if at is None:
            return {"identical": ids == wanted}
        with torch.inference_mode():
            logits = target(torch.tensor([given + wanted[:at]], device=target.device), logits_to_keep=1).logits
        return {"identical": False, "margin": abs(float(logits[0, -1, ids[at]] - logits[0, -1, wanted[at]]))}

    def _generate_kwargs(self, temperature: float) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"max_new_tokens": self.args.max_new_tokens, "do_sample": temperature > 0}
        if temperature > 0:
            kwargs |= {"temperature": temperature, "top_k": 0, "top_p": self.args.top_p}
        return kwargs


def _make_renderer(args: EvalArguments) -> PromptRenderer:
    tokenizer = AutoTokenizer.from_pretrained(args.target, trust_remote_code=args.trust_remote_code)
    if args.chat_template is not None:
        tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8")
    add_chat_template(tokenizer, args.target, trust_remote_code=args.trust_remote_code)
    if not tokenizer.chat_template:
        raise ValueError(f"chat_template: found none in the tokenizer of {args.target!r}, wanted a file with one")
    options = RegenerateArguments(target=args.target, data="", output="", thinking_variable=args.thinking_variable)
    try:
        end_ids = GenerationConfig.from_pretrained(args.target).eos_token_id
    except OSError:  # the target has no generation config
        end_ids = None
    end_ids = set(end_ids) if isinstance(end_ids, list) else {end_ids} - {None}
    renderer = PromptRenderer(tokenizer, options, end_ids)
    if THINKING_MODE in args.modes and renderer.thinking_variable is None:
        raise ValueError(
            f"modes: found {THINKING_MODE!r} and a chat template without a variable for it, wanted its name as "
            "thinking_variable, or non-think alone"
        )
    return renderer


def _settings(
    args: EvalArguments, device: str, systems: list[System], prompts: list[Prompt], renderer: PromptRenderer
) -> dict[str, Any]:
    """What the records depend on, as JSON values."""
    questions = json.dumps([[prompt.task, prompt.id, prompt.parts] for prompt in prompts], sort_keys=True)
    return {
        "target": checkpoint_fingerprints(args.target) or args.target,
        "tokenizer": tokenizer_fingerprint(renderer.tokenizer),
        "chat_template": text_fingerprint(renderer.tokenizer.chat_template),
        "thinking_variable": renderer.thinking_variable,
        "systems": {system.label: system.identity for system in systems},
        "tasks": list(dict.fromkeys(prompt.task for prompt in prompts)),
        "per_task": args.per_task,
        "prompts": text_fingerprint(questions),
        "shard": args.shard,
        "modes": args.modes,
        "temperatures": args.temperatures,
        "top_p": args.top_p,
        "max_new_tokens": args.max_new_tokens,
        "seed": args.seed,
        "dtype": args.dtype,
        "device": device,
        "threads": torch.get_num_threads(),
    }


def _count_parameters(target: PreTrainedModel, systems: list[System]) -> dict[str, int]:
    models = {TARGET: target} | {system.label: system.assistant for system in systems if system.assistant is not None}
    return {label: model.num_parameters() for label, model in models.items()}


def describe_machine(device: str) -> str:
    """The processor, its number of cores, and the accelerator if there is one."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    machine = f"{name}, {os.cpu_count()} cores, {platform.system()}"
    if device.startswith("cuda"):
        machine += f", {torch.cuda.get_device_name(device)}"
    return machine


__all__ = ["Evaluation", "describe_machine", "run_eval"]
