"""Which rows of a step belong to which request, and at which positions, for both of vLLM's model runners."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class StepLayout:
    """The rows of one step's forward pass. Rows behind the last request are padding.

    Attributes:
        req_ids: [num_reqs] vLLM's internal request ids, in row order.
        query_start: int64 [num_reqs + 1] first row of each request, and one past the last row.
        first_position: int64 [num_reqs] absolute position of each request's first row.
    """

    req_ids: list[str]
    query_start: np.ndarray
    first_position: np.ndarray

    @property
    def num_rows(self) -> np.ndarray:
        """int64 [num_reqs] rows of each request."""
        return np.diff(self.query_start)

    @property
    def num_tokens(self) -> int:
        return int(self.query_start[-1])

    def spans(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """First row, first position and one past the last position of some requests, each int64 [n].

        Args:
            numbers: int64 [n] where the requests stand in the step.
        """
        first_row, first = self.query_start[numbers], self.first_position[numbers]
        return first_row, first, first + self.query_start[numbers + 1] - first_row


def runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """``start, start + 1, ...``, ``count`` numbers for each of [n] starts and counts, all in one int64 array."""
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(starts, counts) + offsets


def read_layout(model_runner) -> StepLayout:
    """Read the layout of the step whose forward pass has just been launched, before it is sampled from."""
    if hasattr(model_runner, "input_batch"):
        return _read_v1(model_runner)
    if hasattr(model_runner, "req_states"):
        return _read_v2(model_runner)
    raise NotImplementedError(
        f"{type(model_runner).__module__}.{type(model_runner).__name__} is neither of the model runners that "
        f"polygraph-hs reads (V1: has input_batch; V2: has req_states)"
    )


def _read_v1(model_runner) -> StepLayout:
    batch = model_runner.input_batch
    num_reqs = batch.num_reqs
    query_start = model_runner.query_start_loc.np[: num_reqs + 1].astype(np.int64)
    first_position = batch.num_computed_tokens_cpu[:num_reqs].astype(np.int64)
    if model_runner.use_async_spec_decode:
        first_position = _first_positions_on_device(model_runner.positions, query_start)
    return StepLayout(list(batch.req_ids[:num_reqs]), query_start, first_position)


def _read_v2(model_runner) -> StepLayout:
    batch = model_runner.execute_model_state.input_batch
    num_reqs = batch.num_reqs
    query_start = batch.query_start_loc_np[: num_reqs + 1].astype(np.int64)
    first_position = batch.num_computed_tokens_np[:num_reqs].astype(np.int64)
    if model_runner.speculative_config is not None:
        # How many drafts of each request are verified may have been decided on the device.
        query_start = batch.query_start_loc[: num_reqs + 1].cpu().numpy().astype(np.int64)
        first_position = _first_positions_on_device(batch.positions, query_start)
    return StepLayout(list(batch.req_ids[:num_reqs]), query_start, first_position)


def _first_positions_on_device(positions: torch.Tensor, query_start: np.ndarray) -> np.ndarray:
    """Each request's first position, from the device.

    With speculative decoding and asynchronous scheduling the drafts of the step before may still be unverified on
    the host, whose counts are then upper bounds. This waits for the step; nothing else pays for it.
    """
    return positions[: query_start[-1]].cpu().numpy()[query_start[:-1]].astype(np.int64)
