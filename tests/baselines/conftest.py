"""A random MTP module for the tests' target, and the same written out naively: loops, no cache, no transformers."""

import pytest
import torch
import torch.nn.functional as F

from hyperdflash.baselines import MtpConfig, MtpModel
from hyperdflash.generation_hyperdflash import install_hooks


@pytest.fixture(autouse=True)
def hooks():
    install_hooks()


def build_mtp(target, seed=0, **fields):
    """Random weights large enough that every part of the module moves the outputs."""
    torch.manual_seed(seed)
    mtp = MtpModel(MtpConfig.of_target(target.config, **({"mtp_depths": 6} | fields))).eval()
    with torch.no_grad():
        for name, parameter in mtp.named_parameters():
            if name.endswith((".base", ".hc_base", ".sinks", "norm.weight")):
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        mtp.layer.mlp.gate.e_score_correction_bias.normal_(std=0.1)
    return mtp


@pytest.fixture(scope="session")
def make_mtp():
    return build_mtp


@pytest.fixture(scope="session")
def mtp(target):
    return build_mtp(target)


class NaiveMtp:
    """The module of the design: one token at a time, recomputed from the first pair on.

    `faults` are planted mistakes, which the tests must find.
    """

    def __init__(self, mtp, faults=()):
        self.config = mtp.config
        self.w = {name: value.detach().double() for name, value in mtp.state_dict().items()}
        self.faults = set(faults)

    def norm(self, x, name=None):
        x = x * (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps) ** -0.5
        return x if name is None else x * self.w[f"{name}.weight"]

    def rotate(self, x, position):
        """Interleaved rotary on the last dimensions of `[..., head_dim]`."""
        parameters = self.config.rope_parameters["main"]
        size = int(self.config.head_dim * parameters["partial_rotary_factor"])
        x = x.clone()
        for pair in range(size // 2):
            angle = torch.tensor(position * parameters["rope_theta"] ** (-2 * pair / size)).double()
            first, second = x.shape[-1] - size + 2 * pair, x.shape[-1] - size + 2 * pair + 1
            a, b = x[..., first].clone(), x[..., second].clone()
            x[..., first] = a * angle.cos() - b * angle.sin()
            x[..., second] = b * angle.cos() + a * angle.sin()
        return x

    def hyper(self, streams, name):
        """`[m, d]` -> (post `[m]`, comb `[m, m]`, collapsed `[d]`)."""
        m, eps = self.config.hc_mult, self.config.hc_eps
        weights = self.w[f"{name}.fn"] @ self.norm(streams.flatten())
        base, scale = self.w[f"{name}.base"], self.w[f"{name}.scale"]
        pre = torch.sigmoid(weights[:m] * scale[0] + base[:m]) + eps
        post = 2 * torch.sigmoid(weights[m : 2 * m] * scale[1] + base[m : 2 * m])
        comb = torch.softmax((weights[2 * m :] * scale[2] + base[2 * m :]).view(m, m), dim=-1) + eps
        comb = comb / (comb.sum(0, keepdim=True) + eps)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(1, keepdim=True) + eps)
            comb = comb / (comb.sum(0, keepdim=True) + eps)
        return post, comb, (pre[:, None] * streams).sum(0)

    def key(self, streams, position):
        collapsed = self.norm(self.hyper(streams, "layer.attn_hc")[2], "layer.input_layernorm")
        key = self.norm(self.w["layer.self_attn.kv_proj.weight"] @ collapsed, "layer.self_attn.kv_norm")
        return self.rotate(key, position)

    def layer(self, pairs, positions):
        """The layer's output `[m, d]` at the last of some pairs `[m, d]`."""
        config, w = self.config, self.w
        position, streams = positions[-1], pairs[-1]
        post, comb, collapsed = self.hyper(streams, "layer.attn_hc")
        x = self.norm(collapsed, "layer.input_layernorm")
        q = self.norm(w["layer.self_attn.q_a_proj.weight"] @ x, "layer.self_attn.q_a_norm")
        q = (w["layer.self_attn.q_b_proj.weight"] @ q).view(config.num_attention_heads, config.head_dim)
        q = self.rotate(self.norm(q), position)
        keys = [self.key(s, p) for s, p in zip(pairs, positions) if position - p < config.sliding_window]
        heads = []
        for head in range(config.num_attention_heads):
            scores = torch.stack([q[head] @ key for key in keys]) * config.head_dim**-0.5
            weights = torch.cat([scores, w["layer.self_attn.sinks"][head][None]]).softmax(-1)[:-1]
            value = sum(weight * key for weight, key in zip(weights, keys))
            heads.append(self.rotate(value, -position))
        groups = torch.cat(heads).view(config.o_groups, -1)
        o_a = w["layer.self_attn.o_a_proj.weight"].view(config.o_groups, config.o_lora_rank, -1)
        x = w["layer.self_attn.o_b_proj.weight"] @ torch.cat([o_a[g] @ groups[g] for g in range(config.o_groups)])
        streams = post[:, None] * x + comb.T @ streams

        post, comb, collapsed = self.hyper(streams, "layer.ffn_hc")
        x = self.norm(collapsed, "layer.post_attention_layernorm")
        scores = F.softplus(w["layer.mlp.gate.weight"] @ x).sqrt()
        biased = scores + w["layer.mlp.gate.e_score_correction_bias"]
        chosen = biased.topk(config.num_experts_per_tok).indices.tolist()
        total, y = sum(scores[e] for e in chosen), torch.zeros_like(x)
        for e in chosen:
            gate, up = (w["layer.mlp.experts.gate_up_proj"][e] @ x).chunk(2)
            y += (
                scores[e]
                / total
                * config.routed_scaling_factor
                * self.expert(gate, up, w["layer.mlp.experts.down_proj"][e])
            )
        shared = [w[f"layer.mlp.shared_experts.{part}_proj.weight"] for part in ("gate", "up", "down")]
        y += self.expert(shared[0] @ x, shared[1] @ x, shared[2])
        return post[:, None] * y + comb.T @ streams

    def expert(self, gate, up, down):
        limit = self.config.swiglu_limit
        return down @ (F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit))

    def merge(self, embed, streams):
        h = streams if "no_hnorm" in self.faults else self.norm(streams, "hnorm")
        return (self.w["e_proj.weight"] @ self.norm(embed, "enorm")) + h @ self.w["h_proj.weight"].T

    def collapse(self, streams):
        mixes = self.w["hc_head.hc_fn"] @ self.norm(streams.flatten())
        gates = torch.sigmoid(mixes * self.w["hc_head.hc_scale"] + self.w["hc_head.hc_base"]) + self.config.hc_eps
        return self.norm((gates[:, None] * streams).sum(0), "norm")

    def steps(self, embeds, hidden, first, depths):
        """Outputs `[depths, d]` of the recursion that begins with pair `first`; `embeds[t]` is of token `t + 1`."""
        embeds, hidden = embeds.double(), hidden.double()
        shift = 1 if "wrong_position" in self.faults else 0  # of the module's own steps
        pairs = [self.merge(embeds[t], hidden[t]) for t in range(first + 1)]
        positions, outputs, streams = list(range(first + 1)), [], None
        for depth in range(depths):
            if depth:
                pairs.append(self.merge(embeds[first + depth], streams))
                positions.append(first + depth + shift)
            streams = self.layer(pairs, positions)
            outputs.append(self.collapse(streams))
        return torch.stack(outputs)


@pytest.fixture(scope="session")
def naive():
    return NaiveMtp
