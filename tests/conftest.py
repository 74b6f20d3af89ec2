"""Tiny models for the tests: a DeepSeek-V4 target with every kind of layer, and a drafter that fits it."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
from hub_server import hub  # noqa: E402, F401  (a fixture)
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM  # noqa: E402

torch.set_num_threads(1)

LAYER_TYPES = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]


def build_target(seed: int = 0, **overrides) -> DeepseekV4ForCausalLM:
    """A random DeepSeek-V4 in float32: 3 layers (sliding, CSA, HCA), 4 streams, hash and learned routers.

    transformers initialises V4 so that it writes the same token for ever: weights of 0.02, gates and biases at zero,
    one expert for all tokens in the hash router. Here they are random and large enough that greedy text is varied.
    The indexer keeps every entry (`index_topk`), as ties among its scores would make chunked decoding inexact.
    """
    fields = {
        "vocab_size": 64,
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "layer_types": LAYER_TYPES,
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "num_attention_heads": 2,
        "head_dim": 16,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 512,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 12,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "partial_rotary_factor": 0.5,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 4,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    } | overrides
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".base", ".hc_base", ".position_bias", ".sinks")):
                parameter.normal_(generator=generator)
            elif name.endswith("embed_tokens.weight"):
                parameter.normal_(generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                scores = torch.rand(buffer.shape[0], model.config.n_routed_experts, generator=generator)
                buffer.copy_(scores.topk(buffer.shape[1]).indices)
            elif name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1, generator=generator)
    # The tests say themselves when an end-of-sequence token may end a text
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 2
    return model


def build_drafter(target: DeepseekV4ForCausalLM, seed: int = 0, **overrides):
    """A random HyperDFlash drafter with two layers (sliding and full attention) that fits `target`."""
    from hyperdflash.configuration_hyperdflash import HyperDFlashConfig
    from hyperdflash.modeling_hyperdflash import HyperDFlashModel

    config = target.config
    fields = {
        "hidden_size": config.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 24,
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": 0.2,
        "block_size": 7,
        "mask_token_id": config.vocab_size - 1,
        "context_source": "pre_hc_head",
        "target_layer_ids": [config.num_hidden_layers - 1],
        "reducer": "hc_gate",
        "hc_mult": config.hc_mult,
        "hc_eps": config.hc_eps,
        "target_hidden_size": config.hidden_size,
        "target_num_hidden_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "target_rms_norm_eps": config.rms_norm_eps,
    } | overrides
    torch.manual_seed(seed)
    drafter = HyperDFlashModel(HyperDFlashConfig(**fields)).eval()
    if drafter.sequential_head is not None:  # a fresh one does nothing
        torch.nn.init.normal_(drafter.sequential_head.down_proj.weight, std=0.3)
    return drafter


@pytest.fixture(scope="session")
def make_target():
    return build_target


@pytest.fixture(scope="session")
def make_drafter():
    return build_drafter


@pytest.fixture(scope="session")
def target():
    return build_target()


@pytest.fixture(scope="session")
def drafter(target):
    return build_drafter(target)
