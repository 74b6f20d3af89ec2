"""Target-only against drafted decoding on real prompts: texts, accepted length, speed, and where the time goes.

    python benchmarks/decoding.py --prompts DATA/eval --per-file 50 --dtype float32 --output runs/decoding.json

Each prompt is decoded twice in one process, by the target alone and with the drafter, in alternating order, so that a
machine's drift hits both alike. `--prompts` is a folder of JSON lines with `turns` or `messages`; the first user turn
is the prompt. Results are appended to `<output>l` (JSON lines) prompt by prompt; a rerun goes on where it stopped.

The ideal speed-up of a round is `tau * t_target(1) / (t_target(verify) + t_draft)`, with `t_target(1)` the target-only
seconds a token; efficiency is the measured speed-up over it: what the decoding loop itself leaves.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, set_seed

from hyperdflash import GenerationStatistics, HyperDFlashModel  # noqa: F401  (registers the drafter)

HOME = Path(__file__).resolve().parent.parent / "checkpoints"


def read_prompts(folder: str, per_file: int) -> list[dict]:
    """`{"file", "id", "prompt"}`, spread evenly over each file of `folder`."""
    prompts = []
    for path in sorted(Path(folder).glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        step = max(1, len(rows) // per_file)
        for row in rows[::step][:per_file]:
            prompt = row["turns"][0] if "turns" in row else row["messages"][0]["content"]
            prompts.append({"file": path.stem, "id": row["id"], "prompt": prompt})
    if not prompts:
        raise FileNotFoundError(f"prompts: no rows in *.jsonl under {folder}")
    return prompts


def timed(target, inputs, kwargs: dict, drafter=None) -> tuple[list[int], float]:
    set_seed(0)
    extra = {"assistant_model": drafter} if drafter is not None else {}
    start = time.perf_counter()
    output = target.generate(**inputs, **kwargs, **extra)
    return output[0, inputs["input_ids"].shape[1] :].tolist(), time.perf_counter() - start


@torch.inference_mode()
def margin_at_first_difference(target, inputs, alone: list[int], drafted: list[int]) -> float:
    """Gap between the two tokens' logits where the texts part, by one full forward: near 0 is a tie of rounding."""
    at = next(i for i, (a, b) in enumerate(zip(alone, drafted)) if a != b)
    ids = torch.cat([inputs["input_ids"], torch.tensor([alone[:at]], dtype=torch.long)], dim=-1)
    logits = target(input_ids=ids).logits[0, -1].float()
    return abs(float(logits[alone[at]] - logits[drafted[at]]))


def summarise(rows: list[dict], records: list[GenerationStatistics]) -> dict:
    total = sum(records[1:], records[0])
    alone = sum(row["alone_seconds"] for row in rows) / sum(row["alone_tokens"] for row in rows)
    drafted = sum(row["drafted_seconds"] for row in rows) / sum(row["drafted_tokens"] for row in rows)
    rounds = total.rounds + total.plain_steps
    draft, verify, other = (getattr(total, f"{part}_seconds") / rounds for part in ("draft", "verify", "other"))
    ideal = total.accepted_length * alone / (verify + draft)
    return {
        "prompts": len(rows),
        "identical": sum(row["identical"] for row in rows),
        "margins_where_different": sorted(row["margin"] for row in rows if row["margin"] is not None),
        "accepted_length": total.accepted_length,
        "acceptance_per_slot": total.acceptance_per_slot,
        "speedup": alone / drafted,
        "ideal_speedup": ideal,
        "efficiency": alone / drafted / ideal,
        "target_only_ms_a_token": alone * 1e3,
        "drafted_ms_a_token": drafted * 1e3,
        "verify_ms": verify * 1e3,
        "draft_ms": draft * 1e3,
        "other_ms": other * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--per-file", type=int, default=50)
    parser.add_argument("--target", default=str(HOME / "tiny-target"))
    parser.add_argument("--drafter", default=str(HOME / "tiny-hyperdflash"))
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--thinking", action="store_true")
    parser.add_argument("--ignore-end", action="store_true", help="decode all new tokens, whatever the target writes")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    prompts = read_prompts(args.prompts, args.per_file)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype).eval()
    drafter = AutoModel.from_pretrained(args.drafter, dtype=args.dtype).eval()
    kwargs = {"max_new_tokens": args.max_new_tokens, "do_sample": args.temperature > 0}
    if args.temperature > 0:
        kwargs |= {"temperature": args.temperature, "top_k": 0}
    if args.ignore_end:
        kwargs["eos_token_id"] = None

    rows_path = Path(args.output + "l")
    rows_path.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in rows_path.read_text().splitlines()] if rows_path.exists() else []
    known = {(row["file"], row["id"]) for row in rows}
    prompts = [p for p in prompts if (p["file"], p["id"]) not in known]
    with rows_path.open("a", encoding="utf-8") as file:
        for index, prompt in enumerate(tqdm(prompts, unit="prompt", mininterval=5)):
            inputs = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt["prompt"]}],
                add_generation_prompt=True,
                thinking=args.thinking,
                return_dict=True,
                return_tensors="pt",
            )
            if index == 0:
                for assistant in (None, drafter):
                    timed(target, inputs, kwargs | {"max_new_tokens": 32}, assistant)
            results = {}
            for name in ("alone", "drafted") if index % 2 else ("drafted", "alone"):
                results[name] = timed(target, inputs, kwargs, drafter if name == "drafted" else None)
            (alone, alone_seconds), (drafted, drafted_seconds) = results["alone"], results["drafted"]
            different = args.temperature == 0 and alone != drafted
            row = {
                "file": prompt["file"],
                "id": prompt["id"],
                "prompt_tokens": inputs["input_ids"].shape[1],
                "alone_tokens": len(alone),
                "alone_seconds": alone_seconds,
                "drafted_tokens": len(drafted),
                "drafted_seconds": drafted_seconds,
                "identical": alone == drafted,
                "margin": margin_at_first_difference(target, inputs, alone, drafted) if different else None,
                "statistics": drafter.last_generation.to_dict(),
            }
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()

    fields = GenerationStatistics.__dataclass_fields__
    records = [GenerationStatistics(**{k: v for k, v in row["statistics"].items() if k in fields}) for row in rows]
    report = {"settings": vars(args) | {"threads": torch.get_num_threads()}, "all": summarise(rows, records)}
    for name in sorted({row["file"] for row in rows}):
        chosen = [i for i, row in enumerate(rows) if row["file"] == name]
        report[name] = summarise([rows[i] for i in chosen], [records[i] for i in chosen])
    Path(args.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({name: report[name] for name in report if name != "settings"}, indent=2))


if __name__ == "__main__":
    main()
