"""The ablation grid on the tiny target: source x reducer x gates x KL teacher, each trained alike and from scratch.

    python recipes/tiny/ablation.py --data runs/responses/train.jsonl --prompts DATA/eval --output runs/ablation

Each cell is `hyperdflash init` and `hyperdflash train` with the settings of `ablation.yaml`, and nothing else; the
commands stand in each folder's `provenance.json`. All cells of a seed see the same rows and anchors in the same order.
Ten times in a run their acceptance is measured on the target's own greedy answers to held-out prompts
(`heldout.jsonl`, made first by `hyperdflash regenerate`), behind the same anchors for all cells of a seed. Writes
`ablation.json` and `ablation.md`. The same command again goes on where it stopped; `--shard 0/2` and `--shard 1/2`
share the cells between two processes. Options that are not listed go to `hyperdflash train`, in every cell:
`--max_steps 3000`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

from hyperdflash.evaluation.tasks import load_prompts
from hyperdflash.utils.folders import whole_file
from hyperdflash.utils.provenance import collect_provenance

HERE = Path(__file__).resolve().parent
GATES = ["--context_source", "pre_hc_head", "--reducer", "hc_gate"]
FC = ["--reducer", "fc", "--path_norm", "none"]
LAYERS = ["--context_source", "multi_layer", "--target_layer_ids", "0", "1", "2", *FC]
LAST_LAYERS = ["--context_source", "multi_layer", "--target_layer_ids", "1", "2", "3", *FC]  # 3 is pre_hc_head
PARALLEL, SEQUENTIAL = ["--sequential_head_size", "0"], ["--sequential_head_size", "384"]
CONDITIONS = {  # options of `init`
    "pre_hc_head, target's gates": [*GATES, *PARALLEL],
    "pre_hc_head, fresh gates": [*GATES, "--gate_start", "fresh", *PARALLEL],
    "pre_hc_head, fc": ["--context_source", "pre_hc_head", *FC, *PARALLEL],
    "multi_layer, fc": [*LAYERS, *PARALLEL],
    "multi_layer with the last, fc": [*LAST_LAYERS, *PARALLEL],
    "pre_hc_head, target's gates, sequential head": [*GATES, *SEQUENTIAL],
    "multi_layer, fc, sequential head": [*LAYERS, *SEQUENTIAL],
}
TEACHERS = {  # options of `train`
    "none": ["--kl_weight", "0"],
    "mean": ["--kl_teacher", "mean"],
    "hc_head": ["--kl_teacher", "hc_head"],
}
SHARES = (0.1, 0.3, 1.0)  # of the training


def run(verb: str, *words: str) -> None:
    """`hyperdflash VERB WORDS`. Raises `SystemExit` if it fails."""
    print("hyperdflash", verb, *words, flush=True)
    if subprocess.run([sys.executable, "-m", "hyperdflash.cli", verb, *words], stdout=subprocess.DEVNULL).returncode:
        raise SystemExit(f"{verb} failed: see above")


def check_settings(args: argparse.Namespace) -> None:
    """Makes the output folder, or checks that what lies there was made with these settings.

    Raises:
        SystemExit: it was made with others.
    """
    args.output.mkdir(parents=True, exist_ok=True)
    settings = {"target": args.target, "data": args.data, "prompts": args.prompts, "per_task": args.per_task}
    settings |= {"options": args.options, "conditions": CONDITIONS, "teachers": TEACHERS}
    settings["recipes"] = {name: (HERE / name).read_text(encoding="utf-8") for name in ("init.yaml", "ablation.yaml")}
    file = args.output / "settings.json"
    if not file.exists():
        with whole_file(file) as path:
            Path(path).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for name, found in json.loads(file.read_text(encoding="utf-8")).items():
        if found != settings[name]:
            raise SystemExit(f"{name}: found {settings[name]!r}, wanted {found!r}, as in {file}; or another output")


def make_held_out(args: argparse.Namespace) -> str:
    """The target's greedy answers to the first turns of the benchmark prompts, half of them in think mode."""
    rows, prompts = args.output / "heldout.jsonl", args.output / "prompts.jsonl"
    if not prompts.exists():
        with whole_file(prompts) as path:
            lines = (
                json.dumps({"id": f"{prompt.task}/{prompt.id}", "prompt": prompt.parts[0]})
                for prompt in load_prompts((), args.prompts, args.per_task)
            )
            Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ["--temperatures", "0", "--thinking_share", "0.5", "--max_new_tokens", "160"]
    options += ["--max_prompt_length", "320"]
    options += ["--batch_size", "64", "--length_spread", "8", "--target_dtype", "float32"]
    with FileLock(args.output / "heldout.lock"):  # another shard may be at it
        run("regenerate", "--target", args.target, "--data", str(prompts), "--output", str(rows), *options)
    return str(rows)


def train_cell(args: argparse.Namespace, condition: str, teacher: str, seed: int, held_out: str) -> None:
    """Trains one cell, unless it has been."""
    folder = cell_folder(args, condition, teacher, seed)
    if read_cell(folder) is not None:
        return
    start = folder.with_name(f"{folder.name}-start")
    if not start.exists():
        options = [*CONDITIONS[condition], "--seed", str(seed)]
        run("init", "--config", str(HERE / "init.yaml"), "--target", args.target, "--output", str(start), *options)
    words = ["--config", str(HERE / "ablation.yaml"), "--drafter", str(start), "--target", args.target]
    words += ["--data", args.data, "--eval_data", held_out, "--output_dir", str(folder)]
    words += [*TEACHERS[teacher], *args.options]
    if args.states_cache:
        options = CONDITIONS[condition]
        source = "-".join(word for word in options[1 : options.index("--reducer")] if not word.startswith("-"))
        words += ["--states_cache", str(args.states_cache / source)]
    run("train", *words, "--seed", str(seed), "--disable_tqdm", "true", "--resume_from_checkpoint", "true")


def cell_folder(args: argparse.Namespace, condition: str, teacher: str, seed: int) -> Path:
    return args.output / f"{list(CONDITIONS).index(condition)}-{teacher}-{seed}"


def read_cell(folder: Path) -> dict[str, dict[str, float]] | None:
    """After each share of the training `accepted_length` and `acceptance_1` to `_6`; `None` if it is not done."""
    if not (folder / "trainer_state.json").is_file():
        return None
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    evaluations = {entry["step"]: entry for entry in state["log_history"] if "eval_accepted_length" in entry}
    cell = {}
    for share in SHARES:
        entry = evaluations[min(evaluations, key=lambda step: abs(step - share * state["max_steps"]))]
        names = [name for name in entry if name.startswith(("eval_acceptance_", "eval_accepted_length", "eval_ce"))]
        cell[f"{share:.0%}"] = {name.removeprefix("eval_"): entry[name] for name in names}
    return cell


def write_report(args: argparse.Namespace) -> None:
    """`ablation.json` and `ablation.md`, of the cells that are done."""
    cells = {
        (condition, teacher): {
            seed: cell for seed in args.seeds if (cell := read_cell(cell_folder(args, condition, teacher, seed)))
        }
        for condition, teacher in itertools.product(CONDITIONS, TEACHERS)
    }
    shares = [f"{share:.0%}" for share in SHARES]
    columns = ["source, reducer", "KL teacher", *(f"{share} of training" for share in shares), "slots 1 to 6, end"]
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for (condition, teacher), seeds in cells.items():
        if not seeds:
            continue
        lengths = [[cell[share]["accepted_length"] for cell in seeds.values()] for share in shares]
        texts = [f"{statistics.mean(values):.2f}" + spread(values) for values in lengths]
        slots = [
            statistics.mean(cell["100%"][f"acceptance_{slot}"] for cell in seeds.values()) for slot in range(1, 7)
        ]
        lines.append(
            f"| {condition} | {teacher} | {' | '.join(texts)} | {' '.join(f'{slot:.2f}' for slot in slots)} |"
        )
    report = collect_provenance(
        seeds=args.seeds,
        cells=[
            {"condition": condition, "teacher": teacher, "seed": seed, "acceptance": cell}
            for (condition, teacher), seeds in cells.items()
            for seed, cell in seeds.items()
        ],
    )
    with whole_file(args.output / "ablation.json") as path:
        Path(path).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    with whole_file(args.output / "ablation.md") as path:
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def spread(values: list[float]) -> str:
    return f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="checkpoints/tiny-target")
    parser.add_argument(
        "--data", required=True, help="the target's own answers, as `hyperdflash regenerate` writes them"
    )
    parser.add_argument("--prompts", required=True, help="folder of TASK.jsonl files with held-out prompts")
    parser.add_argument("--per_task", type=int, default=20, help="held-out prompts of each file")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--states_cache", type=Path, help="folder to keep the target's states in, a source each")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="do each N-th cell, from the I-th")
    args, args.options = parser.parse_known_args()
    first, step = map(int, args.shard.split("/"))
    check_settings(args)
    held_out = make_held_out(args)
    cells = list(itertools.product(args.seeds, CONDITIONS, TEACHERS))
    for seed, condition, teacher in cells[first::step]:
        train_cell(args, condition, teacher, seed, held_out)
        write_report(args)
    write_report(args)


if __name__ == "__main__":
    main()
