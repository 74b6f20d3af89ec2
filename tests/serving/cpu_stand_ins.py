"""What vLLM 0.32's CPU backend lacks for DeepSeek-V4 beside a drafter, in plain PyTorch. For the tests only.

1. Six small Triton kernels that make metadata have no CPU version (there is no Triton for CPUs on PyPI).
2. A metadata builder leaves out keys that its caller reads.
3. The CPU attention backend names one cache layout, DeepSeek-V4's backends name others, and one has to be common.
4. Per-request floats (temperature, top-p) are expanded into a copy that is dropped: with drafts, sampling reads
   memory that nobody wrote. Greedy decoding does not look at it.
5. A sampled request with a `seed` whose prompt comes in chunks ends the engine: the generator of a CPU has no offset
   to set back. Here it is not set back, so that such a request's tokens depend on how its prompt was cut.
6. The keys of a DFlash drafter's context are normed for all layers in one call; the CPU's `rms_norm` takes the weights
   of the first layer for all of them, without a word. A drafter with several layers loses accepted drafts by it.

vLLM loads `register` as a plugin, so that it runs in every process.
"""

import torch

broken_expand = False  # the tests set it for a while, to show that stand-in 4 is needed


def map_tokens_to_requests(query_start_loc, output, num_reqs, num_mapped, num_tokens, **_):
    """The request that each token belongs to; 0 for padding."""
    tokens = torch.arange(num_tokens, dtype=query_start_loc.dtype)
    requests = torch.bucketize(tokens, query_start_loc[1 : num_reqs + 1].contiguous(), right=True)
    requests = requests.clamp(max=num_reqs - 1).masked_fill(tokens >= num_mapped, 0)
    output[:num_tokens] = requests.to(output.dtype)


def skip(*_, **__):
    """For the two sliding-window kernels: the CPU attention works its window out anew, and reads nothing of theirs."""


def map_compressed_slots(
    compressed_slot_mapping_ptr,
    slot_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    block_table_stride,
    block_size,
    dcp_world_size,
    cp_interleave,
    COMPRESS_RATIO,
    PAD_ID,
    TRITON_BLOCK_SIZE,
):
    """The cache slot of the compressed entry that a token completes, or PAD_ID."""
    starts, lengths = query_start_loc_ptr.tolist(), seq_lens_ptr.tolist()
    for request in range(min(block_table_ptr.shape[0], len(starts) - 1)):
        start, end = starts[request], starts[request + 1]
        if end <= start:
            continue
        positions = torch.arange(lengths[request] - (end - start), lengths[request])
        entries = positions // COMPRESS_RATIO
        blocks = (entries // block_size).clamp(0, block_table_ptr.shape[1] - 1)
        slots = block_table_ptr[request].long()[blocks] * block_size + entries % block_size
        completes = ((positions + 1) % COMPRESS_RATIO == 0) & (slot_mapping_ptr[start:end] != PAD_ID)
        compressed_slot_mapping_ptr[start:end] = slots.masked_fill(~completes, PAD_ID).to(
            compressed_slot_mapping_ptr.dtype
        )


def prepare_uniform_decode(
    seq_lens_ptr,
    decode_seq_lens_ptr,
    block_table_ptr,
    block_table_stride,
    expanded_block_table_ptr,
    expanded_bt_stride,
    decode_lens_ptr,
    max_decode_len,
    BLOCK_SIZE,
):
    """Each of a request's `max_decode_len` tokens as a request of its own, one token longer than the one before."""
    rows = seq_lens_ptr.shape[0] * max_decode_len
    steps = torch.arange(1 - max_decode_len, 1, dtype=seq_lens_ptr.dtype)
    lengths = (seq_lens_ptr[:, None] + steps).clamp(min=0).flatten()
    decode_seq_lens_ptr[:rows] = lengths.to(decode_seq_lens_ptr.dtype)
    width = min(expanded_block_table_ptr.shape[1], block_table_ptr.shape[1])
    tables = block_table_ptr[: seq_lens_ptr.shape[0], :width]
    expanded_block_table_ptr[:rows, :width] = tables.repeat_interleave(max_decode_len, dim=0)
    decode_lens_ptr[:rows] = 1


def build_prefill_chunk(
    query_start_loc_ptr,
    uncompressed_seq_lens_ptr,
    cu_compressed_seq_lens_ptr,
    row_start_cu_compressed_seq_lens_ptr,
    token_to_seq_ptr,
    cu_compressed_seq_len_ks_ptr,
    cu_compressed_seq_len_ke_ptr,
    query_slice_start,
    query_slice_stop,
    DCP_RANK,
    DCP_WORLD,
    DCP_INTERLEAVE,
    BLOCK_SIZE,
    COMPRESS_RATIO,
):
    """Where the compressed entries that a prefill token sees begin and end, and whose they are."""
    starts = query_start_loc_ptr.tolist()
    for request in range(len(starts) - 1):
        start, end = starts[request], starts[request + 1]
        first = int(uncompressed_seq_lens_ptr[request]) - (end - start)
        row = int(row_start_cu_compressed_seq_lens_ptr[request])
        tokens = torch.arange(max(start, query_slice_start), min(end, query_slice_stop))
        seen = (first + tokens - start + 1) // COMPRESS_RATIO
        out = tokens - query_slice_start
        cu_compressed_seq_len_ks_ptr[out] = row
        cu_compressed_seq_len_ke_ptr[out] = (row + seen).to(cu_compressed_seq_len_ke_ptr.dtype)
        entries = slice(int(cu_compressed_seq_lens_ptr[request]), int(cu_compressed_seq_lens_ptr[request + 1]))
        token_to_seq_ptr[entries] = request


def register_metadata_kernels():
    from vllm.triton_utils.dispatcher import register_kernels

    backends = "vllm.v1.attention.backends.mla."
    register_kernels(
        {
            "vllm.v1.attention.ops.metadata._token_request_mapping_kernel": map_tokens_to_requests,
            backends + "sparse_swa.ComputePrefillMetadataKernel.kernel": skip,
            backends + "sparse_swa.ComputeSWAIndicesAndLensKernel.kernel": skip,
            backends + "compressor_utils.CompressedSlotMappingKernel.kernel": map_compressed_slots,
            backends + "indexer.PrepareUniformDecodeKernel.kernel": prepare_uniform_decode,
            backends + "indexer.BuildPrefillChunkMetadataKernel.kernel": build_prefill_chunk,
        }
    )


def complete_tile_schedule():
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder as Builder
    from vllm.v1.attention.backends.mla import sparse_swa

    kinds = [value for name, value in vars(sparse_swa).items() if name.startswith("_LAYER_TYPE_")]
    Builder.build_tile_scheduler = lambda self, num_decode_tokens: dict.fromkeys(kinds)


def share_a_cache_layout():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheLayout

    # Its kernels take the strides of a block, so that blocks may come first as well as layers
    layouts = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: layouts)


def expand(output_ptr, input_ptr, cu_num_tokens_ptr, replace_from, replace_to, MAX_NUM_TOKENS=None):
    """A value a request -> a value a token."""
    counts = cu_num_tokens_ptr.diff(prepend=cu_num_tokens_ptr.new_zeros(1)).long()
    values = input_ptr.masked_fill(input_ptr == replace_from, replace_to).repeat_interleave(counts)
    output_ptr[: len(values)] = values


def keep_expanded_values():
    from vllm.utils import cpu_triton_utils

    vllms_own = cpu_triton_utils._expand_kernel_impl

    def chosen(*args, **kwargs):
        return (vllms_own if broken_expand else expand)(*args, **kwargs)

    # vLLM registers its own version after plugins have run: what that registration looks up is replaced
    cpu_triton_utils._expand_kernel_impl = chosen


class ForwardGenerator(torch.Generator):
    """A generator that says it has been set back and goes on."""

    def get_offset(self):
        return 0

    def set_offset(self, offset):
        pass


def go_on_with_seeds():
    torch.Generator = ForwardGenerator


def norm_keys_by_layer():
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalize(self, all_k):  # [layers, tokens, key-value heads, head_dim]
        return torch.stack([layer.self_attn.k_norm(k) for layer, k in zip(self.layers, all_k)])

    DFlashQwen3Model._normalize_context_k = normalize


def register():
    register_metadata_kernels()
    complete_tile_schedule()
    share_a_cache_layout()
    keep_expanded_values()
    go_on_with_seeds()
    norm_keys_by_layer()
