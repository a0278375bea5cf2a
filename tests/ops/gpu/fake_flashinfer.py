"""Fake FlashInfer in plain torch, with the signatures and checks that aioserve uses.

The real one copies arrays of the host to the device without waiting. This one reads them when it
computes, so that a change that comes too early shows, as it might on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["BatchPrefillWithPagedKVCacheWrapper", "__version__"]

__version__ = "0.0.fake"


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        _only_defaults(
            use_cuda_graph=(use_cuda_graph, False),
            qo_indptr_buf=(qo_indptr_buf, None),
            paged_kv_indptr_buf=(paged_kv_indptr_buf, None),
            paged_kv_indices_buf=(paged_kv_indices_buf, None),
            paged_kv_last_page_len_buf=(paged_kv_last_page_len_buf, None),
            custom_mask_buf=(custom_mask_buf, None),
            mask_indptr_buf=(mask_indptr_buf, None),
            backend=(backend, "auto"),
            jit_args=(jit_args, None),
            jit_kwargs=(jit_kwargs, None),
            variant_owns_mask=(variant_owns_mask, False),
        )
        assert float_workspace_buffer.dtype is torch.uint8
        assert float_workspace_buffer.data_ptr() % 16 == 0
        assert kv_layout in ("NHD", "HND")
        self._kv_layout = kv_layout
        self._device = float_workspace_buffer.device
        self.plans = 0

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        _only_defaults(
            head_dim_vo=(head_dim_vo, None),
            custom_mask=(custom_mask, None),
            packed_custom_mask=(packed_custom_mask, None),
            pos_encoding_mode=(pos_encoding_mode, "NONE"),
            use_fp16_qk_reduction=(use_fp16_qk_reduction, False),
            rope_scale=(rope_scale, None),
            rope_theta=(rope_theta, None),
            o_data_type=(o_data_type, None),
            prefix_len_ptr=(prefix_len_ptr, None),
            token_pos_in_items_ptr=(token_pos_in_items_ptr, None),
            token_pos_in_items_len=(token_pos_in_items_len, 0),
            max_item_len_ptr=(max_item_len_ptr, None),
            seq_lens_q=(seq_lens_q, None),
            block_tables=(block_tables, None),
            max_token_per_sequence=(max_token_per_sequence, None),
            max_sequence_kv=(max_sequence_kv, None),
            fixed_split_size=(fixed_split_size, None),
        )
        assert non_blocking, "it would wait for the device"
        assert disable_split_kv, "its workspace has no room for parts of contexts"
        # Copying arrays from the device to the host would wait for all of the device's work.
        for array in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len):
            assert array.device.type == "cpu"
        assert paged_kv_indices.device == self._device
        arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        for array in arrays:
            assert array.dtype is torch.int32
            assert array.is_contiguous()
        batch = len(qo_indptr) - 1
        assert len(paged_kv_indptr) == batch + 1
        assert len(paged_kv_last_page_len) == batch
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        whole_pages = (paged_kv_indptr[1:] - paged_kv_indptr[:-1] - 1).clamp(min=0)
        lengths = whole_pages * page_size + paged_kv_last_page_len
        assert seq_lens is None or torch.equal(seq_lens, lengths)
        assert bool((paged_kv_last_page_len <= page_size).all())
        assert num_qo_heads % num_kv_heads == 0
        self._arrays = arrays
        self._num_qo_heads, self._num_kv_heads = num_qo_heads, num_kv_heads
        self._head_dim, self._page_size = head_dim_qk, page_size
        self._causal = causal
        self._scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        self._window_left = window_left
        self._soft_cap = logits_soft_cap or 0.0
        self._q_dtype, self._kv_dtype = q_data_type, kv_data_type or q_data_type
        self.plans += 1

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Tensor:
        _only_defaults(
            args=(args, ()),
            q_scale=(q_scale, None),
            k_scale=(k_scale, None),
            v_scale=(v_scale, None),
            lse=(lse, None),
            return_lse=(return_lse, False),
            lse_base=(lse_base, "log2"),
            lse_layout=(lse_layout, "NH"),
            window_left=(window_left, None),
            sinks=(sinks, None),
            kv_cache_sf=(kv_cache_sf, None),
            skip_softmax_threshold_scale_factor=(skip_softmax_threshold_scale_factor, None),
            use_fp16_softmax=(use_fp16_softmax, None),
            uses_spcompress=(uses_spcompress, None),
        )
        assert isinstance(paged_kv_cache, tuple)
        k_pages, v_pages = paged_kv_cache
        assert k_pages.stride() == v_pages.stride(), "the kernels for equal strides"
        if self._kv_layout == "NHD":
            k_pages, v_pages = (pages.transpose(1, 2) for pages in (k_pages, v_pages))
        tokens = int(self._arrays[0][-1])
        assert q.shape == (tokens, self._num_qo_heads, self._head_dim)
        assert k_pages.shape[1:] == (self._num_kv_heads, self._page_size, self._head_dim)
        assert q.dtype is self._q_dtype
        assert k_pages.dtype is self._kv_dtype
        assert q.stride(2) == 1
        assert out is not None
        assert out.shape == q.shape
        assert out.dtype is self._q_dtype
        assert out.is_contiguous()
        starts, page_starts, indices, last_page_lens = self._arrays
        for i, last in enumerate(last_page_lens.tolist()):
            rows = slice(int(starts[i]), int(starts[i + 1]))
            pages = indices[int(page_starts[i]) : int(page_starts[i + 1])].long()
            context = max(len(pages) - 1, 0) * self._page_size + last
            out[rows] = self._attend(
                q[rows],
                *(
                    pool[pages].transpose(1, 2).flatten(0, 1)[:context]
                    for pool in (k_pages, v_pages)
                ),
            )
        return out

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend: q [T, Hq, D], keys and values [C, Hk, D] -> [T, Hq, D]."""
        group = self._num_qo_heads // self._num_kv_heads
        wide = [x.double().repeat_interleave(group, 1) for x in (keys, values)]
        scores = torch.einsum("thd,chd->htc", q.double(), wide[0]) * self._scale
        if self._soft_cap:
            scores = self._soft_cap * (scores / self._soft_cap).tanh()
        query = torch.arange(len(q))[:, None] + len(keys) - len(q)
        key = torch.arange(len(keys))
        seen = (key <= query) | torch.tensor(not self._causal)
        if self._window_left >= 0:
            seen &= key + self._window_left >= query
        scores = scores.masked_fill(~seen, float("-inf"))
        return torch.einsum("htc,chd->thd", scores.softmax(-1), wide[1]).to(q.dtype)


def _only_defaults(**arguments: tuple[Any, Any]) -> None:
    """Assert that unsupported arguments, each (given, default), have their defaults."""
    for name, (given, default) in arguments.items():
        assert given is default or given == default, f"{name}={given!r} isn't done here"
