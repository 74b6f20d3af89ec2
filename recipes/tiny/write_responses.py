"""Let the target answer the prompts of the training data: the text that its drafter is trained on.

    python recipes/tiny/write_responses.py --data DATA --target runs/target --output runs/responses.jsonl

Prompts of equal length are answered together, since DeepSeek-V4's compressors do not know about padding. Each finished
batch is appended as rows `{"id", "input_ids", "assistant_masks", "temperature", "thinking"}`; a rerun goes on where
the file ends.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path

import torch
from data import load_conversations
from tqdm import tqdm
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.masking_utils import AttentionMaskInterface, eager_mask


def shared_key_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    """V4's attention with its sinks, as transformers computes it, without a copy of the one key head for each query
    head: what a batch of long rows spends most of its time on. `query` `[b, h, s, d]`, `key` `[b, 1, n, d]`."""
    b, h, s, d = query.shape
    scores = (query.reshape(b, h * s, d) @ key[:, 0].transpose(1, 2)).view(b, h, s, -1) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    sinks = module.sinks.view(1, h, 1, 1).expand(b, h, s, 1)
    weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1].to(value.dtype)
    output = weights.reshape(b, h * s, -1) @ value[:, 0]
    return output.view(b, h, s, d).transpose(1, 2), None


AttentionInterface.register("shared_key", shared_key_attention)
AttentionMaskInterface.register("shared_key", eager_mask)


def render_prompts(rows, tokenizer, thinking_share: float, seed: int) -> list[dict]:
    """`{"id", "input_ids", "thinking"}` for each row: everything before its last answer, in chat form."""
    prompts = []
    for row in rows:
        thinking = random.Random(f"{seed}/{row['id']}").random() < thinking_share
        ids = tokenizer.apply_chat_template(
            row["messages"][:-1], add_generation_prompt=True, thinking=thinking, return_dict=False
        )
        prompts.append({"id": row["id"], "input_ids": ids, "thinking": thinking})
    return prompts


def batches_of_equal_length(
    prompts: list[dict], batch_size: int, temperatures: list[float], seed: int
) -> list[list[dict]]:
    """Batches of prompts of one length, each with one temperature, in random order."""
    groups = defaultdict(list)
    for prompt in prompts:
        groups[len(prompt["input_ids"])].append(prompt)
    batches = [group[i : i + batch_size] for group in groups.values() for i in range(0, len(group), batch_size)]
    draw = random.Random(seed)
    draw.shuffle(batches)
    return [
        [{**prompt, "temperature": temperature} for prompt in batch]
        for batch, temperature in zip(batches, draw.choices(temperatures, k=len(batches)))
    ]


@torch.inference_mode()
def answer(target, batch: list[dict], max_new_tokens: int) -> list[list[int]]:
    """The new tokens of each row, up to and with the end token."""
    temperature = batch[0]["temperature"]
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    input_ids = torch.tensor([prompt["input_ids"] for prompt in batch])  # [batch, prompt]
    output = target.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=max_new_tokens, **sampling
    )
    end = target.generation_config.eos_token_id
    answers = []
    for row in output[:, input_ids.shape[1] :].tolist():
        answers.append(row[: row.index(end) + 1] if end in row else row)
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="folder of JSON lines with `messages`")
    parser.add_argument("--target", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--prompts", type=int, default=8000, help="stop behind the batch that reaches this number")
    parser.add_argument("--max-prompt-length", type=int, default=320, help="longer prompts are left out (tokens)")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.0, 0.7, 1.0])
    parser.add_argument("--thinking-share", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(
        args.target, dtype=torch.float32, attn_implementation="shared_key"
    ).eval()
    rows, _ = load_conversations(args.data, args.seed)
    prompts = render_prompts(rows, tokenizer, args.thinking_share, args.seed)
    prompts = [prompt for prompt in prompts if len(prompt["input_ids"]) <= args.max_prompt_length]

    output = Path(args.output)
    done = set()
    if output.exists():
        done = {json.loads(line)["id"] for line in output.read_text(encoding="utf-8").splitlines()}
    batches = batches_of_equal_length(prompts, args.batch_size, args.temperatures, args.seed)
    progress = tqdm(total=min(args.prompts, len(prompts)), initial=len(done), unit="prompt", mininterval=10)
    with output.open("a", encoding="utf-8") as file:
        for index, batch in enumerate(batches):
            if len(done) >= args.prompts:
                break
            if batch[0]["id"] in done:  # batches are written whole
                continue
            set_seed(args.seed + index)
            answers = answer(target, batch, args.max_new_tokens)
            lines = []
            for prompt, ids in zip(batch, answers):
                mask = [0] * len(prompt["input_ids"]) + [1] * len(ids)
                lines.append(json.dumps({**prompt, "input_ids": prompt["input_ids"] + ids, "assistant_masks": mask}))
                done.add(prompt["id"])
            file.write("\n".join(lines) + "\n")
            file.flush()
            progress.update(len(batch))


if __name__ == "__main__":
    main()
