"""The five-call protocol: what lm-polygraph's ``VLLMWithUncertainty(use_native_hs_capture=True)`` asks a worker.

Load it with ``LLM(model, enforce_eager=True,
worker_extension_cls="polygraph_hs.capture.extension.HookHiddenStatesExtension")``; the client calls it through
``collective_rpc``. It is a thin face on the same tap, layout and recorder as :mod:`polygraph_hs.capture.worker`, and
gives the residual stream behind each block, which equals Hugging Face's ``output_hidden_states``.

Only here are states pickled, because the protocol's clients unpickle them. Prefer
:class:`~polygraph_hs.engine.CaptureEngine`, which needs neither pickle nor an eager engine, and knows how many tokens
each sequence has.
"""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import torch
from torch import nn

from polygraph_hs.capture.layout import StepLayout, read_layout
from polygraph_hs.capture.worker import (
    Capture,
    decoder_layers,
    equip,
    passes,
    prompt_length,
    require_capturable,
)
from polygraph_hs.errors import IncompleteCaptureError
from polygraph_hs.spec import CapturePlan


class EveryRequest(Capture):
    """Captures every request that is scheduled, at every position that is computed for it.

    Attributes:
        computed: by request id, the first position computed and one past the last.
        counts: the answer to ``_get_capture_metadata``.
    """

    pools = False

    def __init__(self, worker: HookHiddenStatesExtension, layers: list[int]):
        super().__init__(worker, layers)
        self.worker = worker
        self.plan = CapturePlan(tuple(layers), "all")
        self.computed: dict[str, tuple[int, int]] = {}
        self.counts: dict[str, dict[str, int]] = {}

    def register(self, new) -> None:
        self.recorder.add_request(new.req_id, (new.req_id, 0), self.plan, prompt_length(new))

    def record(self, layout: StepLayout) -> None:
        super().record(layout)
        for req_id, first, count in zip(
            layout.req_ids,
            layout.first_position.tolist(),
            layout.num_rows.tolist(),
            strict=True,
        ):
            if req_id not in self.recorder.requests:
                continue
            start, stop = self.computed.get(req_id, (first, first))
            # A preempted request computes its positions again: only those behind the furthest are new.
            new = max(first + count - stop, 0)
            self.computed[req_id] = (start, stop + new)
            counts = self.counts.setdefault(req_id, {"total_computed": 0, "prefill_tokens": 0})
            counts["total_computed"] += new
            prompt = self.recorder.requests[req_id].prompt_length
            self.worker._track_prefill_chunk(req_id, max(min(stop + new, prompt) - min(stop, prompt), 0))

    def forget(self, req_ids: list[str]) -> None:
        """Forget the states of these requests; the counts stay."""
        self.recorder.discard([(req_id, 0) for req_id in req_ids])
        for req_id in req_ids:
            self.computed.pop(req_id, None)

    def take(self) -> dict[int, dict[str, bytes]]:
        """Every request's rows of every layer, pickled; they are then forgotten."""
        req_ids = list(self.computed)
        spans = [
            (number, self.recorder.requests[req_id], *self.computed[req_id]) for number, req_id in enumerate(req_ids)
        ]
        layers = self.tap.layers
        values, row_start, missing = self.recorder.assemble(layers, spans) if spans else (None, [0], [])
        failures, self.failures = self.failures, []
        # Where single requests are incomplete, the others are there for the next call.
        lost = req_ids if failures or not missing else [req_ids[number] for number, _ in missing]
        self.forget(lost)
        failures += [f"request {req_ids[number]}: {reason}" for number, reason in missing]
        if failures:
            raise IncompleteCaptureError(
                f"the states of {len(lost)} of {len(req_ids)} requests are incomplete and were given up; the others' "
                f"can be had by calling again. " + "; ".join(failures[:5])
            )
        return {
            layer - 1: {
                req_id: pickle.dumps(_with_unknown_last_row(values[row, first:stop]))
                for req_id, first, stop in zip(req_ids, row_start[:-1], row_start[1:], strict=True)
            }
            for row, layer in enumerate(layers)
        }


def _with_unknown_last_row(states: torch.Tensor) -> np.ndarray:
    """Float32 rows of the tokens that were fed to the model, and a row of NaN for the last one, which never is."""
    rows = states.to(torch.float32).numpy()
    return np.concatenate([rows, np.full_like(rows[:1], np.nan)])


class HookHiddenStatesExtension:
    """Mixed into vLLM's worker by ``worker_extension_cls``.

    Layers are 0-based decoder blocks here: block i's output is layer i + 1 of the rest of this package. Of the ranks
    of a tensor-parallel group the first answers with data; the others, whose states are the same, with ``{}``.
    """

    def _setup_hidden_states_capture(self, layer_ids: list[int]) -> list[int]:
        """Capture these decoder blocks from now on, in place of earlier ones, whose states are forgotten.

        Args:
            layer_ids: 0-based decoder blocks; ``[]`` ends capturing and removes the taps.

        Returns:
            The blocks that this process captures, ascending.

        Raises:
            ValueError, NotImplementedError: a block does not exist, or this engine cannot be captured in this way;
                what was set up before stays.
        """
        if not passes(self, lambda: self._check_setup(layer_ids)):
            return []
        if self._is_capturing():
            self.capture.tap.set_layers([])
            self.__class__, self.capture = self._plain_class, None
        if not layer_ids:
            return []
        self._plain_class = type(self)
        equip(self, EveryRequest(self, sorted({block + 1 for block in layer_ids})))
        return [layer - 1 for layer in self.capture.tap.layers]

    def _check_setup(self, layer_ids: list[int]) -> None:
        config = self.vllm_config
        require_capturable(config)
        if not config.model_config.enforce_eager:
            raise ValueError("the five-call protocol needs an eager engine; build it with LLM(..., enforce_eager=True)")
        if config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError(
                f"pipeline_parallel_size={config.parallel_config.pipeline_parallel_size}: the five-call protocol's "
                f"clients read the first worker's answer alone, which lacks the later stages' blocks; use "
                f"tensor_parallel_size, or polygraph_hs.CaptureEngine"
            )
        if config.speculative_config is not None:
            raise ValueError(
                "the five-call protocol cannot tell rejected drafts from tokens at the end of a sequence; build the "
                "LLM without speculative_config, or use polygraph_hs.CaptureEngine"
            )
        num_blocks = len(decoder_layers(self).blocks)
        outside = [block for block in layer_ids if not 0 <= block < num_blocks]
        if outside:
            raise ValueError(f"layer_ids={outside} do not exist: this model has decoder blocks 0 to {num_blocks - 1}")
        if not isinstance(getattr(self, "capture", None), EveryRequest | None):
            raise ValueError(
                "this engine captures for polygraph_hs.CaptureEngine; the five-call protocol needs an LLM of its own, "
                "with vLLM's own worker"
            )

    def _reset_capture(self) -> None:
        """Forget everything recorded; the taps stay."""
        if self._is_capturing():
            self.capture.forget(list(self.capture.recorder.requests))
            self.capture.counts, self.capture.failures = {}, []

    def _get_captured_states(self) -> dict[int, dict[str, bytes]]:
        """The states of every request since the last time, which are then forgotten.

        Returns:
            By block and by vLLM's internal request id, a pickled float32 ndarray ``(num_tokens, hidden_size)``: a
            row for each position that was computed, ascending, and then a row of NaN for the last token, which is
            never fed to the model. Without that row the client takes the array for one whose first row is missing,
            and shifts it where it has seen the prompt before. Positions that vLLM's prefix cache spared, at the
            start, are not among the rows.

        Raises:
            IncompleteCaptureError: a position that was computed has not been recorded. What is complete stays.
        """
        return self.capture.take() if self._is_capturing() and self.capture.delivers else {}

    def _get_capture_metadata(self) -> dict[str, dict[str, int]]:
        """By request id, ``total_computed`` positions and the ``prefill_tokens`` among them; then forgotten.

        A position that is computed again after preemption counts once, and so does one that several layers record.
        """
        if not self._is_capturing() or not self.capture.delivers:
            return {}
        counts, self.capture.counts = self.capture.counts, {}
        return counts

    def _track_prefill_chunk(self, req_id: str, chunk_size: int) -> None:
        """Count prompt tokens of a request that a step has computed for the first time."""
        self.capture.counts[req_id]["prefill_tokens"] += chunk_size

    def _get_request_segmentation(self) -> tuple[list[str], list[tuple[int, int]]]:
        """The requests of the step that was last launched, and the first row and one past the last of each."""
        layout = read_layout(self.model_runner)
        bounds = layout.query_start.tolist()
        return layout.req_ids, list(itertools.pairwise(bounds))

    def _get_base_model(self) -> nn.Module:
        """The module that holds the list of decoder blocks; for callers in the worker's own process."""
        blocks = decoder_layers(self).blocks
        return next(module for module in self.get_model().modules() if blocks in module.children())

    def _is_capturing(self) -> bool:
        return isinstance(getattr(self, "capture", None), EveryRequest)
