"""`hyperdflash bench-serve`: target-only, vanilla DFlash and HyperDFlash behind vLLM's server, at several loads.

Times are the client's, counts of drafts are vLLM's own counters. One more system, drafts that cost nothing and are
never accepted (`fixed_drafts.py`), tells what a round costs without its drafter.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..utils.folders import check_output_folder, whole_folder
from ..utils.provenance import collect_provenance
from .arguments import BenchServeArguments
from .client import Client, Timing, read_counters
from .report import markdown_report, plot_report
from .server import Server, server_arguments

TARGET_ONLY, VANILLA, HYPERDFLASH, VERIFICATION = "target-only", "vanilla", "HyperDFlash", "verification"
SYSTEMS = (TARGET_ONLY, VANILLA, HYPERDFLASH, VERIFICATION)


def speculation(args: BenchServeArguments, system: str) -> str | None:
    """The `--speculative-config` of a system; `None` for target-only.

    Vanilla DFlash gets a cache type of its own, as DeepSeek-V4 would leave it fp8 without scales. Its layers have a
    window as long as the longest sequence (`export --to dflash`): they would take over DeepSeek-V4's otherwise.
    """
    settings: dict[str, Any] = {"num_speculative_tokens": args.num_draft_tokens}
    if system == HYPERDFLASH:
        settings |= {"method": "dflash", "model": args.drafter}
    elif system == VANILLA:
        settings |= {"method": "dflash", "model": args.vanilla, "kv_cache_dtype": "auto"}
    elif system == VERIFICATION:
        settings |= {"method": "custom_class", "model": "hyperdflash.serving.fixed_drafts.FixedDrafts"}
    else:
        return None
    return json.dumps(settings)


def chosen_systems(args: BenchServeArguments) -> list[str]:
    """The systems that are measured, in their order.

    Raises:
        ValueError: no system but the target, or a server under another name.
    """
    if args.servers is not None:
        names = [entry.partition("=")[0] for entry in args.servers]
        if TARGET_ONLY not in names or not set(names) <= set(SYSTEMS) or not all("=http" in it for it in args.servers):
            raise ValueError(
                f"servers: found {args.servers}, wanted NAME=URL with {TARGET_ONLY} among {', '.join(SYSTEMS)}"
            )
        return [system for system in SYSTEMS if system in names]
    if args.drafter is None and args.vanilla is None:
        raise ValueError("drafter: found none, wanted --drafter, --vanilla or both")
    there = {VANILLA: args.vanilla, HYPERDFLASH: args.drafter, VERIFICATION: args.verification, TARGET_ONLY: True}
    return [system for system in SYSTEMS if there[system]]


def read_prompts(args: BenchServeArguments) -> list[list[int]]:
    """Token ids of the prompts, in a drawn order: the target's chat form, or the bare text if it has none.

    Raises:
        ValueError, OSError: a file that cannot be read, or that holds no prompt.
    """
    from transformers import AutoTokenizer

    from ..utils.chat import add_chat_template

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    add_chat_template(tokenizer, args.target)
    opened = gzip.open if args.prompts.endswith(".gz") else open
    prompts = []
    with opened(args.prompts, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                first = row["prompt"] if "prompt" in row else row.get("turns", [None])[0]
                messages = row.get("messages") or [{"role": "user", "content": str(first or row["messages"])}]
            except (ValueError, KeyError, IndexError, TypeError, AttributeError):
                raise ValueError(
                    f"prompts: line {number}: found {line[:80]!r}, wanted `messages`, `prompt` or `turns`"
                ) from None
            if messages[-1]["role"] == "assistant":
                messages = messages[:-1]
            if tokenizer.chat_template:
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
                    "input_ids"
                ]
            else:
                ids = tokenizer(messages[-1]["content"])["input_ids"]
            prompts.append(ids)
    if not prompts:
        raise ValueError(f"prompts: found none in {args.prompts}, wanted at least one")
    random.Random(args.seed).shuffle(prompts)
    return prompts


def spread(values: list[float]) -> dict[str, float]:
    """Mean, median and 95th percentile."""
    ordered = sorted(values)
    at = {"median": 0.5, "p95": 0.95}
    return {"mean": sum(ordered) / len(ordered)} | {
        name: ordered[round(share * (len(ordered) - 1))] for name, share in at.items()
    }


def summarise(
    timings: list[Timing],
    seconds: float,
    before: dict[str, Any],
    after: dict[str, Any],
    drafts: bool = True,
    restarts: int = 0,
) -> dict[str, Any]:
    """One cell: a system at one concurrency. Seconds everywhere.

    `step_seconds` is the time from one step of the target to the next, as a request sees it: decode time over rounds
    (drafts that were accepted behind a text's end are counted by vLLM and sent to nobody, so tokens do not tell), and
    without drafts over tokens. A server that was lost has lost its counters, and one may not count at all: then what
    is counted is `None`.
    """
    tokens = sum(timing.tokens for timing in timings)
    later = sum(timing.tokens - 1 for timing in timings)
    decode = sum(timing.decode_seconds for timing in timings)
    retries = sum(timing.retries for timing in timings)
    cell = {
        "requests": len(timings),
        "retries": retries,
        "restarts": restarts,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "first_token_seconds": spread([timing.first_token_seconds for timing in timings]),
        "seconds_per_token": spread([it.decode_seconds / (it.tokens - 1) for it in timings if it.tokens > 1] or [0.0]),
        "end_to_end_seconds": spread([timing.seconds for timing in timings]),
        "rounds": None,
        "drafted": None,
        "accepted": None,
        "accepted_length": None,
        "acceptance_per_slot": None,
        "step_seconds": None,
    }
    rounds, drafted, accepted = (after[name] - before[name] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    if retries or restarts or rounds < 0 or (drafts and not rounds):
        return cell
    cell |= {"rounds": int(rounds), "drafted": int(drafted), "accepted": int(accepted)}
    cell["step_seconds"] = decode / max(rounds if drafts else later, 1)
    if rounds:
        earlier = before["accepted_per_slot"] or [0.0] * len(after["accepted_per_slot"])
        cell["accepted_length"] = 1 + accepted / rounds
        cell["acceptance_per_slot"] = [(b - a) / rounds for a, b in zip(earlier, after["accepted_per_slot"])]
    return cell


def split_costs(cells: dict[str, dict[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Where the time of a drafter's round goes, for each system and concurrency.

    `target_step_seconds`: a step on one token a request. `verification_seconds`: what a step on all drafts takes above
    it. `drafter_seconds`: what the round takes above that. `batching`: how much longer a round is than at the smallest
    concurrency. `end_to_end_speedup`: the mean latency of a request, target-only over this system.
    """
    rows = []
    for system, by_concurrency in cells.items():
        first = next(iter(by_concurrency.values()))["step_seconds"]
        for concurrency, cell in by_concurrency.items():
            if system == VERIFICATION:
                continue
            alone = cells[TARGET_ONLY][concurrency]
            verified = cells.get(VERIFICATION, {}).get(concurrency, {}).get("step_seconds")
            step, target_step = cell["step_seconds"], alone["step_seconds"]
            drafts = system != TARGET_ONLY
            known = drafts and None not in (step, target_step, verified)
            rows.append(
                {
                    "system": system,
                    "concurrency": concurrency,
                    "round_seconds": step,
                    "target_step_seconds": target_step,
                    "verification_seconds": verified - target_step if known else None,
                    "drafter_seconds": step - verified if known else None,
                    "batching": step / first if step and first else None,
                    "throughput_ratio": cell["tokens_per_second"] / alone["tokens_per_second"],
                    "end_to_end_speedup": alone["end_to_end_seconds"]["mean"] / cell["end_to_end_seconds"]["mean"],
                }
            )
    return rows


@contextmanager
def served(args: BenchServeArguments, system: str) -> Iterator[tuple[str, Server | None]]:
    """(url, the server if it is ours) of a system."""
    if args.servers is not None:
        yield dict(entry.split("=", 1) for entry in args.servers)[system], None
        return
    # Each cell asks the same prompts: a later one would find them in the cache
    more, variables = "--no-enable-prefix-caching ", {}
    if VERIFICATION in chosen_systems(args):
        # vLLM serves this one by its V1 runner and without asynchronous scheduling: what is subtracted is alike
        more, variables = more + "--no-async-scheduling ", {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    arguments = server_arguments(args.target, speculation(args, system), more + args.server_args)
    with Server(args.python or sys.executable, arguments, args.port, args.start_timeout, variables) as server:
        yield server.url, server


async def measure(args: BenchServeArguments, system: str, url: str, server: Server | None, prompts, progress):
    """`{concurrency: cell}` of the server at `url`."""
    root = url.rstrip("/").removesuffix("/v1")
    async with Client(url, args.retries, args.request_timeout) as client:
        model = (await client.get(f"{client.url}/models")).json()["data"][0]["id"]

        def bodies(count: int, tokens: int) -> list[dict[str, Any]]:
            common = {"model": model, "max_tokens": tokens, "temperature": args.temperature, "top_k": -1, "top_p": 1.0}
            return [common | {"prompt": prompts[index % len(prompts)]} for index in range(count)]

        async def cell(concurrency: int) -> dict[str, Any]:
            restarts = server.restarts if server else 0
            before, start = read_counters((await client.get(f"{root}/metrics")).text), time.perf_counter()
            requests = bodies(max(args.requests, concurrency), args.max_new_tokens)
            timings = await client.run(requests, concurrency, progress)
            seconds = time.perf_counter() - start
            after = read_counters((await client.get(f"{root}/metrics")).text)
            restarts = (server.restarts if server else 0) - restarts
            return summarise(timings, seconds, before, after, system != TARGET_ONLY, restarts)

        async def all_cells() -> dict[int, dict[str, Any]]:
            await client.run(bodies(2, 8), 1)  # the first steps of a server are slow
            return {concurrency: await cell(concurrency) for concurrency in args.concurrency}

        run, watch = asyncio.create_task(all_cells()), asyncio.create_task(server.watch()) if server else None
        try:
            await asyncio.wait({run, watch} if watch else {run}, return_when=asyncio.FIRST_COMPLETED)
            return run.result() if run.done() else await watch  # which ends only with an error
        finally:
            for task in filter(None, (run, watch)):
                task.cancel()
            await asyncio.gather(*filter(None, (run, watch)), return_exceptions=True)


def run_bench_serve(args: BenchServeArguments) -> dict[str, Any]:
    """Measures every system, one server after the other, and writes the report.

    Returns:
        `provenance`, `cells` (system, then concurrency), `split` (see [`split_costs`]).

    Raises:
        ValueError: an option, a prompt file, or a server that does not start; [`Client`] and [`Server`] say more.
        ConnectionError: a server stayed away for longer than `retries` allow. What was measured before is written.
    """
    from tqdm import tqdm

    check_output_folder(args.output, args.overwrite)
    systems = chosen_systems(args)
    prompts = read_prompts(args)
    cells: dict[str, dict[int, dict[str, Any]]] = {}
    total = sum(max(args.requests, concurrency) for concurrency in args.concurrency) * len(systems)
    failure = None
    with tqdm(total=total, unit="request", disable=None) as bar:
        for system in systems:
            bar.set_description(system)
            try:
                with served(args, system) as (url, server):
                    cells[system] = asyncio.run(measure(args, system, url, server, prompts, lambda _: bar.update()))
            except* (ValueError, ConnectionError) as group:
                failure = group.exceptions[0]
            if failure is not None:
                break
    if failure is not None and TARGET_ONLY not in cells:
        raise failure
    report = {
        "provenance": collect_provenance(
            settings={
                "requests": args.requests,
                "max_new_tokens": args.max_new_tokens,
                "temperature": args.temperature,
            }
        ),
        "cells": cells,
        "split": split_costs(cells),
    }
    with whole_folder(args.output, args.overwrite) as folder:
        (folder / "results.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        (folder / "results.md").write_text(markdown_report(report), encoding="utf-8")
        plot_report(report, Path(folder) / "results.png")
    if failure is not None:
        kind = ConnectionError if isinstance(failure, ConnectionError) else ValueError
        raise kind(f"{failure}; {args.output} holds {', '.join(cells)}") from failure
    return report


__all__ = ["run_bench_serve"]
