"""The `hyperdflash` command: one verb per task. Every verb takes `--config file.yaml` and flags over it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

EMBEDDED_TARGET = Path(__file__).parent / "checkpoints" / "tiny-target"
EMBEDDED_DRAFTER = Path(__file__).parent / "checkpoints" / "tiny-hyperdflash"

# Written for the demo, in the domains of the embedded target; none is in its training data.
DEMO_PROMPTS = [
    "A baker makes 24 rolls in the morning and twice as many in the afternoon. She sells 50 of them. How many rolls "
    "are left?\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "Write a Python function that returns the sum of the squares of all even numbers in a list.",
    'Does the following sentence make sense?\n"A violinist needs a bow to play a concert."\nOptions:\n- yes\n- no',
    "What does the command `tail` do, and how do I use it?",
    "Tom has 5 boxes with 12 pencils each and gives 15 pencils to his sister. How many pencils does he have now?\n"
    "Please reason step by step, and put your final answer within \\boxed{}.",
    "Write a function to check whether a given string is a palindrome.",
]


@dataclass
class DecodingArguments:
    """How text is decoded: for `demo` and `generate`."""

    max_new_tokens: int = field(default=256, metadata={"help": "Tokens to generate, at most."})
    temperature: float = field(default=0.0, metadata={"help": "0 decodes greedily; above 0 samples."})
    top_k: int | None = field(default=None, metadata={"help": "Sample among the k likeliest tokens only."})
    top_p: float | None = field(default=None, metadata={"help": "Sample within this probability mass only."})
    repetition_penalty: float | None = field(default=None, metadata={"help": "Above 1 discourages repetition."})
    num_draft_tokens: int | None = field(
        default=None, metadata={"help": "Drafts a round; the block's own number by default."}
    )
    thinking: bool = field(
        default=False, metadata={"help": "Open the answer in think mode, where the template has it."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of sampling."})
    dtype: str = field(default="auto", metadata={"help": "float32, bfloat16, float16, or auto: the checkpoint's."})
    device: str | None = field(default=None, metadata={"help": "Device; cuda if there is one, else cpu, by default."})
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run the code in the folders of target and drafter instead of the installed."}
    )
    json: bool = field(default=False, metadata={"help": "Print the result as one JSON document."})

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: found {self.max_new_tokens}, wanted at least 1")
        if not (self.temperature == 0 or 1e-3 <= self.temperature < float("inf")):
            raise ValueError(f"temperature: found {self.temperature}, wanted 0, or a number from 0.001 on")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: found {self.top_p}, wanted above 0 and at most 1")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype: found {self.dtype!r}, wanted one of auto, float32, bfloat16, float16")

    def generation_kwargs(self) -> dict[str, Any]:
        """What `generate` takes for these settings; processors that are not asked for are switched off."""
        kwargs: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": self.temperature > 0}
        if self.temperature > 0:
            kwargs |= {"temperature": self.temperature, "top_k": self.top_k or 0, "top_p": self.top_p or 1.0}
        if self.repetition_penalty is not None:
            kwargs["repetition_penalty"] = self.repetition_penalty
        return kwargs


@dataclass
class DemoArguments(DecodingArguments):
    """`demo`: the embedded pair on built-in prompts."""

    dtype: str = field(default="float32", metadata={"help": "float32, bfloat16, float16, or auto: the checkpoint's."})
    prompts: int = field(default=len(DEMO_PROMPTS), metadata={"help": "How many of the built-in prompts to run."})
    target: str = field(default=str(EMBEDDED_TARGET), metadata={"help": "Target; the embedded one by default."})
    drafter: str = field(default=str(EMBEDDED_DRAFTER), metadata={"help": "Drafter; the embedded one by default."})

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.prompts <= len(DEMO_PROMPTS):
            raise ValueError(f"prompts: found {self.prompts}, wanted 1 to {len(DEMO_PROMPTS)}")


@dataclass
class GenerateArguments(DecodingArguments):
    """`generate`: any target, any drafter, one prompt."""

    target: str = field(default=str(EMBEDDED_TARGET), metadata={"help": "Folder or Hub id of the target."})
    drafter: str | None = field(default=None, metadata={"help": "Folder or Hub id of the drafter; none: target only."})
    prompt: str | None = field(default=None, metadata={"help": "The prompt; `-` reads it from standard input."})
    prompt_file: str | None = field(default=None, metadata={"help": "A file to read the prompt from."})
    raw: bool = field(default=False, metadata={"help": "Take the prompt as it is, without the chat template."})

    def __post_init__(self):
        super().__post_init__()
        if (self.prompt is None) == (self.prompt_file is None):
            raise ValueError("prompt: wanted exactly one of --prompt and --prompt_file (`--prompt -` reads stdin)")
        if self.num_draft_tokens is not None and self.drafter is None:
            raise ValueError(f"num_draft_tokens: found {self.num_draft_tokens} without a drafter, wanted one")

    def read_prompt(self) -> str:
        if self.prompt_file is not None:
            return Path(self.prompt_file).read_text(encoding="utf-8")
        return sys.stdin.read() if self.prompt == "-" else self.prompt


class MarkedStreamer:
    """Prints text as it is decided on; tokens that were drafted and accepted are marked where colour is possible.

    `generate` hands over the prompt, the first token, and then a chunk a round: accepted drafts, then one token of the
    target's own.
    """

    def __init__(self, tokenizer, console):
        self.tokenizer, self.console = tokenizer, console
        self.ids: list[int] = []
        self.chunks = -1
        self.printed = ""

    def put(self, value) -> None:
        self.chunks += 1
        if self.chunks == 0:
            return  # the prompt
        ids = value.flatten().tolist()
        if len(ids) > 1:
            self._print(ids[:-1], "green")
        self._print(ids[-1:], None)

    def _print(self, ids: list[int], style: str | None) -> None:
        self.ids += ids
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if not text.endswith("�"):  # otherwise a character whose bytes have not all come yet
            self._write(text, style)

    def _write(self, text: str, style: str | None) -> None:
        from rich.text import Text

        self.console.print(Text(text[len(self.printed) :], style=style or ""), end="", soft_wrap=True)
        self.printed = text

    def end(self) -> None:
        self._write(self.tokenizer.decode(self.ids, skip_special_tokens=True), None)
        self.console.print()


def load_pair(target: str, drafter: str | None, args: DecodingArguments):
    """(target, tokenizer, drafter or `None`) on `args.device`, in `args.dtype`, ready to generate."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from . import modeling_hyperdflash  # noqa: F401  (registers the drafter with AutoModel)
    from .baselines import modeling_mtp  # noqa: F401  (the same for the MTP module)
    from .utils.chat import add_chat_template
    from .utils.devices import choose_device
    from .utils.models import check_model_kind

    for name, path in (("target", target), ("drafter", drafter)):
        if path is not None:
            check_model_kind(name, path)
    logging.disable_progress_bar()
    device = choose_device(args.device)
    common = {"dtype": args.dtype, "trust_remote_code": args.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(target)
    if not getattr(args, "raw", False):
        add_chat_template(tokenizer, target, trust_remote_code=args.trust_remote_code)
    target_model = AutoModelForCausalLM.from_pretrained(target, **common).to(device).eval()
    drafter_model = None
    if drafter is not None:
        drafter_model = AutoModel.from_pretrained(drafter, **common).to(device).eval()
        if args.num_draft_tokens is not None:
            config = drafter_model.config  # an MTP module has no block
            most = config.geometry.num_draft_tokens if hasattr(config, "block_size") else config.sliding_window - 1
            if not 1 <= args.num_draft_tokens <= most:
                raise ValueError(
                    f"num_draft_tokens: found {args.num_draft_tokens}, wanted 1 to {most}, the drafts of a round"
                )
            drafter_model.generation_config.num_assistant_tokens = args.num_draft_tokens
    return target_model, tokenizer, drafter_model


def encode(tokenizer, prompt: str, args: DecodingArguments, device, raw: bool = False):
    """`input_ids` and `attention_mask` `[1, prompt]` of a user message in chat form, or of the bare text."""
    if raw or not tokenizer.chat_template:
        return tokenizer(prompt, return_tensors="pt").to(device)
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        thinking=args.thinking,
    ).to(device)


def timed_generate(target, inputs, args: DecodingArguments, drafter=None, streamer=None):
    """(new token ids, seconds) of one `generate` call, seeded."""
    import torch
    from transformers import set_seed

    set_seed(args.seed)
    extra = {"assistant_model": drafter} if drafter is not None else {}
    start = time.perf_counter()
    output = target.generate(**inputs, **args.generation_kwargs(), streamer=streamer, **extra)
    if output.device.type == "cuda":
        torch.cuda.synchronize()
    return output[0, inputs["input_ids"].shape[1] :].tolist(), time.perf_counter() - start


def demo(args: DemoArguments) -> int:
    """Decodes built-in prompts with the target alone and with the drafter, and compares text and time."""
    from rich.console import Console
    from rich.rule import Rule
    from rich.table import Table

    console = Console(quiet=args.json, highlight=False)
    target, tokenizer, drafter = load_pair(args.target, args.drafter, args)
    prompts = DEMO_PROMPTS[: args.prompts]
    warm = encode(tokenizer, prompts[0], args, target.device)
    for assistant in (None, drafter):
        target.generate(**warm, max_new_tokens=16, do_sample=False, assistant_model=assistant)

    alone_seconds = drafted_seconds = 0.0
    alone_tokens = drafted_tokens = identical = 0
    total = None
    for prompt in prompts:
        inputs = encode(tokenizer, prompt, args, target.device)
        console.print(Rule(style="dim"))
        console.print(prompt, style="bold", markup=False)
        console.print()
        alone, seconds = timed_generate(target, inputs, args)
        alone_seconds, alone_tokens = alone_seconds + seconds, alone_tokens + len(alone)
        streamer = None if args.json else MarkedStreamer(tokenizer, console)
        drafted, seconds = timed_generate(target, inputs, args, drafter, streamer)
        drafted_seconds, drafted_tokens = drafted_seconds + seconds, drafted_tokens + len(drafted)
        identical += alone == drafted
        record = drafter.last_generation
        total = record if total is None else total + record
        console.print(f"[dim]accepted length {record.accepted_length:.2f}, {record.rounds} rounds[/dim]")

    speedup = (drafted_tokens / drafted_seconds) / (alone_tokens / alone_seconds)
    report = {
        "prompts": len(prompts),
        "identical": identical,
        "accepted_length": total.accepted_length,
        "acceptance_per_slot": total.acceptance_per_slot,
        "speedup": speedup,
        "target_only_tokens_per_second": alone_tokens / alone_seconds,
        "drafted_tokens_per_second": drafted_tokens / drafted_seconds,
        "statistics": total.to_dict(),
    }
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    table = Table(title="HyperDFlash against target-only decoding, same process", show_header=False)
    table.add_row("accepted length (bonus token included)", f"{total.accepted_length:.2f}")
    slots = "  ".join(f"{share:.2f}" for share in total.acceptance_per_slot)
    table.add_row("acceptance by slot", slots)
    table.add_row("target only", f"{report['target_only_tokens_per_second']:.1f} tokens/s")
    table.add_row("with the drafter", f"{report['drafted_tokens_per_second']:.1f} tokens/s")
    table.add_row("speed-up", f"{speedup:.2f}x")
    if args.temperature == 0:
        table.add_row("identical texts", f"{identical} of {len(prompts)}")
    console.print(table)
    console.print("[green]green[/green]: drafted and accepted; the rest is the target's own.")
    return 0


def generate(args: GenerateArguments) -> int:
    """Streams the answer to one prompt, or prints text and statistics as JSON."""
    from rich.console import Console

    prompt = args.read_prompt()
    if not prompt:
        raise ValueError("prompt: found nothing, wanted text")
    target, tokenizer, drafter = load_pair(args.target, args.drafter, args)
    inputs = encode(tokenizer, prompt, args, target.device, args.raw)
    streamer = None if args.json else MarkedStreamer(tokenizer, Console(highlight=False))
    ids, seconds = timed_generate(target, inputs, args, drafter, streamer)
    statistics = drafter.last_generation if drafter is not None else None
    if args.json:
        report = {
            "text": tokenizer.decode(ids, skip_special_tokens=True),
            "new_tokens": len(ids),
            "seconds": seconds,
            "statistics": statistics.to_dict() if statistics else None,
        }
        print(json.dumps(report, ensure_ascii=False, indent=2))
        return 0
    line = f"{len(ids)} tokens, {len(ids) / seconds:.1f} tokens/s"
    if statistics is not None:
        line += f", accepted length {statistics.accepted_length:.2f}"
    print(line, file=sys.stderr)
    return 0


def parse(verb: str, argv: list[str], *dataclass_types: type) -> tuple:
    """The arguments of a verb as instances of its dataclasses, from flags and `--config`."""
    from trl import TrlParser

    argv = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    if argv[-1:] == ["--config"]:
        raise ValueError("config: found nothing behind --config, wanted a YAML file")
    parser = TrlParser(dataclass_types, prog=f"hyperdflash {verb}", description=VERBS[verb][1], allow_abbrev=False)
    parser.error = _refuse
    known = [*parser._option_string_actions, "--config"]
    for word in argv:
        option = word.partition("=")[0]
        if option.startswith("--") and option not in known:
            near = get_close_matches(option, known, n=1) or [f"an option of `hyperdflash {verb} --help`"]
            raise ValueError(f"{option}: found no such option, wanted {near[0]}")
    return parser.parse_args_and_config(args=argv)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def run_demo(argv: list[str]) -> int:
    return demo(*parse("demo", argv, DemoArguments))


def run_generate(argv: list[str]) -> int:
    return generate(*parse("generate", argv, GenerateArguments))


def run_init(argv: list[str]) -> int:
    from .conversion import InitArguments, run_init

    (args,) = parse("init", argv, InitArguments)
    if args.method == "mtp":
        from .baselines import run_init_mtp as run_init
    print(json.dumps(run_init(args), indent=2))
    return 0


def run_export(argv: list[str]) -> int:
    from .conversion import ExportArguments, run_export

    print(json.dumps(run_export(*parse("export", argv, ExportArguments)), indent=2))
    return 0


def run_card(argv: list[str]) -> int:
    from .model_card import CardArguments, run_card

    print(json.dumps(run_card(*parse("card", argv, CardArguments)), indent=2))
    return 0


def run_push(argv: list[str]) -> int:
    from .model_card import PushArguments, run_push

    print(json.dumps(run_push(*parse("push", argv, PushArguments)), indent=2))
    return 0


def run_train(argv: list[str]) -> int:
    from accelerate import PartialState

    from .trainer import HyperDFlashTrainingArguments, TrainArguments, run_train

    metrics = run_train(*parse("train", argv, TrainArguments, HyperDFlashTrainingArguments))
    state = PartialState()
    if state.is_main_process:
        print(json.dumps(metrics, indent=2))
    # Together: a process that ends while another still writes the model takes the connection away from it
    state.wait_for_everyone()
    state.destroy_process_group()
    return 0


def run_regenerate(argv: list[str]) -> int:
    from .trainer import RegenerateArguments, run_regenerate

    print(json.dumps(run_regenerate(*parse("regenerate", argv, RegenerateArguments)), indent=2))
    return 0


def run_eval(argv: list[str]) -> int:
    from .evaluation import EvalArguments, run_eval

    (args,) = parse("eval", argv, EvalArguments)
    report = run_eval(args)
    markdown = report.pop("markdown")
    print(json.dumps(report, indent=2, ensure_ascii=False) if args.json else markdown)
    return 0


def run_bench_serve(argv: list[str]) -> int:
    from .serving.arguments import BenchServeArguments
    from .serving.bench import run_bench_serve
    from .serving.report import markdown_report

    (args,) = parse("bench-serve", argv, BenchServeArguments)
    report = run_bench_serve(args)
    print(json.dumps(report, indent=2) if args.json else markdown_report(report))
    return 0


def run_doctor(argv: list[str]) -> int:
    from .trainer import DoctorArguments, run_doctor

    (args,) = parse("doctor", argv, DoctorArguments)
    report = run_doctor(args)
    if args.json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        print_diagnosis(report)
    return 0 if report["ok"] else 1


def print_diagnosis(report: dict[str, Any]) -> None:
    """One line a finding, then acceptance by slot, in training and in decoding."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    for finding in report["findings"]:
        mark, colour = ("ok   ", "green") if finding["ok"] else ("WRONG", "red")
        console.print(f"[{colour}]{mark}[/{colour}] {finding['check']:<13} ", end="")
        console.print(finding["message"], markup=False)
    if (found := report["acceptance"]) is None:
        return
    title = f"acceptance by slot, {found['rounds']} rounds, {found['drafts']} drafts"
    table = Table("", *(str(slot + 1) for slot in range(len(found["decoding_per_slot"]))), title=title)
    for where in ("training", "decoding"):
        table.add_row(where, *(f"{share:.2f}" for share in found[f"{where}_per_slot"]))
    console.print(table)


VERBS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "bench-serve": (run_bench_serve, "Measure target-only, vanilla DFlash and HyperDFlash behind a vLLM server."),
    "doctor": (run_doctor, "Say whether a drafter decodes as it was trained, and what is wrong if not."),
    "demo": (run_demo, "Run the embedded pair on built-in prompts and compare with target-only decoding."),
    "eval": (run_eval, "Compare systems on benchmark tasks: the paper's tables and figures."),
    "generate": (run_generate, "Answer one prompt with any target and any drafter."),
    "init": (run_init, "Start a drafter from a target's own hc_head gates."),
    "regenerate": (run_regenerate, "Let a target answer prompts: the text that its drafter is trained on."),
    "export": (run_export, "Write a drafter or a target in the layout of an engine, or turn one back."),
    "card": (run_card, "Write a drafter's model card: config, provenance, results of `eval`."),
    "push": (run_push, "Upload a drafter that `doctor` finds sound to the Hub."),
    "train": (run_train, "Train a drafter on text that the target wrote."),
}


# How a verb that was stopped goes on
GOES_ON = {
    "train": "; --resume_from_checkpoint true goes on from the last checkpoint",
    "regenerate": "; the same command goes on",
    "eval": "; the same command goes on",
}

# What libraries raise for bad files and is neither a ValueError nor an OSError; by name, so that none need be imported
BAD_INPUT_ERRORS = {
    "ParserError",  # yaml
    "SafetensorError",
    "ScannerError",  # yaml
    "StrictDataclassClassValidationError",  # a config's fields
    "StrictDataclassFieldValidationError",
}


def usage() -> str:
    lines = [f"  {verb:<11} {text}" for verb, (_, text) in VERBS.items()]
    return "\n".join(
        ["usage: hyperdflash VERB [--config file.yaml] [options]", "", *lines, "", "hyperdflash VERB --help"]
    )


def main(argv: list[str] | None = None) -> int:
    """Runs one verb. Returns the exit code: 0; 1 if `doctor` found a fault; 2 for wrong arguments or
    input, said in one line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    verb, rest = argv[0], argv[1:]
    if verb == "--version":
        from . import __version__

        print(__version__)
        return 0
    if verb not in VERBS:
        near = get_close_matches(verb, VERBS, n=1) or [f"one of {', '.join(VERBS)}"]
        print(f"hyperdflash: verb: found {verb!r}, wanted {near[0]}", file=sys.stderr)
        return 2
    try:
        return VERBS[verb][0](rest)
    except KeyboardInterrupt:
        print(f"hyperdflash {verb}: stopped{GOES_ON.get(verb, '')}", file=sys.stderr)
        return 130
    except Exception as error:
        if not isinstance(error, (ValueError, OSError)) and type(error).__name__ not in BAD_INPUT_ERRORS:
            raise
        print(f"hyperdflash {verb}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
