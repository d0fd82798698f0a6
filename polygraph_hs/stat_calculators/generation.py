"""The generation pass: greedy answers, their log-probabilities and their hidden states."""

from __future__ import annotations

from lm_polygraph.stat_calculators.stat_calculator import StatCalculator

from polygraph_hs.engine import Generation
from polygraph_hs.model import HiddenStatesModel


class GenerationCalculator(StatCalculator):
    """Answers a batch of texts once and fills every statistic that comes from that pass.

    Statistics, each a list of n entries:
        ``input_texts``, ``greedy_texts``: strings.
        ``input_tokens``, ``greedy_tokens``: lists of ints, exactly what vLLM saw and made; a final end-of-sequence
            token is included.
        ``greedy_log_likelihoods``: lists of floats, the log-probability of each generated token.
        ``greedy_log_probs``: float32 arrays ``(tokens, k)``, the log-probabilities of the ``model.num_logprobs`` most
            probable tokens at each step. They are not the whole distribution: entropies made from them are
            truncated to these tokens, as with any vLLM model in lm-polygraph.
        ``greedy_tokens_alternatives``: for each token, up to ``n_alternatives`` pairs (token id, log-probability),
            the generated token first.
        ``hidden_states``: :class:`~polygraph_hs.states.HiddenStates`, captured by the model's plan.
    """

    def __init__(self, n_alternatives: int = 10):
        super().__init__()
        self.n_alternatives = n_alternatives

    @staticmethod
    def meta_info() -> tuple[list[str], list[str]]:
        return [
            "input_texts",
            "input_tokens",
            "greedy_texts",
            "greedy_tokens",
            "greedy_log_likelihoods",
            "greedy_log_probs",
            "greedy_tokens_alternatives",
            "hidden_states",
            "tokenizer",
        ], []

    def __call__(
        self, dependencies: dict, texts: list, model: HiddenStatesModel, max_new_tokens: int = 100, **kwargs
    ) -> dict:
        if not isinstance(model, HiddenStatesModel):
            raise TypeError(
                f"{type(self).__name__} needs a HiddenStatesModel, got a {type(model).__name__}; build the model with "
                f"HiddenStatesModel.from_pretrained or leave this calculator out"
            )
        generations = model.capture(texts, max_new_tokens)
        return {
            "input_texts": list(texts),
            "input_tokens": [generation.prompt_token_ids for generation in generations],
            "greedy_texts": [generation.text for generation in generations],
            "greedy_tokens": [generation.token_ids for generation in generations],
            "greedy_log_likelihoods": [generation.log_likelihoods.tolist() for generation in generations],
            "greedy_log_probs": [generation.top_log_likelihoods for generation in generations],
            "greedy_tokens_alternatives": [self._alternatives(generation) for generation in generations],
            "hidden_states": [generation.hidden_states for generation in generations],
            "tokenizer": model.tokenizer,
        }

    def _alternatives(self, generation: Generation) -> list[list[tuple[int, float]]]:
        ids = generation.top_token_ids.tolist()
        values = generation.top_log_likelihoods.tolist()
        likelihoods = generation.log_likelihoods.tolist()
        alternatives = []
        for token, likelihood, top_ids, top_values in zip(generation.token_ids, likelihoods, ids, values, strict=True):
            others = [pair for pair in zip(top_ids, top_values, strict=True) if pair[0] != token]
            alternatives.append([(token, likelihood), *others[: self.n_alternatives - 1]])
        return alternatives


def load_stat_calculator(config, environment) -> GenerationCalculator:
    """lm-polygraph's plug-in entry; ``config`` may set ``n_alternatives``."""
    options = {name: config[name] for name in ("n_alternatives",) if name in (config or {})}
    return GenerationCalculator(**options)
