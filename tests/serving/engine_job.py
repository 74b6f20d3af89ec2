"""Runs one vLLM engine in this process and writes down what it did. Started by the tests, in the serving environment.

    python engine_job.py JOB.json OUTPUT

JOB holds `engine`, the arguments of `vllm.LLM`, `record`, whether drafting is recorded, and `requests`, a list of
batches: a batch is a list of requests (`prompt_token_ids` and the fields of `SamplingParams`) that are sent together.
`plant` names a setting of the target that the drafter's layers take over as they would without the plugin: `window` or
`cache_type`. `break_expand` in a batch takes the stand-in for the expansion of temperatures out while it runs.

OUTPUT.json: per batch the results, the engine's own counters, the settings of the drafter's attention layers. With
`record` also OUTPUT.safetensors: the residual that the drafter was given, at each position of each request, and
OUTPUT.json lists its rounds: anchor position, anchor token, drafts. Recorded batches hold one request each.
"""

import json
import sys
from copy import copy
from pathlib import Path

import cpu_stand_ins
import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.plugins import load_general_plugins
from vllm.v1.spec_decode.dflash import DFlashProposer


class Recorder:
    """What the drafter was given and what it drafted, for one request at a time."""

    def __init__(self):
        self.rounds: list[dict] = []
        self.states: dict[int, torch.Tensor] = {}  # position -> [m * d], as last given
        proposed, prepared = DFlashProposer.propose, DFlashProposer.set_inputs_first_pass
        recorder = self

        def propose(self, *args, **kwargs):
            recorder.residual = kwargs["target_hidden_states"].clone()
            drafts = proposed(self, *args, **kwargs)
            recorder.rounds.append(recorder.inputs | {"drafts": drafts[0].tolist()})
            return drafts

        def set_inputs_first_pass(self, *args, **kwargs):
            positions, refused = kwargs["target_positions"].tolist(), kwargs["num_rejected_tokens_gpu"]
            recorder.states |= dict(zip(positions, recorder.residual))
            kept = len(positions) - (0 if refused is None else int(refused[0]))
            recorder.inputs = {"anchor": positions[kept - 1] + 1, "token": int(kwargs["next_token_ids"][0])}
            return prepared(self, *args, **kwargs)

        DFlashProposer.propose, DFlashProposer.set_inputs_first_pass = propose, set_inputs_first_pass

    def take(self) -> tuple[dict[int, torch.Tensor], list[dict]]:
        taken = dict(self.states), self.rounds
        self.rounds = []
        return taken


def drafter_layers(llm: LLM) -> list[dict]:
    """Window and cache type of the drafter's attention layers, as the engine built them."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    if getattr(runner, "drafter", None) is None:
        return []
    layers = [layer.self_attn.attn for layer in runner.drafter.model.model.layers]
    return [
        {
            "window": layer.sliding_window,
            "cache_dtype": layer.kv_cache_dtype,
            "stored": str(layer.kv_cache.dtype),
            "causal": runner.drafter.dflash_causal,
        }
        for layer in layers
    ]


def plant(setting: str) -> None:
    """Lets the drafter's layers have the target's window, or its cache type."""
    load_general_plugins()
    from hyperdflash.serving.drafter import OwnCacheDecoderLayer

    names = {"window": "sliding_window", "cache_type": "cache_dtype"}

    def init(self, vllm_config, *, cache_config=None, **kwargs):
        planted, own = copy(cache_config), copy(cache_config)
        own.sliding_window, own.cache_dtype = None, "auto"
        setattr(own, names[setting], getattr(planted, names[setting]))
        super(OwnCacheDecoderLayer, self).__init__(vllm_config, cache_config=own, **kwargs)

    OwnCacheDecoderLayer.__init__ = init


def counters(llm: LLM) -> dict:
    found = {metric.name: metric for metric in llm.get_metrics() if "spec_decode" in metric.name}
    return {
        name.removeprefix("vllm:spec_decode_"): getattr(metric, "values", getattr(metric, "value", None))
        for name, metric in found.items()
    }


def run_batch(llm: LLM, batch: dict) -> list[dict]:
    prompts = [{"prompt_token_ids": request["prompt_token_ids"]} for request in batch["requests"]]
    params = [
        SamplingParams(**{name: value for name, value in request.items() if name != "prompt_token_ids"})
        for request in batch["requests"]
    ]
    cpu_stand_ins.broken_expand = batch.get("break_expand", False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    cpu_stand_ins.broken_expand = False
    results = []
    for output in outputs:
        best = output.outputs[0]
        results.append(
            {
                "token_ids": list(best.token_ids),
                "cached_tokens": output.num_cached_tokens,
                "logprobs": best.logprobs
                and [{token: entry.logprob for token, entry in step.items()} for step in best.logprobs],
            }
        )
    return results


def main(job_file: str, output: str) -> None:
    job = json.loads(Path(job_file).read_text())
    if "plant" in job:
        plant(job["plant"])
    recorder = Recorder() if job.get("record") else None
    llm = LLM(enforce_eager=True, disable_log_stats=False, **job["engine"])
    report = {"drafter_layers": drafter_layers(llm), "batches": []}
    tensors = {}
    for index, batch in enumerate(job["requests"]):
        results = {"results": run_batch(llm, batch), "counters": counters(llm)}
        if recorder is not None:
            states, results["rounds"] = recorder.take()
            if batch.get("keep_states"):
                length = max(states) + 1
                tensors[str(index)] = torch.stack([states[position] for position in range(length)])
            else:
                results.pop("rounds")
        report["batches"].append(results)
    if tensors:
        save_file(tensors, output + ".safetensors")
    Path(output + ".json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
