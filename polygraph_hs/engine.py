"""The driver's side: generate with vLLM and collect the hidden states of that same pass."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import os
import secrets
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import numpy as np
import torch
from packaging.specifiers import SpecifierSet

from polygraph_hs.capture.delivery import Group, new_token, num_bytes, open_group, read_group
from polygraph_hs.errors import (
    EngineDiedError,
    IncompleteCaptureError,
    LayerNotTappedError,
    PromptTooLongError,
    UnsupportedVersionError,
)
from polygraph_hs.spec import (
    CONFIG_KEY,
    CapturePlan,
    plan_of_request,
    ranges,
    request_args,
    resolve_layers,
    token_span,
)
from polygraph_hs.states import POOLED_POSITION, HiddenStates

WORKER_CLS = "polygraph_hs.capture.worker.CaptureWorker"
# The same range as the gpu extra's in setup.cfg; what was run is in docs/versions.md.
SUPPORTED_VLLM = SpecifierSet(">=0.25.1,<0.33")
# vLLM's RPC messages can carry up to 4 GiB.
FETCH_BYTES = 2**28

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, repr=False)
class Generation:
    """One generated sequence.

    Attributes:
        prompt: what the caller passed: a text, a chat, or a list of token ids.
        text: the generated text, without special tokens.
        prompt_token_ids: list of P ints, exactly what the model saw.
        token_ids: list of G ints, exactly what the model made, a final end-of-sequence token included.
        log_likelihoods: float32 array ``(G,)``, natural log of each generated token's probability.
        top_token_ids: int64 array ``(G, k)``, the k most probable tokens at each step, most probable first.
        top_log_likelihoods: float32 array ``(G, k)``, their natural log-probabilities.
        finish_reason: ``stop`` or ``length``.
        num_cached_tokens: prompt tokens that vLLM's prefix cache spared; None if vLLM does not say.
        hidden_states: the captured states, or None if none were asked for.
    """

    prompt: str | list
    text: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    log_likelihoods: np.ndarray
    top_token_ids: np.ndarray
    top_log_likelihoods: np.ndarray
    finish_reason: str | None
    num_cached_tokens: int | None
    hidden_states: HiddenStates | None

    def __repr__(self) -> str:
        return (
            f"Generation(text={self.text!r}, {len(self.prompt_token_ids)} + {len(self.token_ids)} tokens, "
            f"finish_reason={self.finish_reason!r}, hidden_states={self.hidden_states!r})"
        )


def require_vllm():
    """Import a vLLM that is supported, or say how to install one."""
    try:
        import vllm
    except ImportError as error:
        raise ImportError(
            f"polygraph-hs generates with vLLM, which cannot be imported here ({error}). Install it with "
            f"pip install 'polygraph-hs[gpu]' for CUDA or 'polygraph-hs[cpu]' for the CPU"
        ) from error
    if not SUPPORTED_VLLM.contains(vllm.__version__, prereleases=True):
        raise UnsupportedVersionError(
            f"vLLM {vllm.__version__} is installed; polygraph-hs reads vLLM's internals and supports versions "
            f"{SUPPORTED_VLLM}. Install one of these: pip install 'polygraph-hs[gpu]' for CUDA or "
            f"'polygraph-hs[cpu]' for the CPU"
        )
    return vllm


@contextlib.contextmanager
def _engine_process_start() -> Iterator[None]:
    """Start vLLM's engine process by spawning, without running the caller's script again.

    vLLM forks by default, and a forked child of a process that has used torch on several CPU threads hangs while it
    loads the model. Spawning is safe, but re-imports the caller's main module, so that a script without a main
    guard would start an engine in its engine. vLLM's processes need nothing of that module: it is hidden for the
    moment they start. A start method that is set in the environment is respected.
    """
    variable = "VLLM_WORKER_MULTIPROC_METHOD"
    given = os.environ.get(variable)
    main = sys.modules["__main__"]
    hidden = {name: getattr(main, name) for name in ("__spec__", "__file__") if hasattr(main, name)}
    os.environ.setdefault(variable, "spawn")
    ray, ray_address = sys.modules.get("ray"), os.environ.get("RAY_ADDRESS")
    if ray is not None and ray_address is None and ray.is_initialized():
        # A spawned process starts a Ray cluster of its own unless it is told of the caller's.
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    try:
        for name in hidden:
            delattr(main, name)
        main.__spec__ = None
        yield
    finally:
        # vLLM may have changed the variable meanwhile; the caller's environment stays as it was.
        if given is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = given
        if ray_address is None:
            os.environ.pop("RAY_ADDRESS", None)
        for name, value in hidden.items():
            setattr(main, name, value)


class CaptureEngine:
    """Generates with a vLLM engine and returns each sequence with its hidden states.

    Use :meth:`start` for a new engine, or pass an existing ``vllm.LLM``.

    Attributes:
        llm: the ``vllm.LLM``.
        num_hidden_layers, hidden_size, vocabulary_size, max_model_len: of the model.
        tapped_layers: layers the engine writes out, non-negative and ascending.
        eager: whether taps can still be added.
    """

    def __init__(self, llm):
        require_vllm()
        self.llm = llm
        config = llm.llm_engine.vllm_config
        self.num_hidden_layers = config.model_config.hf_text_config.num_hidden_layers
        self.hidden_size = config.model_config.get_hidden_size()
        self.vocabulary_size = config.model_config.get_vocab_size()
        self.max_model_len = config.model_config.max_model_len
        self.max_logprobs = config.model_config.max_logprobs
        self.eager = bool(config.model_config.enforce_eager)
        self._prefix = secrets.token_hex(8)
        self._counter = itertools.count()
        if not _captures(config.parallel_config.worker_cls):
            self._attach()
        self.tapped_layers = self._add_layers(())
        self._can_borrow = all(self._rpc("capture_can_borrow"))
        self._block_size = config.cache_config.block_size

    @classmethod
    def start(cls, model: str, layers: Sequence[int], **llm_kwargs) -> CaptureEngine:
        """Start a vLLM engine that taps ``layers``.

        Args:
            model: path or hub name.
            layers: layer indices as in :class:`~polygraph_hs.spec.CapturePlan`, negative ones allowed.
            llm_kwargs: for ``vllm.LLM``.
        """
        vllm = require_vllm()
        if "worker_cls" in llm_kwargs:
            raise ValueError(
                f"worker_cls={llm_kwargs['worker_cls']!r} cannot be combined with capture, whose worker class is "
                f"{WORKER_CLS}; leave it out, or derive yours from it and use from_llm"
            )
        # Negative indices are resolved here: layers -1 and 30 of the same model are one graph in the compile cache.
        resolved = resolve_layers(layers, read_num_hidden_layers(model, **llm_kwargs))
        from polygraph_hs import __version__

        # Part of vLLM's compile-cache key: other layers, or another version's hooks, are another graph.
        capture_config = {"layers": list(resolved), "version": __version__}
        additional_config = {**(llm_kwargs.pop("additional_config", None) or {}), CONFIG_KEY: capture_config}
        with _engine_process_start():
            llm = vllm.LLM(model=model, worker_cls=WORKER_CLS, additional_config=additional_config, **llm_kwargs)
        return cls(llm)

    def _attach(self) -> None:
        how = (
            f"build it with LLM(..., worker_cls={WORKER_CLS!r}, additional_config={{'polygraph_hs': "
            f"{{'layers': [...]}}}}), or let HiddenStatesModel.from_pretrained build it"
        )
        if not self.eager:
            raise LayerNotTappedError(
                f"this LLM was built without capture and its forward pass is already compiled, so it cannot be "
                f"tapped any more: {how}"
            )
        from polygraph_hs.capture.worker import attach

        try:
            self.llm.collective_rpc(attach)
        except TypeError as error:
            raise LayerNotTappedError(
                f"this eager LLM was built without capture, and vLLM refuses to send code to its engine process: "
                f"{how}. (With VLLM_ALLOW_INSECURE_SERIALIZATION=1 or VLLM_ENABLE_V1_MULTIPROCESSING=0 in the "
                f"environment before the LLM is built, it can be tapped as it is.)"
            ) from error

    def require_layers(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Make sure the engine taps these layers; an eager engine adds what is missing.

        Returns:
            The layers, non-negative and ascending.

        Raises:
            ValueError: a layer does not exist.
            LayerNotTappedError: the engine is compiled and has no tap on a layer.
        """
        wanted = resolve_layers(layers, self.num_hidden_layers)
        missing = sorted(set(wanted) - set(self.tapped_layers))
        if missing and not self.eager:
            raise LayerNotTappedError(
                f"layers {missing} are not tapped, and this engine is compiled, so its taps are fixed: it has layers "
                f"{list(self.tapped_layers)}. Build it with layers={sorted({*wanted, *self.tapped_layers})}, or with "
                f"enforce_eager=True to add layers later"
            )
        if missing:
            self.tapped_layers = self._add_layers(missing)
        return wanted

    def _add_layers(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Add taps, and ask the workers, who know best, which layers are tapped now."""
        replies = self._rpc("capture_add_layers", list(layers))
        return tuple(sorted({layer for reply in replies for layer in reply}))

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling_params,
        plan: CapturePlan | Sequence[CapturePlan | None] | None,
        *,
        originals: Sequence | None = None,
        progress: bool = False,
        lora_request=None,
    ) -> list[list[Generation]]:
        """Generate once and return texts, log-probabilities and states of that pass.

        Args:
            prompts: texts, or token ids, which are passed to vLLM as they are.
            sampling_params: a ``vllm.SamplingParams``, or one a prompt; they are not changed.
            plan: what to capture, or one plan a prompt; None captures nothing.
            originals: what the caller calls the prompts, for ``Generation.prompt``.
            progress: show vLLM's progress bar.
            lora_request: a ``vllm.lora.request.LoRARequest``, or one (or None) a prompt.

        Returns:
            For each prompt, its ``sampling_params.n`` sequences.

        Raises:
            ValueError: no prompts, an empty prompt, a token id outside the vocabulary, lists of unequal lengths.
            PromptTooLongError: some prompts do not fit the window; carries the others' results.
            LayerNotTappedError, IncompleteCaptureError: states cannot be, or were not, captured.
            EngineDiedError: vLLM's engine ended.
        """
        originals = list(prompts if originals is None else originals)
        prompts = self._checked_token_ids(prompts)
        if len(originals) != len(prompts):
            raise ValueError(f"originals has {len(originals)} entries for {len(prompts)} prompts")
        too_long = {i: len(prompt) for i, prompt in enumerate(prompts) if len(prompt) >= self.max_model_len}
        kept = [number for number in range(len(prompts)) if number not in too_long]
        sampling = _one_each(sampling_params, len(prompts), "sampling_params")
        plans = _one_each(plan, len(prompts), "plan")
        loras = _one_each(lora_request, len(prompts), "lora_request")
        inputs, requests = self._inputs(
            [prompts[i] for i in kept], [sampling[i] for i in kept], [plans[i] for i in kept]
        )
        self._check_seeds(requests, sum(len(prompts[i]) * sampling[i].n for i in kept))

        def launch():
            adapters = [loras[i] for i in kept] if any(loras) else None
            return self.llm.generate(inputs, requests, use_tqdm=progress, lora_request=adapters)

        answers = self._run(launch, requests, [originals[i] for i in kept], kept) if kept else []
        if not too_long:
            return answers
        outputs: list = [None] * len(prompts)
        for number, answer in zip(kept, answers, strict=True):
            outputs[number] = answer
        lengths = ", ".join(f"prompt {number}: {length} tokens" for number, length in too_long.items())
        raise PromptTooLongError(
            f"{len(too_long)} of {len(prompts)} prompts do not fit the model's window of {self.max_model_len} tokens, "
            f"of which a prompt may fill {self.max_model_len - 1} ({lengths}). The others were answered: this error's "
            f".outputs has their results. Shorten these, or raise max_model_len",
            outputs,
        )

    def stream(
        self,
        prompts: Iterable[str | Sequence[int]],
        sampling_params,
        plan: CapturePlan | None,
        *,
        max_in_flight: int | None = None,
        lora_request=None,
        tokenize: Callable[[object], list[int]] | None = None,
    ) -> Iterator[tuple[int, list[Generation]]]:
        """Generate for any number of prompts in bounded memory, and hand each prompt's results over as they finish.

        Prompts are taken only while there is room, and their states are freed once they are handed over: let go of
        them, or copy what is to stay (the sequences that finish together share one memory), and 100,000 prompts need
        no more memory than 1,000. No other call of this engine is possible until the iterator has ended or has been
        closed.

        Args:
            prompts: texts or token ids, any iterable; read as the run goes.
            sampling_params: a ``vllm.SamplingParams`` for all of them.
            plan: what to capture, for all of them; None captures nothing.
            max_in_flight: most prompts that vLLM has and whose results have not been handed over. By default 1.5
                times as many as vLLM runs at once (its ``max_num_seqs``).
            lora_request: a ``vllm.lora.request.LoRARequest`` for all of them.
            tokenize: turns a prompt into token ids; raises ValueError for a prompt that it refuses.

        Yields:
            The number of a prompt, from 0, and its ``sampling_params.n`` :class:`Generation`, in the order in which
            they finish.

        Raises:
            ValueError, PromptTooLongError: some prompts are empty, too long or not of this model's tokens: after
                every other prompt has been answered, and naming the first five. What the iterable itself raises
                comes after the prompts before it have been answered.
            LayerNotTappedError, IncompleteCaptureError, EngineDiedError: as in :meth:`generate`.
        """
        from polygraph_hs.streaming import Stream

        return iter(
            Stream(self, prompts, sampling_params, plan, max_in_flight, lora_request, tokenize or self._token_ids)
        )

    def chat(
        self,
        conversations: Sequence[list[dict]],
        sampling_params,
        plan: CapturePlan | Sequence[CapturePlan | None] | None,
        *,
        progress: bool = False,
        **chat_options,
    ) -> list[list[Generation]]:
        """:meth:`generate` for chats: ``vllm.LLM.chat`` with capture.

        Args:
            conversations: lists of messages, each a dict of ``role`` and ``content``.
            sampling_params, plan, progress: as in :meth:`generate`.
            chat_options: for ``vllm.LLM.chat`` (chat_template, tools, lora_request, ...).
        """
        conversations = list(conversations)
        if not conversations:
            raise ValueError("conversations=[] is empty; give at least one list of messages")
        if isinstance(conversations[0], dict):
            raise ValueError("conversations is one list of messages; give a list of conversations")
        sampling = _one_each(sampling_params, len(conversations), "sampling_params")
        plans = _one_each(plan, len(conversations), "plan")
        resolved = self._resolver()
        requests = [self._prepare(params, resolved(plan)) for params, plan in zip(sampling, plans, strict=True)]

        def launch():
            return self.llm.chat(conversations, requests, use_tqdm=progress, **chat_options)

        return self._run(launch, requests, conversations, range(len(conversations)))

    def prepare(self, sampling_params, plan: CapturePlan | None):
        """``vllm.SamplingParams`` of one request that is to be captured, for calling vLLM oneself.

        Every request needs its own, used once: pass them to ``engine.llm.generate`` or ``chat``, and what that
        returns to :meth:`collect`. A request that is aborted is given up with :meth:`discard`.

        Args:
            sampling_params: a ``vllm.SamplingParams``, which is not changed.
            plan: what to capture; None captures nothing.

        Returns:
            A ``vllm.SamplingParams`` that carries the plan.

        Raises:
            LayerNotTappedError: the engine is compiled and has no tap on one of the layers.
        """
        return self._prepare(sampling_params, self._resolver()(plan))

    def _resolver(self) -> Callable[[CapturePlan | None], CapturePlan | None]:
        """Turns plans into ones with non-negative layers that are tapped; looks at each plan object once."""
        known: dict[int, CapturePlan] = {}

        def resolved(plan: CapturePlan | None) -> CapturePlan | None:
            if plan is not None and id(plan) not in known:
                known[id(plan)] = CapturePlan(self.require_layers(plan.layers), plan.tokens, plan.pooling)
            return known.get(id(plan))

        return resolved

    def _may_borrow(self, prompts: list[list[int]], sampling: list) -> list[bool]:
        """Whether each prompt begins like another sequence of the call, so that the prefix cache would spare it work.

        The others need not keep rows that nobody borrows.
        """
        if not self._can_borrow:
            return [False] * len(prompts)
        beginnings = [tuple(prompt[: self._block_size]) for prompt in prompts]
        count = Counter()
        for beginning, params in zip(beginnings, sampling, strict=True):
            count[beginning] += params.n
        return [
            count[beginning] > 1 and not params.skip_reading_prefix_cache
            for beginning, params in zip(beginnings, sampling, strict=True)
        ]

    def _inputs(
        self, prompts: list[list[int]], sampling: list, plans: list[CapturePlan | None]
    ) -> tuple[list[dict], list]:
        """vLLM's inputs, and sampling parameters that carry the plans, for prompts that are generated together."""
        # Requests whose prompts' states are asked for find each other's prefixes in vLLM's cache, and no other
        # request's, so that there is a row to borrow for each position that the cache spares them.
        salt = {"cache_salt": f"{self._prefix}-{next(self._counter)}"}
        resolved = self._resolver()
        inputs, requests = [], []
        for prompt, params, plan, may in zip(
            prompts, sampling, plans, self._may_borrow(prompts, sampling), strict=True
        ):
            wanted = resolved(plan)
            borrows = may and wanted is not None and wanted.needs_whole_prompt()
            requests.append(self._prepare(params, wanted, borrows))
            inputs.append({"prompt_token_ids": prompt, **(salt if borrows else {})})
        return inputs, requests

    def _prepare(self, sampling_params, plan: CapturePlan | None, borrows: bool = False):
        params = _copied(sampling_params)
        params.flat_logprobs = True
        if plan is not None:
            key = f"{self._prefix}-{next(self._counter)}"
            args = request_args(key, params.n, plan, borrows)
            params.extra_args = {**(params.extra_args or {}), CONFIG_KEY: args}
            # A cached prefix is not computed again, and leaves no row.
            if plan.needs_whole_prompt() and not borrows:
                params.skip_reading_prefix_cache = True
        return params

    def collect(self, outputs: Sequence, requests: Sequence, originals: Sequence | None = None):
        """Put vLLM's outputs and the states of their requests together. States can be collected once.

        Args:
            outputs: finished ``vllm.RequestOutput``, one a request, in the order of ``requests``.
            requests: the :meth:`prepare`d ``vllm.SamplingParams`` that they were generated with.
            originals: what the caller calls the prompts; by default what vLLM does.

        Returns:
            For each request a list of its ``n`` :class:`Generation`.

        Raises:
            ValueError: not one finished output a request.
            IncompleteCaptureError: states are missing.
        """
        if len(outputs) != len(requests):
            raise ValueError(f"{len(outputs)} outputs came for {len(requests)} requests; give one output a request")
        if embedded := [number for number, output in enumerate(outputs) if output.prompt_token_ids is None]:
            raise ValueError(f"the prompts {embedded} are embeddings; capture needs prompts of tokens")
        unfinished = [number for number, output in enumerate(outputs) if not output.finished]
        if unfinished:
            raise ValueError(f"the outputs {unfinished} are not finished; collect them when vLLM has finished them")
        if originals is None:
            originals = [output.prompt_token_ids if output.prompt is None else output.prompt for output in outputs]
        return self._generations(outputs, requests, originals, range(len(outputs)))

    def _generations(
        self, outputs: Sequence, requests: Sequence, originals: Sequence, numbers: Sequence[int]
    ) -> list[list[Generation]]:
        groups = [
            [
                _Sequence(number, sample, output, args, plan)
                for sample in sorted(output.outputs, key=lambda sample: sample.index)
            ]
            for number, output, (args, plan) in zip(numbers, outputs, map(_capture_args, requests), strict=True)
        ]
        captured = [sequence for group in groups for sequence in group if sequence.args is not None]
        states = iter(self._collect(captured) if captured else ())
        return [
            [_generation(original, sequence, None if sequence.args is None else next(states)) for sequence in group]
            for original, group in zip(originals, groups, strict=True)
        ]

    def discard(self, requests: Sequence) -> None:
        """Free what was captured for :meth:`prepare`d requests that will not be collected, such as aborted ones."""
        wanted = [[args["key"], args["n"]] for args, _ in map(_capture_args, requests) if args is not None]
        if wanted:
            self._rpc("capture_discard", wanted)

    def _checked_token_ids(self, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
        if isinstance(prompts, str):
            raise ValueError(f"prompts={prompts!r} is one text; give a list of prompts")
        if not prompts:
            raise ValueError("prompts=[] is empty; give at least one prompt")
        prompts = [self._token_ids(prompt) for prompt in prompts]
        empty = [number for number, prompt in enumerate(prompts) if not prompt]
        if empty:
            raise ValueError(f"the prompts at {empty} are empty (no tokens); remove them or give them text")
        outside = {number: bad for number, prompt in enumerate(prompts) if (bad := self._outside_vocabulary(prompt))}
        if outside:
            raise ValueError(
                f"some prompts have token ids outside the vocabulary, whose ids go from 0 to "
                f"{self.vocabulary_size - 1} (prompt: ids {dict(list(outside.items())[:5])}); tokenize them with this "
                f"model's tokenizer"
            )
        return prompts

    def _token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        return self.llm.get_tokenizer().encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _outside_vocabulary(self, prompt: list[int]) -> list[int]:
        """The token ids of a prompt that the model does not have."""
        if 0 <= min(prompt) <= max(prompt) < self.vocabulary_size:
            return []
        return [token for token in prompt if not 0 <= token < self.vocabulary_size]

    def _check_seeds(self, requests: Sequence, num_tokens: int | None) -> None:
        """vLLM's CPU build ends its engine when a seeded request is prefilled in chunks: say so before it does.

        Args:
            requests: ``vllm.SamplingParams`` of a call.
            num_tokens: of all its prompts, n samples of a prompt counted n times; None if there is no telling.
        """
        config = self.llm.llm_engine.vllm_config
        if config.device_config.device_type != "cpu" or not config.scheduler_config.enable_chunked_prefill:
            return
        seeds = [params.seed for params in requests if params.seed is not None and params.temperature > 0]
        budget = config.scheduler_config.max_num_batched_tokens
        if not seeds or (num_tokens is not None and num_tokens <= budget):
            return
        how_many, raise_budget = "", ""
        if num_tokens is not None:
            how_many = f" with {num_tokens} prompt tokens (n samples of a prompt count n times)"
            raise_budget = f"raise max_num_batched_tokens, now {budget}, to at least {num_tokens}, "
        raise ValueError(
            f"seed={seeds[0]}{how_many}: vLLM on the CPU cannot prefill a seeded request in chunks, and its engine "
            f"would end. To go on, {raise_budget}build the engine with enable_chunked_prefill=False, or leave the "
            f"seed out"
        )

    def _run(
        self, launch: Callable[[], list], requests: list, originals: Sequence, numbers: Sequence[int]
    ) -> list[list[Generation]]:
        """Launch prepared requests through vLLM and collect them.

        ``numbers`` are what the prompts are called in errors.
        """
        first = self.llm.request_counter.counter
        with self._taking_back(lambda: dict(enumerate(numbers, first)), lambda: requests):
            return self._generations(launch(), requests, originals, numbers)

    @contextlib.contextmanager
    def _taking_back(self, numbers: Callable[[], dict[int, int]], requests: Callable[[], list]) -> Iterator[None]:
        """Whatever ends a call early leaves nothing behind, in vLLM or in its workers.

        Args:
            numbers: the call's prompts that have not been collected: vLLM's number of the request, and what the
                prompt is called in errors.
            requests: their ``SamplingParams``.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        processor = self.llm.llm_engine.output_processor
        if self._ended():
            raise EngineDiedError("vLLM's engine has ended and cannot be used any more; start a new one")
        if processor.request_states:
            raise ValueError(
                f"this engine has {len(processor.request_states)} unfinished requests of the caller's own; vLLM would "
                f"mix their outputs with this call's. Finish or abort them first"
            )
        try:
            yield
        except EngineDeadError as error:
            known = numbers()
            running = {known[int(state.external_req_id)] for state in processor.request_states.values()}
            when = f"while prompts {ranges(sorted(running))} of {len(known)} were not finished"
            if not running:
                when = f"while the states of prompts {ranges(sorted(known.values()))} were handed over"
            raise EngineDiedError(
                f"vLLM's engine ended {when} (its own message is above); their answers and states are lost, and this "
                f"engine cannot be used any more. Start a new one"
            ) from error
        except BaseException:
            try:
                running = dict(processor.request_states)
                parents = {state.parent_req.request_id for state in running.values() if state.parent_req is not None}
                if running:
                    self.llm.llm_engine.abort_request([*running, *parents], internal=True)
                self.discard(requests())
            except Exception:
                # What ended the call is what the caller has to see; an engine that ended with it needs no cleaning.
                logger.exception("the requests of a call that failed could not be taken back")
            raise

    def _collect(self, captured: list[_Sequence]) -> list[HiddenStates]:
        from vllm.v1.engine.exceptions import EngineDeadError

        wanted = [[sequence.args["key"], sequence.completion.index, sequence.num_generated] for sequence in captured]
        token = new_token()
        try:
            replies = enumerate(self._rpc("capture_collect", wanted, token))
            replies = [(rank, reply) for rank, reply in replies if reply is not None]
            _require_complete([reply for _, reply in replies], captured)
            # One group from each pipeline stage that computes some of the layers.
            groups = [group for rank, reply in replies for group in self._open(rank, reply)]
            values = _by_sequence(groups, captured)
            return [self._hidden_states(*pair) for pair in zip(values, captured, strict=True)]
        except (IncompleteCaptureError, EngineDeadError):
            raise
        except Exception as error:
            raise IncompleteCaptureError(
                f"the states of {_names(captured)} could not be handed over: {error}"
            ) from error
        finally:
            self._rpc("capture_release", token)

    def _open(self, rank: int, description: dict) -> list[Group]:
        groups = []
        for number in range(len(description["groups"])):
            group = open_group(description, number)
            if group is None:
                group = read_group(self._fetch(rank, description, number), description, number)
            groups.append(group)
        return groups

    def _fetch(self, rank: int, description: dict, number: int) -> bytearray:
        """The bytes of a parcel's group over RPC, in pieces that its message format can carry."""
        contents = bytearray()
        size = num_bytes(description["groups"][number])
        for start in range(0, size, FETCH_BYTES):
            stop = min(start + FETCH_BYTES, size)
            contents += self._rpc("capture_fetch", description["token"], number, start, stop)[rank]
        return contents

    def _rpc(self, method: str, *args) -> list:
        """Call a method of every worker.

        vLLM waits for the answers without end, also when its engine process has died meanwhile, or its thread that
        reads them.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        core = self.llm.llm_engine.engine_core
        if not hasattr(core, "resources"):
            # The engine runs in this process.
            return self.llm.collective_rpc(method, args=args)
        answer: Future = Future()

        def call():
            try:
                answer.set_result(self.llm.collective_rpc(method, args=args))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=call, daemon=True).start()
        while not wait([answer], timeout=1.0).done:
            if self._ended():
                unread = list(core.outputs_queue.queue)
                raise EngineDeadError() from next((item for item in unread if isinstance(item, Exception)), None)
        return answer.result()

    def _ended(self) -> bool:
        """Whether vLLM's engine process, or the thread that reads its replies, has ended."""
        core = self.llm.llm_engine.engine_core
        return hasattr(core, "resources") and (core.resources.engine_dead or not core.output_queue_thread.is_alive())

    def _hidden_states(self, values: torch.Tensor, sequence: _Sequence) -> HiddenStates:
        plan, prompt_length, num_generated = sequence.plan, len(sequence.prompt_token_ids), sequence.num_generated
        start, stop = token_span(plan.tokens, prompt_length, num_generated)
        positions = np.arange(start, stop)
        if plan.pooling != "none":
            positions = np.array([POOLED_POSITION if plan.pooling == "mean" else stop - 1])
        if values.shape[1] != len(positions):
            raise IncompleteCaptureError(
                f"{sequence.name}, {prompt_length} + {num_generated} tokens, came with {values.shape[1]} states where "
                f"tokens={plan.tokens!r} has {len(positions)}"
            )
        return HiddenStates(
            values,
            plan.layers,
            positions,
            prompt_length,
            num_generated,
            self.num_hidden_layers,
            plan.tokens,
            plan.pooling,
        )

    def num_requests_processed(self) -> int:
        """How many requests this engine's scheduler has handed to its worker, captured or not."""
        return max(self._rpc("capture_num_requests"))


def read_num_hidden_layers(
    model: str, *, trust_remote_code: bool = False, revision: str | None = None, hf_overrides=None, **other_llm_kwargs
) -> int:
    """Number of decoder blocks in a model's configuration, as ``vllm.LLM`` would read it with these arguments.

    Read before an engine is started, so that a wrong layer is an error before anything is loaded.
    """
    from vllm.transformers_utils.config import get_config

    overrides = {"hf_overrides_fn": hf_overrides} if callable(hf_overrides) else {"hf_overrides_kw": hf_overrides}
    config = get_config(model, trust_remote_code=trust_remote_code, revision=revision, **overrides)
    return config.get_text_config().num_hidden_layers


def _captures(worker_cls: str) -> bool:
    """Whether a worker class, by its qualified name, is CaptureWorker or derived from it."""
    if worker_cls == WORKER_CLS or worker_cls.startswith("vllm."):
        return worker_cls == WORKER_CLS
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return issubclass(resolve_obj_by_qualname(worker_cls), resolve_obj_by_qualname(WORKER_CLS))


@dataclass(frozen=True)
class _Sequence:
    """One generated sequence on its way to becoming a :class:`Generation`.

    Attributes:
        prompt: number of its prompt in the call.
        completion: vLLM's ``CompletionOutput``.
        output: the ``RequestOutput`` that it is part of.
        args, plan: the capture arguments that its request carried and the plan in them, or None.
    """

    prompt: int
    completion: object
    output: object
    args: dict | None
    plan: CapturePlan | None

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(self.output.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.completion.token_ids)

    @property
    def name(self) -> str:
        return f"prompt {self.prompt}" + (f", sample {self.completion.index}" if self.args["n"] > 1 else "")


def _capture_args(sampling_params) -> tuple[dict | None, CapturePlan | None]:
    """The capture arguments of a request and the plan in them; an error where the worker could not read them either."""
    args = (sampling_params.extra_args or {}).get(CONFIG_KEY)
    return args, None if args is None else plan_of_request(args)


def _copied(sampling_params):
    """A ``vllm.SamplingParams`` of a request's own, which vLLM need not copy again."""
    if sampling_params.structured_outputs is not None:
        # vLLM writes into it.
        return sampling_params.clone()
    params = copy.copy(sampling_params)
    for name in params.__struct_fields__:
        if isinstance(value := getattr(params, name), list | set | dict):
            setattr(params, name, value.copy())
    params.skip_clone = True
    return params


def _one_each(value, count: int, name: str) -> list:
    """A list of ``count`` values, from one value or from such a list."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts; give one for all, or one a prompt")
    return list(value)


def _names(captured: list[_Sequence]) -> str:
    return f"prompts {ranges(sorted({sequence.prompt for sequence in captured}))}"


def _require_complete(replies: list[dict], captured: list[_Sequence]) -> None:
    """Raise if a worker lacks states of a sequence, or does not trust those it has."""
    if errors := [reply["error"] for reply in replies if "error" in reply]:
        raise RuntimeError("; ".join(errors))
    failures = [reason for reply in replies for reason in reply["failures"]]
    if failures:
        raise IncompleteCaptureError(f"the states of {_names(captured)} cannot be trusted: {'; '.join(failures[:5])}")
    missing = [(captured[number], reason) for reply in replies for number, reason in reply["missing"]]
    if missing:
        raise IncompleteCaptureError(
            f"{len({id(sequence) for sequence, _ in missing})} of {len(captured)} captured sequences are incomplete; "
            f"nothing is filled in for them. "
            + "; ".join(f"{sequence.name}: {reason}" for sequence, reason in missing[:5])
        )


def _by_sequence(groups: list[Group], captured: list[_Sequence]) -> list[torch.Tensor]:
    """Each sequence's states, ``(layers, tokens, hidden_size)``, from the groups of every pipeline stage."""
    parts: list[dict[int, tuple[Group, torch.Tensor]]] = [{} for _ in captured]
    for group in groups:
        bounds = zip(group.row_start[:-1], group.row_start[1:], strict=True)
        for number, (first, end) in zip(group.sequences, bounds, strict=True):
            parts[number][group.layers[0]] = (group, group.values[:, first:end])
    values = []
    for sequence, part in zip(captured, parts, strict=True):
        ordered = [part[first] for first in sorted(part)]
        arrived = tuple(layer for group, _ in ordered for layer in group.layers)
        if arrived != sequence.plan.layers:
            raise IncompleteCaptureError(
                f"{sequence.name}: layers {list(arrived)} arrived, {list(sequence.plan.layers)} were asked for"
            )
        tensors = [tensor for _, tensor in ordered]
        values.append(tensors[0] if len(tensors) == 1 else torch.cat(tensors))
    return values


def _generation(original, sequence: _Sequence, states: HiddenStates | None) -> Generation:
    completion = sequence.completion
    token_ids = list(completion.token_ids)
    logprobs = completion.logprobs
    if logprobs is None:
        empty = np.empty((len(token_ids), 0))
        likelihoods, ids, values = (
            np.full(len(token_ids), np.nan, dtype=np.float32),
            empty.astype(np.int64),
            empty.astype(np.float32),
        )
    else:
        # vLLM lists, at each step, the sampled token and then the k most probable ones.
        ids = np.array(logprobs.token_ids, dtype=np.int64).reshape(len(token_ids), -1)
        values = np.array(logprobs.logprobs, dtype=np.float32).reshape(len(token_ids), -1)
        if not np.array_equal(ids[:, 0], token_ids):
            raise RuntimeError(
                "vLLM's log-probabilities do not begin with the sampled tokens; this version is not supported"
            )
        likelihoods, ids, values = values[:, 0], ids[:, 1:], values[:, 1:]
    return Generation(
        original,
        completion.text,
        sequence.prompt_token_ids,
        token_ids,
        likelihoods,
        ids,
        values,
        completion.finish_reason,
        sequence.output.num_cached_tokens,
        states,
    )
