"""CaptureWorker: the vLLM worker class that taps, records and delivers hidden states.

Build an engine with it: ``LLM(model, worker_cls="polygraph_hs.capture.worker.CaptureWorker",
additional_config={"polygraph_hs": {"layers": [...]}})``, or let :class:`polygraph_hs.engine.CaptureEngine` do it.
A request asks for its states with ``SamplingParams(extra_args={"polygraph_hs": polygraph_hs.spec.request_args(...)})``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import numpy as np
import torch
from vllm import envs
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.platforms import current_platform
from vllm.v1.worker.worker_base import WorkerWrapperBase

from polygraph_hs.capture.delivery import Parcel, SegmentPool
from polygraph_hs.capture.layers import DecoderLayers, find_decoder_layers
from polygraph_hs.capture.layout import StepLayout, read_layout
from polygraph_hs.capture.pooling import DevicePooling
from polygraph_hs.capture.prefixes import CachedPrefixes, full_attention_group
from polygraph_hs.capture.recorder import Recorder
from polygraph_hs.capture.tap import Tap
from polygraph_hs.spec import CONFIG_KEY, plan_of_request, resolve_layers

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

logger = logging.getLogger(__name__)


def _sample_index(req_id: str, n: int) -> int:
    """Which of the n sequences an internal request id stands for: vLLM names child i of a request ``i_<id>``."""
    if n == 1:
        return 0
    prefix = req_id.split("_", 1)[0]
    if not prefix.isdigit() or int(prefix) >= n:
        raise ValueError(f"cannot tell which of {n} samples the request id {req_id!r} stands for")
    return int(prefix)


def prompt_length(new) -> int:
    """Tokens in the prompt of a request that is new to the worker; a prompt of embeddings has no token ids."""
    return len(new.prompt_embeds if new.prompt_token_ids is None else new.prompt_token_ids)


def decoder_layers(worker: Worker) -> DecoderLayers:
    """The decoder blocks of the model that a worker has loaded."""
    return find_decoder_layers(worker.get_model(), worker.vllm_config.model_config.hf_text_config.num_hidden_layers)


def require_capturable(config) -> None:
    """Refuse options with which not every row of every step can be captured.

    Raises:
        NotImplementedError: names the options and what they do.
    """
    parallel = config.parallel_config
    partial = "a decoder block sees a part of a step's rows at a time"
    reasons = {
        "micro-batches (enable_dbo, ubatch_size)": (parallel.use_ubatching, partial),
        "prefill_context_parallel_size above 1": (parallel.prefill_context_parallel_size > 1, partial),
        "kv_sharing_fast_prefill": (config.cache_config.kv_sharing_fast_prefill, partial),
        "distributed_executor_backend='external_launcher'": (
            parallel.distributed_executor_backend == "external_launcher",
            "each process reaches its own worker alone",
        ),
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0": (
            parallel.distributed_executor_backend == "ray" and not envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND,
            "the model is run past the worker",
        ),
    }
    if found := [f"{name} ({why})" for name, (on, why) in reasons.items() if on]:
        raise NotImplementedError(f"hidden states cannot be captured with {', '.join(found)}; build the engine without")


def passes(worker: Worker, check: Callable[[], None]) -> bool:
    """Whether a check of what every worker was asked raises nothing; on the last rank it may raise.

    The other ranks keep quiet, because vLLM stops reading replies at the first error, and would take the replies
    behind it for the next call's.
    """
    try:
        check()
    except (ValueError, NotImplementedError):
        if worker.rank == worker.parallel_config.world_size - 1:
            raise
        return False
    return True


class Capture:
    """The state of capturing in one worker process.

    Attributes:
        pools: whether requests may ask for a pooling.
    """

    pools = True

    def __init__(self, worker: Worker, layers: list[int]):
        config = worker.vllm_config
        model = worker.get_model()
        graph_sizes = config.compilation_config.cudagraph_capture_sizes or [0]
        self.runner = worker.model_runner
        # With context parallelism a block's positions are spread over ranks; a connector fills blocks that no request
        # of this engine has computed.
        parallel = config.parallel_config
        spread = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
        self.may_borrow = spread == 1 and config.kv_transfer_config is None
        self.tap = Tap(
            model,
            decoder_layers(worker),
            config.model_config.get_hidden_size(),
            config.model_config.dtype,
            worker.device,
            max_tokens=max(config.scheduler_config.max_num_batched_tokens, *graph_sizes),
            is_last_stage=get_pp_group().is_last_rank,
        )
        # Every tensor-parallel rank holds the same states; one records and delivers them.
        self.delivers = get_tp_group().is_first_rank
        self.recorder = Recorder(to_host=self._to_host, dtype=config.model_config.dtype)
        if self.delivers and self.pools:
            # With asynchronous scheduling each stage can be a step ahead of what is known to be wanted; one more, as
            # a step that turns out to be wrong is computed again on top of the one before it.
            depth = 2 + parallel.pipeline_parallel_size
            self.recorder.pooling = DevicePooling(
                config.scheduler_config.max_num_seqs,
                depth,
                self.tap.hidden_size,
                worker.device,
                self._to_host,
                self._to_device,
            )
        # Rejected drafts can lie behind a sequence's end, any number of them.
        self.drafts = config.speculative_config is not None
        # Until the KV cache has been laid out, and for models whose cache has no such group, nothing is borrowed.
        self.prefixes: CachedPrefixes | None = None
        self.parcels: dict[str, Parcel] = {}
        self.pool = SegmentPool()
        # Rows go to the host beside the next step, not before it.
        on_device = worker.device.type != "cpu"
        self.stream = torch.Stream(worker.device) if on_device else None
        self.failures: list[str] = []
        self.running: set[str] = set()
        self.num_requests = 0
        # Whether the step under way holds a request whose states are wanted; then no step is empty.
        self.recording = False
        self.add_layers(layers)

    def add_layers(self, layers: list[int]) -> list[int]:
        """Tap these layers too; returns all that are tapped in this process."""
        # On every tensor-parallel rank: vLLM's compiler fuses an all-reduce with the norm behind it unless something
        # else reads its result, as a tap does, and ranks that call other collectives wait for each other for good.
        self.tap.set_layers({*self.tap.layers, *resolve_layers(layers, self.tap.num_hidden_layers)})
        if self.recorder.pooling is not None:
            self.recorder.pooling.set_layers(self.tap.layers)
        self.checked_sizes: set[int] = set()
        self.check_rows = 0
        return list(self.tap.layers)

    def before_forward(self, scheduler_output) -> None:
        """Learn of new requests, and now and then mark the buffers to see that the step writes them."""
        if scheduler_output.finished_req_ids:
            self.running -= scheduler_output.finished_req_ids
            self.recorder.finish(scheduler_output.finished_req_ids)
        for new in scheduler_output.scheduled_new_reqs:
            # vLLM's V2 runner is handed a preempted request as a new one when it is resumed.
            self.num_requests += new.req_id not in self.running
            self.running.add(new.req_id)
            if self.delivers:
                self.register(new)
        if self.delivers and self.prefixes is not None:
            self.prefixes.follow(scheduler_output, self.recorder)
        # A hook that a compiler or a graph dropped leaves its buffer unwritten. One good look a power of two of step
        # sizes, with every engine, is enough to notice and costs nothing after the first steps.
        num_tokens = scheduler_output.total_num_scheduled_tokens
        self.check_rows = 0
        self.recording = bool(self.tap.layers) and self.recorder.wants(scheduler_output.num_scheduled_tokens)
        if self.recording and num_tokens.bit_length() not in self.checked_sizes:
            self.check_rows = num_tokens
            self.tap.set_canary(num_tokens)

    def can_borrow(self) -> bool:
        """Whether requests may read the prefix cache for positions whose states are asked for."""
        if self.prefixes is None and self.may_borrow and (group := full_attention_group(self.runner.kv_cache_config)):
            self.prefixes = CachedPrefixes(*group)
        return self.prefixes is not None

    def register(self, new) -> None:
        """Start recording a request that is new to the worker, if it carries a plan."""
        params = new.sampling_params
        args = (params.extra_args or {}).get(CONFIG_KEY) if params is not None else None
        if args is None:
            return
        try:
            plan = plan_of_request(args)
            key = (args["key"], _sample_index(new.req_id, args["n"]))
        except ValueError:
            # An error here would end the engine with everything in it; the driver raises when it is to collect this.
            logger.exception("request %s is not captured", new.req_id)
            return
        # Of stop strings the driver learns, steps later.
        poolable = not self.drafts and not params.stop
        self.recorder.add_request(new.req_id, key, plan, prompt_length(new), args["borrows"], poolable)

    def after_forward(self) -> None:
        """Keep the wanted rows of the step that was just launched."""
        if not self.recording:
            return
        layout = read_layout(self.runner)
        if self.check_rows:
            # The runner may have left out rows of the schedule: drafts that the device did not make after all.
            if unwritten := self.tap.unwritten_layers(layout.num_tokens):
                self.failures.append(
                    f"the taps on layers {list(unwritten)} were not written in a step of {layout.num_tokens} tokens"
                )
            else:
                self.checked_sizes.add(self.check_rows.bit_length())
        self.record(layout)

    def record(self, layout: StepLayout) -> None:
        self.recorder.record(layout, self.tap.layers, self._gather)

    def _gather(self, rows: np.ndarray) -> torch.Tensor:
        return self.tap.gather(self._to_device(rows))

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        values = torch.from_numpy(array)
        if self.stream is None:
            return values
        return values.pin_memory().to(self.tap.device, non_blocking=True)

    def _to_host(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Event | None]:
        """Start a copy to pinned host memory; returns the copy and the event after which it can be read."""
        if self.stream is None:
            return values, None
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self.stream.wait_stream(torch.accelerator.current_stream(self.tap.device))
        with self.stream:
            host.copy_(values, non_blocking=True)
        # The memory of the gathered rows may be used again once they have been copied.
        values.record_stream(self.stream)
        return host, self.stream.record_event()

    def collect(self, sequences: list[list], token: str) -> dict | None:
        if not self.delivers:
            return None
        keys = [(key, index) for key, index, _ in sequences]
        lengths = [num_generated for _, _, num_generated in sequences]
        parcel = Parcel(token, self.pool)
        try:
            collected, missing = self.recorder.collect(
                list(zip(keys, lengths, strict=True)), self.tap.is_local, parcel.empty
            )
            failures, self.failures = self.failures, []
            if not failures and not missing:
                for part in collected:
                    parcel.add(part)
                self.parcels[token] = parcel
        finally:
            self.recorder.discard(keys)
            if token not in self.parcels:
                parcel.close()
        if failures or missing:
            return {"failures": failures, "missing": [list(entry) for entry in missing]}
        return {"failures": [], "missing": [], **parcel.description()}


class CaptureWorker(Worker):
    """vLLM's own worker for this platform, with hidden-state capture."""

    capture: Capture | None = None

    def load_model(self, *args, **kwargs) -> None:
        require_capturable(self.vllm_config)
        super().load_model(*args, **kwargs)
        # After the weights, so that loading sees the model it expects; before memory is measured and before
        # compilation, so that the KV cache is sized around the buffers and the hooks are part of the graphs.
        config = self.vllm_config.additional_config or {}
        self.capture = Capture(self, config.get(CONFIG_KEY, {}).get("layers", []))
        logger.info("polygraph-hs taps layers %s", list(self.capture.tap.layers))

    def execute_model(self, scheduler_output, *args, **kwargs):
        self.capture.before_forward(scheduler_output)
        output = super().execute_model(scheduler_output, *args, **kwargs)
        self.capture.after_forward()
        return output

    def capture_add_layers(self, layers: list[int]) -> list[int]:
        """Tap these layers too, if there are any; returns all that this process taps. Only for an eager engine."""
        return self.capture.add_layers(layers) if layers else list(self.capture.tap.layers)

    def capture_can_borrow(self) -> bool:
        """Whether a request may read the prefix cache although its prompt's states are asked for."""
        return self.capture.can_borrow()

    def capture_collect(self, sequences: list[list], token: str) -> dict | None:
        """Put finished sequences together.

        Args:
            sequences: [n] of [request key, sample index, number of generated tokens].
            token: the driver's name for the parcel, under which it is released in any case.

        Returns:
            None from a rank that has no part; else a dict with ``failures`` (reasons why no sequence can be trusted)
            and ``missing`` ([number of the sequence, reason]), and if both are empty a parcel's description; or
            only ``error``. An error is not raised: of several workers' replies, vLLM would leave the rest unread.
        """
        try:
            return self.capture.collect(sequences, token)
        except Exception as error:
            logger.exception("polygraph-hs could not put %d sequences together", len(sequences))
            return {"error": f"{type(error).__name__}: {error}"}

    def capture_fetch(self, token: str, group: int, start: int, stop: int) -> bytes | None:
        """A piece of the bytes of a parcel's group, for a driver that cannot map them; None from a rank without it."""
        parcel = self.capture.parcels.get(token)
        return None if parcel is None or group >= len(parcel.groups) else parcel.contents(group, start, stop)

    def capture_release(self, token: str) -> None:
        """Give a parcel up, once the driver has it or does not want it."""
        if parcel := self.capture.parcels.pop(token, None):
            parcel.close()

    def capture_num_requests(self) -> int:
        """How many requests have been scheduled on this worker since it started."""
        return self.capture.num_requests

    def capture_process_id(self) -> int:
        """The process that this worker is, for looking at it from outside."""
        return os.getpid()

    def capture_held(self) -> dict[str, int]:
        """What this worker keeps at the moment: requests being recorded, rows of steps, parcels not yet released."""
        recorder = self.capture.recorder
        return {
            "requests": len(recorder.requests),
            "rows": sum(len(chunk.positions) for chunk in recorder.chunks),
            "parcels": len(self.capture.parcels),
        }

    def capture_discard(self, requests: list[list]) -> None:
        """Forget requests that will not be collected: [key, n] each."""
        self.capture.recorder.discard((key, index) for key, n in requests for index in range(n))


def equip(worker: Worker, capture: Capture) -> None:
    """Make a CaptureWorker of a worker that was built without capture, of whatever class."""
    worker.capture = capture
    worker.__class__ = type("CaptureWorker", (CaptureWorker, type(worker)), {})


def attach(worker: Worker | WorkerWrapperBase) -> None:
    """Give an eager engine's worker that was built without capture what :class:`CaptureWorker` has."""
    if isinstance(worker, WorkerWrapperBase):
        worker = worker.worker
    if passes(worker, lambda: _check_attach(worker)) and getattr(worker, "capture", None) is None:
        equip(worker, Capture(worker, []))


def _check_attach(worker: Worker) -> None:
    if type(getattr(worker, "capture", None)) not in (Capture, type(None)):
        raise ValueError(
            "this engine is set up for the five-call protocol; end that first, with "
            "llm.collective_rpc('_setup_hidden_states_capture', args=([],))"
        )
    require_capturable(worker.vllm_config)
