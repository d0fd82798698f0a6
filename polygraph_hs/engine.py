"""The driver's side: generate with vLLM and collect the hidden states of that same pass."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from polygraph_hs.capture.delivery import Group, open_parcel, read_groups
from polygraph_hs.errors import IncompleteCaptureError, LayerNotTappedError, PromptTooLongError
from polygraph_hs.spec import CONFIG_KEY, CapturePlan, request_args, resolve_layers, token_span
from polygraph_hs.states import POOLED_POSITION, HiddenStates

WORKER_CLS = "polygraph_hs.capture.worker.CaptureWorker"


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
    hidden_states: HiddenStates | None

    def __repr__(self) -> str:
        return (
            f"Generation(text={self.text!r}, {len(self.prompt_token_ids)} + {len(self.token_ids)} tokens, "
            f"finish_reason={self.finish_reason!r}, hidden_states={self.hidden_states!r})"
        )


def require_vllm():
    """Import vLLM or say how to install it."""
    try:
        import vllm
    except ImportError as error:
        raise ImportError(
            f"polygraph-hs generates with vLLM, which cannot be imported here ({error}). Install it with "
            f"pip install 'polygraph-hs[gpu]' for CUDA or 'polygraph-hs[cpu]' for the CPU"
        ) from error
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
        replies = self.llm.collective_rpc("capture_add_layers", args=(list(layers),))
        return tuple(sorted({layer for reply in replies for layer in reply}))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params,
        plan: CapturePlan | None,
        *,
        originals: Sequence | None = None,
        progress: bool = False,
    ) -> list[list[Generation]]:
        """Generate once and return texts, log-probabilities and states of that pass.

        Args:
            prompts: token ids, passed to vLLM as they are.
            sampling_params: a ``vllm.SamplingParams``; it is not changed.
            plan: what to capture; None captures nothing.
            originals: what the caller calls the prompts, for ``Generation.prompt``.
            progress: show vLLM's progress bar.

        Returns:
            For each prompt, the ``sampling_params.n`` sequences.

        Raises:
            ValueError: no prompts, an empty prompt, a token id outside the vocabulary.
            PromptTooLongError: some prompts do not fit the window; carries the others' results.
            LayerNotTappedError, IncompleteCaptureError: states cannot be, or were not, captured.
        """
        prompts = [list(prompt) for prompt in prompts]
        originals = prompts if originals is None else originals
        if not prompts:
            raise ValueError("prompts=[] is empty; give at least one prompt")
        empty = [number for number, prompt in enumerate(prompts) if not prompt]
        if empty:
            raise ValueError(f"the prompts at {empty} are empty (no tokens); remove them or give them text")
        outside = {
            number: bad
            for number, prompt in enumerate(prompts)
            if (bad := [token for token in prompt if not 0 <= token < self.vocabulary_size])
        }
        if outside:
            raise ValueError(
                f"some prompts have token ids outside the vocabulary, whose ids go from 0 to "
                f"{self.vocabulary_size - 1} (prompt: ids {dict(list(outside.items())[:5])}); tokenize them with this "
                f"model's tokenizer"
            )
        if plan is not None:
            plan = CapturePlan(self.require_layers(plan.layers), plan.tokens, plan.pooling)
        too_long = {i: len(prompt) for i, prompt in enumerate(prompts) if len(prompt) >= self.max_model_len}
        kept = [number for number in range(len(prompts)) if number not in too_long]
        answers = self._run([prompts[i] for i in kept], [originals[i] for i in kept], sampling_params, plan, progress)
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

    def _run(self, prompts, originals, sampling_params, plan, progress) -> list[list[Generation]]:
        if not prompts:
            return []
        n = sampling_params.n
        keys = [f"{self._prefix}-{next(self._counter)}" for _ in prompts]
        params = [self._with_plan(sampling_params, key, plan) for key in keys]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        try:
            outputs = self.llm.generate(inputs, params, use_tqdm=progress)
            samples = [sorted(output.outputs, key=lambda sample: sample.index) for output in outputs]
            states = self._collect(keys, prompts, samples, plan) if plan is not None else itertools.repeat(None)
        except BaseException:
            if plan is not None:
                self.llm.collective_rpc("capture_discard", args=([[key, n] for key in keys],))
            raise
        states = iter(states)
        return [
            [_generation(original, prompt, completion, next(states)) for completion in completions]
            for original, prompt, completions in zip(originals, prompts, samples, strict=True)
        ]

    def _with_plan(self, sampling_params, key: str, plan: CapturePlan | None):
        params = sampling_params.clone()
        params.flat_logprobs = True
        if plan is not None:
            params.extra_args = {**(params.extra_args or {}), CONFIG_KEY: request_args(key, params.n, plan)}
            # A cached prefix is not computed again, so its states would never exist.
            params.skip_reading_prefix_cache = plan.needs_whole_prompt()
        return params

    def _collect(self, keys, prompts, samples, plan: CapturePlan) -> list[HiddenStates]:
        completions = [
            (key, len(prompt), completion.index, len(completion.token_ids))
            for key, prompt, completions in zip(keys, prompts, samples, strict=True)
            for completion in completions
        ]
        sequences = [[key, index, generated] for key, _, index, generated in completions]
        replies = self.llm.collective_rpc("capture_collect", args=(sequences,))
        replies = [(rank, reply) for rank, reply in enumerate(replies) if reply is not None]
        parcels = [reply for _, reply in replies if not reply["missing"]]
        try:
            missing = [text for _, reply in replies for text in reply["missing"]]
            if missing:
                raise IncompleteCaptureError(
                    f"{len(missing)} captured sequences are incomplete; nothing is filled in for them. "
                    + "; ".join(missing[:5])
                )
            groups = [group for rank, reply in replies for group in self._open(rank, reply)]
        finally:
            self.llm.collective_rpc("capture_release", args=([parcel["token"] for parcel in parcels],))
        # One group from each pipeline stage that computes some of the layers.
        values = _by_sequence(groups, len(completions), plan.layers)
        return [
            self._hidden_states(tensor, plan, prompt_length, generated)
            for tensor, (_, prompt_length, _, generated) in zip(values, completions, strict=True)
        ]

    def _open(self, rank: int, description: dict) -> list[Group]:
        groups = open_parcel(description)
        if groups is None:
            contents = self.llm.collective_rpc("capture_fetch", args=(description["token"],))[rank]
            groups = read_groups(bytearray(contents), description)
        return groups

    def _hidden_states(self, values, plan: CapturePlan, prompt_length: int, num_generated: int) -> HiddenStates:
        start, stop = token_span(plan.tokens, prompt_length, num_generated)
        positions = np.arange(start, stop)
        if plan.pooling != "none":
            positions = np.array([POOLED_POSITION if plan.pooling == "mean" else stop - 1])
        if values.shape[1] != len(positions):
            raise IncompleteCaptureError(
                f"a sequence of {prompt_length} + {num_generated} tokens came with {values.shape[1]} states where "
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
        return max(self.llm.collective_rpc("capture_num_requests"))


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


def _by_sequence(groups: list[Group], num_sequences: int, layers: tuple[int, ...]) -> list[torch.Tensor]:
    parts: list[dict[int, tuple[Group, torch.Tensor]]] = [{} for _ in range(num_sequences)]
    for group in groups:
        bounds = zip(group.row_start[:-1], group.row_start[1:], strict=True)
        for sequence, (first, end) in zip(group.sequences, bounds, strict=True):
            parts[sequence][group.layers[0]] = (group, group.values[:, first:end])
    values = []
    for number, part in enumerate(parts):
        ordered = [part[first] for first in sorted(part)]
        arrived = tuple(layer for group, _ in ordered for layer in group.layers)
        if arrived != layers:
            raise IncompleteCaptureError(
                f"sequence {number}: layers {list(arrived)} arrived, {list(layers)} were asked for"
            )
        tensors = [tensor for _, tensor in ordered]
        values.append(tensors[0] if len(tensors) == 1 else torch.cat(tensors))
    return values


def _generation(original, prompt: list[int], completion, states: HiddenStates | None) -> Generation:
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
        prompt,
        token_ids,
        likelihoods,
        ids,
        values,
        completion.finish_reason,
        states,
    )
