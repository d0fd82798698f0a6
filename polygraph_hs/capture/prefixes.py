"""Which request computed the states of a prefix that vLLM found in its cache.

A cached position is not computed again, so it leaves no row. But the request that did compute it left one, and the
states of a prefix depend on its tokens alone. A request that may read the cache therefore borrows the rows of those
that computed the blocks it was given. This holds as long as every request that can have written a block it is given
is recorded from its first position on: the driver gives the requests of one call a cache salt of their own, so that
they find each other's blocks and nobody else's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polygraph_hs.capture.recorder import Recorder


def full_attention_group(kv_cache_config) -> tuple[int, int] | None:
    """The number and the block size of the KV-cache group that holds every position of a sequence.

    None if there is no such group, as in models whose every layer has a sliding window: a block's number then does
    not stay with its position. None for models with Mamba layers too, whose cache can share part of a block.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    if any(isinstance(group.kv_cache_spec, MambaSpec) for group in kv_cache_config.kv_cache_groups):
        return None
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if isinstance(spec, FullAttentionSpec) and spec.sliding_window is None:
            return number, spec.block_size
    return None


@dataclass
class CachedPrefixes:
    """Follows which request computes which block of the KV cache.

    Attributes:
        group: the KV-cache group whose blocks are followed.
        block_size: tokens of a block.
        owner: by block, the recorder's ordinal of the request that computed it last.
        blocks: by request, its blocks in the order of its positions.
    """

    group: int
    block_size: int
    owner: dict[int, int] = field(default_factory=dict)
    blocks: dict[str, list[int]] = field(default_factory=dict)

    def follow(self, scheduler_output, recorder: Recorder) -> None:
        """Note what the step that is about to run computes, and lend rows to the requests that start in it.

        Only requests that the recorder knows as borrowing take part.
        """
        if not recorder.num_borrowing and not self.blocks:
            return
        for req_id in scheduler_output.finished_req_ids:
            self.blocks.pop(req_id, None)
        started: list[tuple[str, int]] = []
        # A request can be given blocks that another computes in this very step: owners first, then loans.
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, new_blocks, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if new_blocks is None or not recorder.borrows(req_id):
                continue
            if req_id in cached.resumed_req_ids:
                self.blocks[req_id] = []
                started.append((req_id, num_computed))
            elif req_id not in self.blocks:
                # Without its first blocks it cannot be said which these are; nobody is lent rows of them.
                continue
            self.blocks[req_id] += new_blocks[self.group]
            self._own(req_id, num_computed, recorder)
        for new in scheduler_output.scheduled_new_reqs:
            if recorder.borrows(new.req_id):
                self.blocks[new.req_id] = list(new.block_ids[self.group])
                started.append((new.req_id, new.num_computed_tokens))
                self._own(new.req_id, new.num_computed_tokens, recorder)
        for req_id, num_computed in started:
            for number in range(-(-num_computed // self.block_size)):
                start = number * self.block_size
                stop = min(start + self.block_size, num_computed)
                lender = self.owner.get(self.blocks[req_id][number])
                if lender is not None:
                    recorder.borrow(req_id, lender, start, stop)

    def _own(self, req_id: str, num_computed: int, recorder: Recorder) -> None:
        """Blocks behind what is computed are this request's alone to write."""
        ordinal = recorder.requests[req_id].ordinal
        for block in self.blocks[req_id][num_computed // self.block_size :]:
            self.owner[block] = ordinal
