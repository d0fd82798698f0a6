"""The demo: real questions, real answers, and which estimator knows that an answer is wrong."""

from __future__ import annotations

import json
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import vllm
from lm_polygraph.estimators import MaximumSequenceProbability, MeanTokenEntropy, Perplexity
from lm_polygraph.estimators.estimator import Estimator
from lm_polygraph.generation_metrics.generation_metric import GenerationMetric
from lm_polygraph.ue_metrics.pred_rej_area import PredictionRejectionArea
from lm_polygraph.utils.builder_enviroment_stat_calculator import BuilderEnvironmentStatCalculator
from lm_polygraph.utils.dataset import Dataset
from lm_polygraph.utils.manager import UEManager
from sklearn.metrics import roc_auc_score, roc_curve
from vllm.platforms import current_platform

from polygraph_hs.datasets import is_wrong, load_world_facts
from polygraph_hs.datasets.world_facts import SPLITS
from polygraph_hs.engine import read_num_hidden_layers
from polygraph_hs.estimators import LinearProbe, MahalanobisDistance
from polygraph_hs.model import HiddenStatesModel
from polygraph_hs.smollm2 import smollm2_path
from polygraph_hs.stat_calculators import all_stat_calculators

CPU_KV_CACHE_BYTES = 2**30
# The rejection range that lm-polygraph's own benchmark reports (Vashurin et al. 2025).
MAX_REJECTION = 0.5


class WorldFactsAccuracy(GenerationMetric):
    """1 where a generated text holds an accepted answer, else 0."""

    def __init__(self, facts: pd.DataFrame):
        super().__init__(["greedy_texts"], "sequence")
        self.facts = facts.set_index("question")

    def __str__(self) -> str:
        return "WorldFactsAccuracy"

    def __call__(self, stats: dict, target_texts: list[str]) -> np.ndarray:
        facts = self.facts.loc[stats["input_texts"]]
        return 1 - label_wrong(stats["greedy_texts"], facts)


class Timed(Estimator):
    """An estimator that counts the seconds spent in it."""

    def __init__(self, estimator: Estimator):
        super().__init__(estimator.stats_dependencies, estimator.level)
        self.estimator = estimator
        self.seconds = 0.0

    def __str__(self) -> str:
        return str(self.estimator)

    def __call__(self, stats: dict) -> np.ndarray:
        start = time.perf_counter()
        scores = self.estimator(stats)
        self.seconds += time.perf_counter() - start
        return scores


def label_wrong(texts: list[str], facts: pd.DataFrame) -> np.ndarray:
    """int64 ``(n,)``, 1 where the text is a wrong answer to the fact."""
    rows = zip(texts, facts["answers"], facts["topic"], strict=True)
    return np.array([is_wrong(text, answers, topic) for text, answers, topic in rows], dtype=np.int64)


def _num_requests_finished(model: HiddenStatesModel) -> int:
    """vLLM's own count of finished requests, over all reasons to finish."""
    counters = [metric for metric in model.engine.llm.get_metrics() if metric.name == "vllm:request_success"]
    return sum(int(counter.value) for counter in counters)


def run_demo(
    *,
    model: str | None = None,
    layer: int | None = None,
    max_new_tokens: int = 24,
    dtype: str = "bfloat16",
    limit: int | None = None,
    compile_on_cpu: bool = False,
    output: Path = Path("out/demo"),
    verbose: bool = True,
) -> dict:
    """Answer, fit, score, print and write; see ``polygraph-hs demo --help``. Returns what report.json holds."""
    if limit is not None and limit < 2:
        raise ValueError(f"limit={limit} must be at least 2, so that there is something to fit on")
    facts = {split: load_world_facts(split) for split in SPLITS}
    if limit is not None:
        facts = {split: frame.groupby("topic").head(limit).reset_index(drop=True) for split, frame in facts.items()}
    train, test = facts["train"], facts["test"]
    model = str(smollm2_path()) if model is None else model

    if layer is None:
        layer = round(read_num_hidden_layers(model) * 2 / 3)
    ours = [
        LinearProbe(layer, tokens="last_prompt"),
        LinearProbe(layer, tokens="generated", pooling="mean"),
        MahalanobisDistance(layer, tokens="last_prompt"),
        MahalanobisDistance(layer, tokens="generated", pooling="mean"),
    ]
    on_cpu = current_platform.is_cpu()
    engine_options = {"kv_cache_memory_bytes": CPU_KV_CACHE_BYTES} if on_cpu else {}
    start = time.perf_counter()
    language_model = HiddenStatesModel.from_pretrained(
        model,
        estimators=ours,
        instruct=True,
        max_new_tokens=max_new_tokens,
        verbose=verbose,
        dtype=dtype,
        max_model_len=512,
        enforce_eager=on_cpu and not compile_on_cpu,
        disable_log_stats=False,
        **engine_options,
    )
    started = time.perf_counter()
    print(f"\n{model}: engine ready after {started - start:.0f} s; answering {len(train)} train questions")
    answers = language_model.capture(list(train["question"]))
    train_wrong = label_wrong([answer.text for answer in answers], train)
    states = [answer.hidden_states for answer in answers]
    for estimator in ours:
        estimator.fit(states, train_wrong)
    fitted = time.perf_counter()

    print(f"fitted on {int(train_wrong.sum())} wrong of {len(train)}; answering and scoring {len(test)} test questions")
    estimators = [Timed(e) for e in (*ours, MaximumSequenceProbability(), Perplexity(), MeanTokenEntropy())]
    manager = UEManager(
        Dataset(list(test["question"]), ["|".join(accepted) for accepted in test["answers"]], batch_size=len(test)),
        language_model,
        estimators,
        BuilderEnvironmentStatCalculator(language_model),
        all_stat_calculators(),
        [WorldFactsAccuracy(test)],
        [PredictionRejectionArea(max_rejection=MAX_REJECTION)],
        [],
        ignore_exceptions=False,
        verbose=False,
        max_new_tokens=max_new_tokens,
    )
    metrics = manager()
    scored = time.perf_counter()

    wrong = 1 - np.array(manager.gen_metrics["sequence", "WorldFactsAccuracy"], dtype=int)
    scores = {str(estimator): np.array(manager.estimations["sequence", str(estimator)]) for estimator in estimators}
    if len(set(wrong)) < 2:
        raise ValueError(
            "the test answers are all right or all wrong, so nothing is to be told apart; use more questions"
        )
    table = pd.DataFrame(
        [
            {
                "estimator": str(estimator),
                "AUROC": roc_auc_score(wrong, scores[str(estimator)]),
                "PRR": metrics["sequence", str(estimator), "WorldFactsAccuracy", f"prr_{MAX_REJECTION}_normalized"],
                "seconds": estimator.seconds,
            }
            for estimator in estimators
        ]
    )
    rows = test.assign(
        answers=test["answers"].str.join("|"), answer=manager.stats["greedy_texts"], wrong=wrong, **scores
    )
    report = {
        "model": model,
        "vllm": vllm.__version__,
        "layer": layer,
        "questions": {"train": len(train), "test": len(test)},
        "wrong": {"train": int(train_wrong.sum()), "test": int(wrong.sum())},
        "wrong_by_topic": rows.groupby("topic")["wrong"].mean().round(4).to_dict(),
        "requests_processed_by_vllm": _num_requests_finished(language_model),
        "seconds": {
            "start of the engine": started - start,
            "train: generation, capture and fit": fitted - started,
            "test: generation, capture and scoring": scored - fitted,
        },
        "prr_max_rejection": MAX_REJECTION,
        "estimators": table.to_dict("records"),
    }
    output.mkdir(parents=True, exist_ok=True)
    rows.to_csv(output / "answers.csv", index=False)
    (output / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    _plot_roc(wrong, scores, table, output / "roc.png")
    _print_results(report, table, rows, str(ours[0]), output)
    return report


def _plot_roc(wrong: np.ndarray, scores: dict[str, np.ndarray], table: pd.DataFrame, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 5.6), layout="constrained")
    for estimator, auroc in zip(table["estimator"], table["AUROC"], strict=True):
        false_positive, true_positive, _ = roc_curve(wrong, scores[estimator])
        style = "-" if "layer" in estimator else "--"
        axes.plot(false_positive, true_positive, style, linewidth=1.8, label=f"{estimator}: {auroc:.3f}")
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1, zorder=0)
    axes.set(xlabel="right answers flagged", ylabel="wrong answers flagged", xlim=(0, 1), ylim=(0, 1.005))
    axes.set_title(
        f"Which answers are wrong? {len(wrong)} test questions, {wrong.mean():.0%} answered wrongly",
        fontsize=11,
    )
    axes.set_aspect("equal")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="estimator: AUROC", fontsize=7.5, title_fontsize=8, loc="lower right", frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _print_results(report: dict, table: pd.DataFrame, rows: pd.DataFrame, by: str, output: Path) -> None:
    ranked = rows.sort_values(by, kind="stable")
    for title, part in (("most certain", ranked.head(10)), ("least certain", ranked.tail(10)[::-1])):
        print(f"\nThe ten {title} answers by {by}:")
        for _, row in part.iterrows():
            verdict = "wrong" if row["wrong"] else "right"
            print(f"  {row[by]:.3f}  {verdict}  {row['question']}  {' '.join(row['answer'].split())[:70]}")
    shown = table.to_string(
        index=False, formatters={"AUROC": "{:.3f}".format, "PRR": "{:.3f}".format, "seconds": "{:.4f}".format}
    )
    questions = report["questions"]
    print(
        f"\n{shown}\n\nPRR is lm-polygraph's, normalised, for rejecting up to {MAX_REJECTION:.0%}. Seconds are spent "
        f"in scoring {questions['test']} answers.\nvLLM processed {report['requests_processed_by_vllm']} requests for "
        f"{questions['train'] + questions['test']} questions. Results are in {output}/"
    )
