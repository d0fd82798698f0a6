"""The generation pass: greedy answers, their log-probabilities and their hidden states."""

from __future__ import annotations

from lm_polygraph.stat_calculators.stat_calculator import StatCalculator

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
        ``greedy_top_tokens``: int64 arrays ``(tokens, k)``, which tokens these are.
        ``hidden_states``: :class:`~polygraph_hs.states.HiddenStates`, captured by the model's plan.
    """

    @staticmethod
    def meta_info() -> tuple[list[str], list[str]]:
        return [
            "input_texts",
            "input_tokens",
            "greedy_texts",
            "greedy_tokens",
            "greedy_log_likelihoods",
            "greedy_log_probs",
            "greedy_top_tokens",
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
            "greedy_top_tokens": [generation.top_token_ids for generation in generations],
            "hidden_states": [generation.hidden_states for generation in generations],
            "tokenizer": model.tokenizer,
        }


def load_stat_calculator(config, environment) -> GenerationCalculator:
    """lm-polygraph's plug-in entry."""
    return GenerationCalculator()
