"""What is kept: the rows that each request's plan asks for, addressed by (request, position).

A position that is computed twice (a recomputed chunk after preemption, a position whose draft was rejected)
overwrites; nothing is appended by arrival. What lies behind the last position of the finished sequence (an extra
asynchronous step, trailing drafts) is cut when the sequence is collected, because only then is its length known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from polygraph_hs.capture.layout import StepLayout, runs
from polygraph_hs.capture.pooling import DevicePooling, Pooled, Progress
from polygraph_hs.spec import CapturePlan, ranges, token_span

# Threads that copy rows into place when sequences are collected.
COPY_THREADS = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
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
        pooled: its pooling on the device, or None if its rows are kept.
    """

    ordinal: int
    key: tuple[str, int]
    plan: CapturePlan
    prompt_length: int
    start: int
    stop: int
    borrows: bool = False
    loans: list[tuple[int, int, int]] = field(default_factory=list)
    pooled: Pooled | None = None

    def span(self, num_generated: int) -> tuple[int, int]:
        """First position and one past the last of what its plan asks for, once its length is known."""
        start, stop = token_span(self.plan.tokens, self.prompt_length, num_generated)
        return (max(start, stop - 1), stop) if self.plan.pooling == "last" else (start, stop)


@dataclass
class Chunk:
    """Rows kept from one step.

    Attributes:
        layers: layer of each row of ``values``.
        values: [num_layers, num_rows, hidden_size] on the host.
        owners: int64 [num_rows] request ordinals.
        positions: int64 [num_rows] absolute positions.
        live: bool [num_rows] rows whose request has been neither collected nor discarded.
        ready: has ``synchronize()``, to be called before ``values`` are read; None if they are there.
    """

    layers: tuple[int, ...]
    values: torch.Tensor
    owners: np.ndarray
    positions: np.ndarray
    live: np.ndarray
    ready: object = None


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
class Batch:
    """The recorded requests of a step, kept from step to step while the same requests run.

    Attributes:
        req_ids: [num_reqs] those of the whole step.
        kept: int64 [n] where the requests whose rows are kept stand in it.
        ordinals, start, stop: int64 [n] as in :class:`Request`.
        pools: int64 [k] where the requests that are pooled stand in the step.
        pooled: [k] their poolings.
    """

    req_ids: list[str]
    kept: np.ndarray
    ordinals: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    pools: np.ndarray
    pooled: list[Pooled]

    @classmethod
    def of(cls, req_ids: list[str], known: dict[str, Request]) -> Batch:
        recorded = [(number, known[req_id]) for number, req_id in enumerate(req_ids) if req_id in known]
        kept = [(number, r.ordinal, r.start, r.stop) for number, r in recorded if r.pooled is None]
        pooled = [(number, request.pooled) for number, request in recorded if request.pooled is not None]
        return cls(
            list(req_ids),
            *np.array(kept, dtype=np.int64).reshape(-1, 4).T,
            np.array([number for number, _ in pooled], dtype=np.int64),
            [pooling for _, pooling in pooled],
        )


def _stays(values: torch.Tensor) -> tuple[torch.Tensor, None]:
    return values, None


def _empty(shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


@dataclass
class Recorder:
    """Keeps rows of steps until the driver collects them.

    Attributes:
        to_host: copies gathered rows to the host; returns the copy and what to wait for before it is read, or None.
        pooling: pools on the device, if there is such a thing.
        dtype: of the states, and of pooled last states.
    """

    requests: dict[str, Request] = field(default_factory=dict)
    # More than one id to a key is the driver's mistake, kept so that collecting can say it.
    by_key: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    num_seen: int = 0
    # How many of the requests borrow.
    num_borrowing: int = 0
    to_host: Callable[[torch.Tensor], tuple[torch.Tensor, object]] = _stays
    pooling: DevicePooling | None = None
    dtype: torch.dtype = torch.float32
    batch: Batch | None = None

    def add_request(
        self,
        req_id: str,
        key: tuple[str, int],
        plan: CapturePlan,
        prompt_length: int,
        borrows: bool = False,
        poolable: bool = False,
    ) -> None:
        """Start recording a request. A request that is resumed after preemption goes on where it was.

        ``poolable`` says that no more steps than the pooling can take back will turn out to lie behind its end.
        """
        if req_id in self.requests:
            return
        start, stop = token_span("all" if borrows else plan.tokens, prompt_length, STILL_GROWING)
        if plan.pooling == "last" and not borrows:
            # The last of them is one row, or lies somewhere in the generation.
            start = prompt_length - 1
        request = Request(self.num_seen, key, plan, prompt_length, start, stop, borrows)
        if self.pooling is not None and poolable and plan.pooling != "none" and not borrows:
            request.pooled = Pooled(Progress.of_new(start, stop, prompt_length, plan.pooling == "mean"))
        self.requests[req_id] = request
        self.by_key.setdefault(key, []).append(req_id)
        self.num_seen += 1
        self.num_borrowing += borrows
        self.batch = None

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
        return bool(self.requests) and any(req_id in self.requests for req_id in req_ids)

    def finish(self, req_ids: Iterable[str]) -> None:
        """Requests that will not be in a step again: what is pooled of them makes room on the device."""
        if self.pooling is not None:
            ended = [self.requests[req_id].pooled for req_id in req_ids if req_id in self.requests]
            self.pooling.park([pooled for pooled in ended if pooled is not None])

    def record(self, layout: StepLayout, layers: tuple[int, ...], gather: Callable[[np.ndarray], torch.Tensor]) -> None:
        """Keep the wanted rows of one step.

        Args:
            layout: the step's rows.
            layers: the layers that ``gather`` returns.
            gather: takes int64 row numbers [k] and returns [num_layers, k, hidden_size] on the device.
        """
        if self.batch is None or self.batch.req_ids != layout.req_ids:
            self.batch = Batch.of(layout.req_ids, self.requests)
        batch = self.batch
        if batch.pooled:
            self.pooling.set_layers(layers)
            self.pooling.record(batch.pooled, *layout.spans(batch.pools), gather)
        first_row, first, end = layout.spans(batch.kept)
        low = np.maximum(first, batch.start)
        counts = np.maximum(np.minimum(end, batch.stop) - low, 0)
        total = int(counts.sum())
        if total == 0:
            return
        positions, rows = runs(low, counts), runs(first_row + low - first, counts)
        owners = np.repeat(batch.ordinals, counts)
        values, ready = self.to_host(gather(rows))
        self.chunks.append(Chunk(layers, values, owners, positions, np.ones(total, dtype=bool), ready))

    def collect(
        self,
        sequences: Sequence[tuple[tuple[str, int], int]],
        is_local: Callable[[int], bool],
        empty: Callable[[tuple[int, int, int], torch.dtype], torch.Tensor] = _empty,
    ) -> tuple[list[Collected], list[Missing]]:
        """Put finished sequences together.

        Args:
            sequences: [n] (key, number of generated tokens).
            is_local: whether this process computes a layer; only those layers are put together.
            empty: gives the memory for a group's values; called once for each group, in their order.

        Returns:
            The states in groups of equal layers, and everything that is missing (then no states).
            Nothing is forgotten; call :meth:`discard`.
        """
        missing: list[Missing] = []
        groups: dict[tuple[tuple[int, ...], str, bool], list[int]] = {}
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
            start, stop = request.span(num_generated)
            spans.append((request, start, stop))
            if start >= stop:
                missing.append(
                    Missing(number, f"it has no state for tokens={request.plan.tokens!r}: {num_generated} generated")
                )
            layers = tuple(layer for layer in request.plan.layers if is_local(layer))
            groups.setdefault((layers, request.plan.pooling, request.pooled is not None), []).append(number)
        if missing:
            return [], missing

        collected = []
        for (layers, pooling, is_pooled), numbers in groups.items():
            if not layers:
                continue
            wanted = [(number, *spans[number]) for number in numbers]
            if is_pooled:
                values, row_start, lost = self._collect_pooled(layers, pooling, wanted, empty)
            elif pooling == "mean":
                values, row_start, lost = self.assemble(layers, wanted)
                if not lost:
                    values, row_start = _means(values, row_start, empty)
            else:
                values, row_start, lost = self.assemble(layers, wanted, empty)
            missing += lost
            if not missing:
                collected.append(Collected(layers, values, numbers, row_start))
        return ([], missing) if missing else (collected, [])

    def _collect_pooled(
        self, layers: tuple[int, ...], pooling: str, spans: list[tuple[int, Request, int, int]], empty: Callable
    ) -> tuple[torch.Tensor, list[int], list[Missing]]:
        lost = [
            Missing(number, reason)
            for number, request, start, stop in spans
            if (reason := self.pooling.missing(request.pooled, start, stop, layers)) is not None
        ]
        if lost:
            return torch.empty(len(layers), 0, 0), [], lost
        dtype = torch.float32 if pooling == "mean" else self.dtype
        values = empty((len(layers), len(spans), self.pooling.hidden_size), dtype)
        self.pooling.collect([(request.pooled, start, stop) for _, request, start, stop in spans], layers, values)
        return values, list(range(len(spans) + 1)), []

    def assemble(
        self,
        layers: tuple[int, ...],
        spans: list[tuple[int, Request, int, int]],
        empty: Callable[[tuple[int, int, int], torch.dtype], torch.Tensor] = _empty,
    ) -> tuple[torch.Tensor, list[int], list[Missing]]:
        """Rows of these layers for [n] (number of the sequence, request, first position, one past the last).

        Returns:
            The values ``(layers, rows, hidden_size)``, [n + 1] where each sequence's rows start, and what is missing.
        """
        values, filled, row_start = self._rows(layers, [(request.ordinal, *span) for _, request, *span in spans], empty)
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
        self,
        layers: tuple[int, ...],
        spans: list[tuple[int, int, int]],
        empty: Callable[[tuple[int, int, int], torch.dtype], torch.Tensor] = _empty,
    ) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        """Rows that requests computed themselves, for [n] (ordinal, first position, one past the last).

        Returns:
            The values ``(layers, rows, hidden_size)``, bool [rows] which of them there are, and [n + 1] where each
            request's rows start.
        """
        ordinals, low_of, high_of = (np.array(column, dtype=np.int64) for column in zip(*spans, strict=True))
        row_start = np.concatenate([[0], np.cumsum(high_of - low_of)])
        # By ordinal, counted from the first: where a request's rows go, and which positions are wanted of it. Nothing
        # is wanted of the last entry, which stands for all who came before the first.
        origin = int(ordinals.min())
        base, low, high = np.zeros((3, self.num_seen - origin + 1), dtype=np.int64)
        base[ordinals - origin], low[ordinals - origin], high[ordinals - origin] = row_start[:-1], low_of, high_of
        filled = np.zeros(int(row_start[-1]), dtype=bool)
        copies: list[tuple[Chunk, np.ndarray, np.ndarray]] = []
        # The newest first: what was computed again later is what counts, and every row is then written once.
        for chunk in reversed(self.chunks):
            owners = np.maximum(chunk.owners - origin, -1)
            rows = np.flatnonzero((chunk.positions >= low[owners]) & (chunk.positions < high[owners]))
            if len(rows) == 0 or not set(layers) <= set(chunk.layers):
                continue
            owners = owners[rows]
            targets = base[owners] + chunk.positions[rows] - low[owners]
            new = ~filled[targets]
            rows, targets = rows[new], targets[new]
            if len(rows) == 0:
                continue
            filled[targets] = True
            copies.append((chunk, rows, targets))
        # Also where a request has no row of its own: others may have some to lend.
        sample = next((chunk.values for chunk in self.chunks if set(layers) <= set(chunk.layers)), None)
        if sample is None:
            return torch.empty(len(layers), 0, 0), filled, row_start
        values = empty((len(layers), len(filled), sample.shape[-1]), sample.dtype)
        with ThreadPoolExecutor(COPY_THREADS) as pool:
            # Consumed, so that an error in a thread is raised here.
            list(pool.map(lambda copy: _copy_rows(values, layers, *copy), copies))
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
            gone += [self.requests.pop(req_id) for req_id in self.by_key.pop(key, [])]
        if not gone:
            return
        self.batch = None
        for request in gone:
            self.num_borrowing -= request.borrows
            if request.pooled is not None:
                self.pooling.discard(request.pooled)
        ordinals = np.array([request.ordinal for request in gone])
        for chunk in self.chunks:
            chunk.live &= ~np.isin(chunk.owners, ordinals)
        self.chunks = [_compact(chunk) for chunk in self.chunks if chunk.live.any()]


def _copy_rows(
    values: torch.Tensor, layers: tuple[int, ...], chunk: Chunk, rows: np.ndarray, targets: np.ndarray
) -> None:
    """Copy rows of a chunk to where they belong. NumPy lets other threads run meanwhile."""
    if chunk.ready is not None:
        chunk.ready.synchronize()
    source, target = _as_items(chunk.values), _as_items(values)
    rows, targets = _slice_of(rows), _slice_of(targets)
    for number, layer in enumerate(layers):
        target[number, targets] = source[chunk.layers.index(layer), rows]


def _as_items(values: torch.Tensor) -> np.ndarray:
    """A tensor ``(layers, rows, hidden_size)`` as an array ``(layers, rows)`` of opaque items, whatever its dtype."""
    array = values.view(torch.uint8).numpy()
    return array.view(f"V{array.shape[-1]}")[..., 0]


def _slice_of(numbers: np.ndarray) -> np.ndarray | slice:
    """Ascending numbers without a gap as a slice, which is copied in one go."""
    if len(numbers) and numbers[-1] - numbers[0] == len(numbers) - 1 and (np.diff(numbers) == 1).all():
        return slice(numbers[0], numbers[-1] + 1)
    return numbers


def _compact(chunk: Chunk) -> Chunk:
    """A chunk most of whose rows nobody needs any more gives up their memory."""
    if 2 * chunk.live.sum() > len(chunk.live):
        return chunk
    if chunk.ready is not None:
        chunk.ready.synchronize()
    kept = np.flatnonzero(chunk.live)
    values = chunk.values[:, torch.from_numpy(kept)]
    return Chunk(chunk.layers, values, chunk.owners[kept], chunk.positions[kept], chunk.live[kept])


def _means(values: torch.Tensor, row_start: list[int], empty: Callable) -> tuple[torch.Tensor, list[int]]:
    """Each sequence's mean, in float32: [num_layers, num_rows, hidden] to [num_layers, num_sequences, hidden]."""
    bounds = torch.tensor(row_start)
    lengths = bounds[1:] - bounds[:-1]
    means = empty((len(values), len(lengths), values.shape[-1]), torch.float32)
    for layer, out in zip(values, means, strict=True):
        out.copy_(torch.segment_reduce(layer.float(), "mean", lengths=lengths))
    return means, list(range(len(row_start)))
