"""What is kept: the rows that each request's plan asks for, addressed by (request, position).

A position that is computed twice (a recomputed chunk after preemption, a position whose draft was rejected)
overwrites; nothing is appended by arrival. What lies behind the last position of the finished sequence (an extra
asynchronous step, trailing drafts) is cut when the sequence is collected, because only then is its length known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from polygraph_hs.capture.layout import StepLayout
from polygraph_hs.spec import CapturePlan, ranges, token_span

# More tokens than any sequence has: the length of a generation that still grows.
STILL_GROWING = 2**40


@dataclass
class Request:
    """One sequence being recorded.

    Attributes:
        ordinal: its number in this recorder, never reused.
        key: the driver's name for it, ``(request key, sample index)``.
        start, stop: positions to keep, ``stop`` exclusive.
        borrows: whether it may read the prefix cache for positions that are to be kept; it then keeps all of its own
            rows, to lend them in turn.
        loans: (ordinal of the request that computed them, first position, one past the last) of cached positions.
    """

    ordinal: int
    key: tuple[str, int]
    plan: CapturePlan
    prompt_length: int
    start: int
    stop: int
    borrows: bool = False
    loans: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class Chunk:
    """Rows kept from one step.

    Attributes:
        layers: layer of each row of ``values``.
        values: [num_layers, num_rows, hidden_size] on the host; the copy from the device may still be running.
        owners: int64 [num_rows] request ordinals.
        positions: int64 [num_rows] absolute positions.
        live: bool [num_rows] rows whose request has been neither collected nor discarded.
    """

    layers: tuple[int, ...]
    values: torch.Tensor
    owners: np.ndarray
    positions: np.ndarray
    live: np.ndarray


@dataclass
class Collected:
    """The states of several sequences that share their layers.

    Attributes:
        layers: [num_layers]
        values: [num_layers, num_rows, hidden_size]
        sequences: [num_sequences] numbers of the sequences in the order they were asked for.
        row_start: [num_sequences + 1] their rows.
    """

    layers: tuple[int, ...]
    values: torch.Tensor
    sequences: list[int]
    row_start: list[int]


class Missing(NamedTuple):
    """Why the states of one sequence cannot be put together.

    Attributes:
        sequence: its number in the order the sequences were asked for.
        reason: what is missing.
    """

    sequence: int
    reason: str


@dataclass
class Recorder:
    """Keeps rows of steps until the driver collects them."""

    requests: dict[str, Request] = field(default_factory=dict)
    # More than one id to a key is the driver's mistake, kept so that collecting can say it.
    by_key: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    num_seen: int = 0

    def add_request(
        self, req_id: str, key: tuple[str, int], plan: CapturePlan, prompt_length: int, borrows: bool = False
    ) -> None:
        """Start recording a request. A request that is resumed after preemption goes on where it was."""
        if req_id in self.requests:
            return
        start, stop = token_span("all" if borrows else plan.tokens, prompt_length, STILL_GROWING)
        self.requests[req_id] = Request(self.num_seen, key, plan, prompt_length, start, stop, borrows)
        self.by_key.setdefault(key, []).append(req_id)
        self.num_seen += 1

    def borrows(self, req_id: str) -> bool:
        """Whether a request is recorded and may borrow rows of positions that it does not compute."""
        return req_id in self.requests and self.requests[req_id].borrows

    def borrow(self, req_id: str, lender: int, start: int, stop: int) -> None:
        """Let a request have the rows that the request with ordinal ``lender`` computed at these positions."""
        request = self.requests[req_id]
        if lender == request.ordinal:
            return
        if request.loans and request.loans[-1][0] == lender and request.loans[-1][2] == start:
            start = request.loans.pop()[1]
        request.loans.append((lender, start, stop))

    def wants(self, req_ids: Iterable[str]) -> bool:
        """Whether any of these requests is recorded."""
        return any(req_id in self.requests for req_id in req_ids)

    def record(self, layout: StepLayout, layers: tuple[int, ...], gather: Callable[[np.ndarray], torch.Tensor]) -> None:
        """Keep the wanted rows of one step.

        Args:
            layout: the step's rows.
            layers: the layers that ``gather`` returns.
            gather: takes int64 row numbers [k] and returns [num_layers, k, hidden_size] on the host.
        """
        requests = [self.requests.get(req_id) for req_id in layout.req_ids]
        recorded = np.array([request is not None for request in requests])
        if not recorded.any():
            return
        requests = [request for request in requests if request is not None]
        first_row = layout.query_start[:-1][recorded]
        first = layout.first_position[recorded]
        end = first + layout.num_rows[recorded]
        low = np.maximum(first, np.array([request.start for request in requests]))
        high = np.minimum(end, np.array([request.stop for request in requests]))
        counts = np.maximum(high - low, 0)
        total = int(counts.sum())
        if total == 0:
            return
        # 0 .. count-1 within each request, all requests in one array.
        offsets = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = np.repeat(low, counts) + offsets
        rows = np.repeat(first_row + low - first, counts) + offsets
        owners = np.repeat(np.array([request.ordinal for request in requests]), counts)
        self.chunks.append(Chunk(layers, gather(rows), owners, positions, np.ones(total, dtype=bool)))

    def collect(
        self, sequences: Sequence[tuple[tuple[str, int], int]], is_local: Callable[[int], bool]
    ) -> tuple[list[Collected], list[Missing]]:
        """Put finished sequences together. Copies from the device must have ended.

        Args:
            sequences: [n] (key, number of generated tokens).
            is_local: whether this process computes a layer; only those layers are put together.

        Returns:
            The states in groups of equal layers, and everything that is missing (then no states).
            Nothing is forgotten; call :meth:`discard`.
        """
        missing: list[Missing] = []
        groups: dict[tuple[tuple[int, ...], str], list[int]] = {}
        spans: list[tuple[Request, int, int]] = []
        for number, (key, num_generated) in enumerate(sequences):
            req_ids = self.by_key.get(key, [])
            if len(req_ids) != 1:
                reason = "its request never reached this worker"
                if req_ids:
                    reason = (
                        f"{len(req_ids)} requests ({', '.join(req_ids)}) carry its capture arguments; "
                        f"each prompt needs SamplingParams of its own"
                    )
                missing.append(Missing(number, reason))
                spans.append((None, 0, 0))
                continue
            request = self.requests[req_ids[0]]
            start, stop = token_span(request.plan.tokens, request.prompt_length, num_generated)
            spans.append((request, start, stop))
            if start >= stop:
                missing.append(
                    Missing(number, f"it has no state for tokens={request.plan.tokens!r}: {num_generated} generated")
                )
            layers = tuple(layer for layer in request.plan.layers if is_local(layer))
            groups.setdefault((layers, request.plan.pooling), []).append(number)
        if missing:
            return [], missing

        collected = []
        for (layers, pooling), numbers in groups.items():
            if not layers:
                continue
            values, row_start, lost = self.assemble(layers, [(number, *spans[number]) for number in numbers])
            missing += lost
            if not missing:
                values, row_start = _pool(values, row_start, pooling)
                collected.append(Collected(layers, values, numbers, row_start))
        return ([], missing) if missing else (collected, [])

    def assemble(
        self, layers: tuple[int, ...], spans: list[tuple[int, Request, int, int]]
    ) -> tuple[torch.Tensor, list[int], list[Missing]]:
        """Rows of these layers for [n] (number of the sequence, request, first position, one past the last).

        Returns:
            The values ``(layers, rows, hidden_size)``, [n + 1] where each sequence's rows start, and what is missing.
        """
        values, filled, row_start = self._rows(layers, [(request.ordinal, *span) for _, request, *span in spans])
        self._repay(layers, [(request, *span) for _, request, *span in spans], values, filled, row_start)
        lost = []
        if not filled.all():
            for (number, _, start, stop), first, end in zip(spans, row_start[:-1], row_start[1:], strict=True):
                holes = start + np.flatnonzero(~filled[first:end])
                if len(holes):
                    reason = (
                        f"{len(holes)} of {stop - start} positions never arrived ({ranges(holes)}) for layers "
                        f"{list(layers)}"
                    )
                    lost.append(Missing(number, reason))
        return values, row_start.tolist(), lost

    def _rows(
        self, layers: tuple[int, ...], spans: list[tuple[int, int, int]]
    ) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        """Rows that requests computed themselves, for [n] (ordinal, first position, one past the last).

        Returns:
            The values ``(layers, rows, hidden_size)``, bool [rows] which of them there are, and [n + 1] where each
            request's rows start.
        """
        ordinals, low_of, high_of = (np.array(column, dtype=np.int64) for column in zip(*spans, strict=True))
        row_start = np.concatenate([[0], np.cumsum(high_of - low_of)])
        # By ordinal: where a request's rows go, and which positions are wanted of it.
        base, low, high = np.zeros((3, self.num_seen), dtype=np.int64)
        base[ordinals], low[ordinals], high[ordinals] = row_start[:-1], low_of, high_of
        filled = np.zeros(int(row_start[-1]), dtype=bool)
        values = torch.empty(len(layers), 0, 0)
        for chunk in self.chunks:
            rows = np.flatnonzero((chunk.positions >= low[chunk.owners]) & (chunk.positions < high[chunk.owners]))
            if len(rows) == 0 or not set(layers) <= set(chunk.layers):
                continue
            if values.numel() == 0:
                values = torch.empty(len(layers), len(filled), chunk.values.shape[-1], dtype=chunk.values.dtype)
            owners = chunk.owners[rows]
            targets = base[owners] + chunk.positions[rows] - low[owners]
            filled[targets] = True
            source, target = torch.from_numpy(rows), torch.from_numpy(targets)
            for out, layer in zip(values, layers, strict=True):
                out[target] = chunk.values[chunk.layers.index(layer)][source]
        return values, filled, row_start

    def _repay(
        self,
        layers: tuple[int, ...],
        spans: list[tuple[Request, int, int]],
        values: torch.Tensor,
        filled: np.ndarray,
        row_start: np.ndarray,
    ) -> None:
        """Fill cached positions, in place, with the rows of the requests that computed them."""
        loans = [
            (lender, max(first, start), min(end, stop), target - start)
            for (request, start, stop), target in zip(spans, row_start[:-1].tolist(), strict=True)
            for lender, first, end in request.loans
            if max(first, start) < min(end, stop)
        ]
        wanted: dict[int, tuple[int, int]] = {}
        for lender, first, end, _ in loans:
            low, high = wanted.get(lender, (first, end))
            wanted[lender] = (min(low, first), max(high, end))
        if not wanted or values.numel() == 0:
            return
        lent, there, lent_start = self._rows(layers, [(lender, *span) for lender, span in wanted.items()])
        offsets = {
            lender: start - low
            for (lender, (low, _)), start in zip(wanted.items(), lent_start[:-1].tolist(), strict=True)
        }
        for lender, first, end, offset in loans:
            source = slice(offsets[lender] + first, offsets[lender] + end)
            target = slice(offset + first, offset + end)
            # What the lender lost stays missing, and is reported as the borrower's.
            rows = np.flatnonzero(there[source])
            if len(rows) == end - first:
                values[:, target] = lent[:, source]
            elif len(rows) > 0:
                values[:, target][:, rows] = lent[:, source][:, rows]
            filled[target][rows] = True

    def discard(self, keys: Iterable[tuple[str, int]]) -> None:
        """Forget sequences: collected, aborted or unwanted ones. Unknown keys are no error."""
        gone = []
        for key in keys:
            gone += [self.requests.pop(req_id).ordinal for req_id in self.by_key.pop(key, [])]
        if not gone:
            return
        dropped = np.zeros(self.num_seen, dtype=bool)
        dropped[gone] = True
        for chunk in self.chunks:
            chunk.live &= ~dropped[chunk.owners]
        self.chunks = [chunk for chunk in self.chunks if chunk.live.any()]


def _pool(values: torch.Tensor, row_start: list[int], pooling: str) -> tuple[torch.Tensor, list[int]]:
    """Pool each sequence's rows: [num_layers, num_rows, hidden] to [num_layers, num_sequences, hidden]."""
    if pooling == "none":
        return values, row_start
    bounds = torch.tensor(row_start)
    if pooling == "last":
        pooled = values[:, bounds[1:] - 1]
    else:
        lengths = bounds[1:] - bounds[:-1]
        pooled = torch.stack([torch.segment_reduce(layer.float(), "mean", lengths=lengths) for layer in values])
    return pooled, list(range(len(row_start)))
