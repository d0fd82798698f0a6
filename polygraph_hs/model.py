"""HiddenStatesModel: the lm-polygraph model that generates with vLLM and captures hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import torch
from lm_polygraph.utils.generation_parameters import GenerationParameters
from lm_polygraph.utils.model import Model
from tqdm.auto import tqdm
from transformers.generation import GenerateDecoderOnlyOutput

from polygraph_hs import registration
from polygraph_hs.engine import CaptureEngine, Generation, require_vllm
from polygraph_hs.errors import PromptTooLongError
from polygraph_hs.spec import CapturePlan

DEFAULT_PLAN = CapturePlan(layers=(-1,), tokens="generated")
# lm-polygraph's calculators recognise a vLLM model by this type.
MODEL_TYPE = "vLLMCausalLM"

Prompt = str | list[dict] | list[int]


class HiddenStatesModel(Model):
    """A language model on vLLM whose hidden states come with its generations.

    Use :meth:`from_pretrained` or :meth:`from_llm`. lm-polygraph's ``estimate_uncertainty()`` and ``UEManager`` take
    it as a model; :meth:`capture` gives texts, log-probabilities and states directly.

    Attributes:
        engine: the :class:`~polygraph_hs.engine.CaptureEngine`.
        plan: the :class:`~polygraph_hs.spec.CapturePlan` of the next generation; :meth:`install` widens it.
        generation_parameters: lm-polygraph's.
        tokenizer: the model's own.
        instruct: whether prompts go through the chat template.
        system_prompt: text of a system message put before each text prompt, or None.
        num_logprobs: how many of the most probable tokens are returned at each step.
        verbose: whether to show progress bars.
        lora_request: a ``vllm.lora.request.LoRARequest`` for every generation from now on, or None; the engine must
            have been built with ``enable_lora=True``.
    """

    def __init__(
        self,
        engine: CaptureEngine,
        plan: CapturePlan,
        *,
        model_path: str,
        generation_parameters: GenerationParameters,
        instruct: bool,
        system_prompt: str | None,
        num_logprobs: int,
        verbose: bool,
    ):
        super().__init__(model_path, MODEL_TYPE)
        if system_prompt is not None and not instruct:
            raise ValueError(f"system_prompt={system_prompt!r} needs a chat; pass instruct=True as well")
        _check_max_new_tokens(generation_parameters.max_new_tokens)
        if not num_logprobs >= 1 or (engine.max_logprobs != -1 and num_logprobs > engine.max_logprobs):
            raise ValueError(
                f"num_logprobs={num_logprobs} must be from 1 to the engine's max_logprobs, {engine.max_logprobs}"
            )
        self.engine = engine
        self.plan = plan.resolved(engine.num_hidden_layers)
        self.generation_parameters = generation_parameters
        self.tokenizer = engine.llm.get_tokenizer()
        self.instruct = instruct
        self.system_prompt = system_prompt
        self.num_logprobs = num_logprobs
        self.verbose = verbose
        self.lora_request = None
        if instruct and not self.tokenizer.chat_template:
            raise ValueError(
                f"instruct=True, but the tokenizer of {model_path} has no chat template; pass instruct=False"
            )
        engine.require_layers(self.plan.layers)

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        *,
        layers: Sequence[int] | None = None,
        tokens: str | None = None,
        pooling: str = "none",
        estimators: Iterable = (),
        instruct: bool = False,
        system_prompt: str | None = None,
        max_new_tokens: int | None = None,
        generation_parameters: GenerationParameters | None = None,
        num_logprobs: int = 20,
        verbose: bool = True,
        **llm_kwargs,
    ) -> HiddenStatesModel:
        """Start a vLLM engine that captures hidden states.

        Args:
            model: path or hub name.
            layers: layers to capture, in Hugging Face's numbering: 0 the embeddings, i the output of block i, -1 the
                last state after the final norm. By default what ``estimators`` need, or the last.
            tokens: ``last_prompt``, ``generated``, ``prompt`` or ``all``. By default what ``estimators`` need, or
                ``generated``.
            pooling: ``none``, ``mean`` or ``last``.
            estimators: estimators to capture for, as with :meth:`install`.
            instruct: put each prompt through the model's chat template.
            system_prompt: with ``instruct``, the text of a system message; None adds none.
            max_new_tokens: most tokens to generate when the caller of a generation does not say. By default 100.
            generation_parameters: lm-polygraph's (temperature, penalties, stop strings, ...).
            num_logprobs: most probable tokens to return at each step. They make up ``greedy_log_probs``.
            verbose: show progress bars.
            llm_kwargs: everything else goes to ``vllm.LLM`` (dtype, tensor_parallel_size, enforce_eager, ...).

        Raises:
            ImportError: vLLM is not installed.
            ValueError: a layer, token selection or pooling that does not exist, ``max_new_tokens`` below 1: before
                anything is loaded; options that do not fit the model's tokenizer or each other: after.
        """
        require_vllm()
        estimators = list(estimators)
        needed = [plan for plan in map(_plan_of, estimators) if plan is not None]
        plan = None
        if layers is not None or tokens is not None or not needed:
            plan = CapturePlan(
                DEFAULT_PLAN.layers if layers is None else layers, tokens or DEFAULT_PLAN.tokens, pooling
            )
        parameters = _parameters(generation_parameters, max_new_tokens)
        tapped = {layer for wanted in (plan, *needed) if wanted is not None for layer in wanted.layers}
        llm_kwargs.setdefault("max_logprobs", max(20, num_logprobs))
        engine = CaptureEngine.start(model, sorted(tapped), **llm_kwargs)
        instance = cls(
            engine,
            plan or needed[0],
            model_path=str(model),
            generation_parameters=parameters,
            instruct=instruct,
            system_prompt=system_prompt,
            num_logprobs=num_logprobs,
            verbose=verbose,
        )
        for estimator in estimators:
            instance.install(estimator)
        return instance

    @classmethod
    def from_llm(
        cls,
        llm,
        *,
        layers: Sequence[int] = DEFAULT_PLAN.layers,
        tokens: str = DEFAULT_PLAN.tokens,
        pooling: str = "none",
        instruct: bool = False,
        system_prompt: str | None = None,
        max_new_tokens: int | None = None,
        generation_parameters: GenerationParameters | None = None,
        num_logprobs: int = 20,
        verbose: bool = True,
    ) -> HiddenStatesModel:
        """Capture with an existing ``vllm.LLM``.

        Raises:
            LayerNotTappedError: the LLM was built without capture and cannot be tapped any more, or has no tap on
                one of the layers; the message says how to build it.
        """
        plan = CapturePlan(layers, tokens, pooling)
        return cls(
            CaptureEngine(llm),
            plan,
            model_path=llm.llm_engine.vllm_config.model_config.model,
            generation_parameters=_parameters(generation_parameters, max_new_tokens),
            instruct=instruct,
            system_prompt=system_prompt,
            num_logprobs=num_logprobs,
            verbose=verbose,
        )

    def install(self, estimator) -> None:
        """Add an estimator's layers and tokens to what is captured; installing it again changes nothing.

        Raises:
            ValueError: a layer does not exist, or the estimator was fitted on another model's states.
            LayerNotTappedError: the engine is compiled and has no tap on a layer.
        """
        plan = _plan_of(estimator)
        if plan is not None:
            estimator.check_model(self.engine.hidden_size, self.engine.num_hidden_layers)
            self.install_plan(plan)

    def install_plan(self, plan: CapturePlan) -> None:
        """Widen the capture plan so that it also serves ``plan``."""
        wanted = plan.resolved(self.engine.num_hidden_layers)
        self.engine.require_layers(wanted.layers)
        self.plan = self.plan.union(wanted)

    def capture(self, prompts: Sequence[Prompt], max_new_tokens: int | None = None) -> list[Generation]:
        """Answer prompts, with the hidden states of the same pass.

        Args:
            prompts: texts, chats (lists of messages; with ``instruct``) or lists of token ids.
            max_new_tokens: most tokens to generate; by default ``generation_parameters.max_new_tokens``.

        Returns:
            One :class:`~polygraph_hs.engine.Generation` a prompt, in order.

        Raises:
            ValueError: no prompts, an empty prompt, ``max_new_tokens`` below 1.
            PromptTooLongError: some prompts do not fit the model's window; ``.outputs`` has the others' results.
            IncompleteCaptureError: states are missing.
        """
        try:
            return [answers[0] for answers in self._generate(prompts, self.sampling_params(max_new_tokens), self.plan)]
        except PromptTooLongError as error:
            error.outputs = [answers and answers[0] for answers in error.outputs]
            raise

    def stream(
        self, prompts: Iterable[Prompt], max_new_tokens: int | None = None, *, max_in_flight: int | None = None
    ) -> Iterator[tuple[int, Generation]]:
        """:meth:`capture` for any number of prompts, in bounded memory; see :meth:`CaptureEngine.stream`.

        Args:
            prompts: as in :meth:`capture`, any iterable; read as the run goes.
            max_new_tokens: most tokens to generate; by default ``generation_parameters.max_new_tokens``.
            max_in_flight: most prompts that vLLM has and whose results have not been handed over.

        Yields:
            The number of a prompt, from 0, and its :class:`~polygraph_hs.engine.Generation`, in the order in which
            they finish.

        Raises:
            ValueError, PromptTooLongError: some prompts cannot be answered: after all others have been.
            IncompleteCaptureError: states are missing.
        """
        total = len(prompts) if hasattr(prompts, "__len__") else None
        answers = self.engine.stream(
            prompts,
            self.sampling_params(max_new_tokens),
            self.plan,
            max_in_flight=max_in_flight,
            lora_request=self.lora_request,
            tokenize=self.tokenize_prompt,
        )
        return self._singles(answers, total)

    def _singles(
        self, answers: Iterator[tuple[int, list[Generation]]], total: int | None
    ) -> Iterator[tuple[int, Generation]]:
        progress = tqdm(total=total, desc="Prompts answered", disable=not self.verbose)
        with closing(answers), progress:
            for number, (answer,) in answers:
                progress.update()
                yield number, answer

    def _generate(self, prompts: Sequence[Prompt], sampling_params, plan: CapturePlan | None) -> list[list[Generation]]:
        if isinstance(prompts, str):
            raise ValueError(f"prompts={prompts!r} is one text; give a list of prompts")
        prompts = list(prompts)
        token_ids = [self.tokenize_prompt(prompt) for prompt in prompts]
        return self.engine.generate(
            token_ids,
            sampling_params,
            plan,
            originals=prompts,
            progress=self.verbose,
            lora_request=self.lora_request,
        )

    def tokenize_prompt(self, prompt: Prompt) -> list[int]:
        """The token ids that the model sees for one prompt: with the chat template if ``instruct``."""
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("prompt '' is empty; remove it or give it text")
            if not self.instruct:
                return self.tokenizer(prompt)["input_ids"]
            system = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
            prompt = [*system, {"role": "user", "content": prompt}]
        elif not isinstance(prompt, list) or not prompt:
            raise ValueError(f"prompt {prompt!r} is not a text, a non-empty chat or a non-empty list of token ids")
        if all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
            return prompt
        if not self.instruct:
            raise ValueError(f"prompt {prompt!r} is a chat; pass instruct=True to use the model's chat template")
        text = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        # The template has written the special tokens already.
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def sampling_params(self, max_new_tokens: int | None = None, *, n: int = 1, min_new_tokens: int = 0, **overrides):
        """``vllm.SamplingParams`` for lm-polygraph's generation parameters.

        Args:
            max_new_tokens: by default ``generation_parameters.max_new_tokens``.
            n: sequences a prompt.
            min_new_tokens: least tokens to generate.
            overrides: fields of lm-polygraph's GenerationParameters.
        """
        from vllm import SamplingParams

        parameters = replace(self.generation_parameters, **overrides)
        if max_new_tokens is None:
            max_new_tokens = parameters.max_new_tokens
        _check_max_new_tokens(max_new_tokens)
        if parameters.num_beams != 1:
            raise ValueError(f"num_beams={parameters.num_beams}: vLLM has no beam search here; use num_beams=1")
        sampling = {"temperature": 0.0}
        if parameters.do_sample:
            sampling = {
                "temperature": parameters.temperature,
                "top_p": parameters.top_p,
                "top_k": parameters.top_k,
            }
        return SamplingParams(
            n=n,
            max_tokens=max_new_tokens,
            min_tokens=min(min_new_tokens, max_new_tokens),
            logprobs=self.num_logprobs,
            presence_penalty=parameters.presence_penalty,
            repetition_penalty=parameters.repetition_penalty,
            stop=list(parameters.stop_strings or []),
            allowed_token_ids=None if parameters.allow_newlines else self._tokens_without_newline(),
            **sampling,
        )

    def _tokens_without_newline(self) -> list[int]:
        if not hasattr(self, "_no_newline"):
            ids = range(len(self.tokenizer))
            self._no_newline = [i for i in ids if "\n" not in self.tokenizer.decode([i])]
        return self._no_newline

    def tokenize(self, texts: Sequence[Prompt]) -> dict[str, torch.Tensor]:
        """A left-padded batch for lm-polygraph's own calculators.

        Returns:
            ``input_ids`` and ``attention_mask``, int64 ``(n, longest)``.
        """
        token_ids = [self.tokenize_prompt(text) for text in texts]
        longest = max(len(ids) for ids in token_ids)
        padding = [longest - len(ids) for ids in token_ids]
        pad_id = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        return {
            "input_ids": torch.tensor([[pad_id] * pad + ids for pad, ids in zip(padding, token_ids, strict=True)]),
            "attention_mask": torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding]),
        }

    def generate(self, input_ids, attention_mask=None, **kwargs) -> GenerateDecoderOnlyOutput:
        """Generate from a batch of :meth:`tokenize`, as lm-polygraph's own calculators call it.

        Token ids go to vLLM as they are. The scores are dense vocabulary rows in which only the ``num_logprobs`` most
        probable tokens and the generated one are finite; this project's own calculators never build them.

        Returns:
            ``sequences``: a list of int64 tensors, and ``scores`` = ``logits``: a list of float32 tensors
            ``(longest, vocabulary)`` of log-probabilities, one a generated sequence, padded to the longest.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        prompts = [ids[keep.bool()].tolist() for ids, keep in zip(input_ids, mask, strict=True)]
        for unavailable in ("output_attentions", "output_hidden_states"):
            if kwargs.pop(unavailable, False):
                raise ValueError(
                    f"{unavailable}=True is not available from generate() on vLLM; hidden states come with capture() "
                    f"and the statistics of polygraph_hs.stat_calculators"
                )
        if kwargs.pop("suppress_tokens", None):
            kwargs["allow_newlines"] = False
        for ignored in ("output_scores", "output_logits", "return_dict_in_generate"):
            kwargs.pop(ignored, None)
        answers = self._generate_flat(prompts, kwargs)
        longest = max(len(answer.token_ids) for answer in answers)
        vocabulary = max(len(self.tokenizer), self.engine.vocabulary_size)
        sequences, scores = [], []
        for answer in answers:
            length = len(answer.token_ids)
            sequence = torch.full((longest,), self.tokenizer.eos_token_id)
            sequence[:length] = torch.tensor(answer.token_ids)
            score = torch.full((longest, vocabulary), -torch.inf)
            score[:length].scatter_(
                1, torch.from_numpy(answer.top_token_ids), torch.from_numpy(answer.top_log_likelihoods)
            )
            score[range(length), answer.token_ids] = torch.from_numpy(answer.log_likelihoods)
            sequences.append(sequence)
            scores.append(score)
        return GenerateDecoderOnlyOutput(sequences=sequences, logits=scores, scores=scores)

    def __call__(self, **kwargs) -> GenerateDecoderOnlyOutput:
        return self.generate(**kwargs)

    def generate_texts(self, input_texts: Sequence[Prompt], **kwargs) -> list[str]:
        """Generated texts only, ``num_return_sequences`` a prompt, flat and in order; nothing is captured."""
        kwargs.setdefault("num_return_sequences", kwargs.pop("n", 1))
        return [answer.text for answer in self._generate_flat(input_texts, kwargs)]

    def _generate_flat(self, prompts: Sequence[Prompt], arguments: dict) -> list[Generation]:
        """Every sequence of every prompt, for the arguments that lm-polygraph's calculators pass; no states."""
        arguments = dict(arguments)
        # On a decoder-only model Hugging Face's min_length counts the prompt too, so it asks for nothing here.
        arguments.pop("min_length", None)
        params = self.sampling_params(
            arguments.pop("max_new_tokens", None), n=arguments.pop("num_return_sequences", 1), **arguments
        )
        return [answer for group in self._generate(prompts, params, None) for answer in group]

    def device(self) -> str:
        """Where :meth:`tokenize` puts its tensors: the engine has its own process and takes them from the CPU."""
        return "cpu"


def _plan_of(estimator) -> CapturePlan | None:
    """What an estimator needs captured; None for lm-polygraph's own, which read no hidden states."""
    plan = getattr(estimator, "plan", None)
    if plan is None and "hidden_states" in estimator.stats_dependencies:
        raise ValueError(
            f"{estimator} reads hidden states and has no plan that says which; derive it from HiddenStatesEstimator, "
            f"or name layers= and tokens= for the model"
        )
    return plan


def _parameters(given: GenerationParameters | None, max_new_tokens: int | None) -> GenerationParameters:
    parameters = given or GenerationParameters()
    if max_new_tokens is None:
        return parameters
    _check_max_new_tokens(max_new_tokens)
    return replace(parameters, max_new_tokens=max_new_tokens)


def _check_max_new_tokens(max_new_tokens: int) -> None:
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r} must be an integer of at least 1")


registration.register(HiddenStatesModel)
