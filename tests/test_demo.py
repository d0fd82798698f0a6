"""The demo and the README's example, run as a user runs them."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "polygraph_hs.cli"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    output = tmp_path_factory.mktemp("demo")
    arguments = ["demo", "--limit", "12", "--quiet", "--output", str(output)]
    run = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout, output


def test_the_demo_asks_vllm_each_question_once(demo):
    report = json.loads((demo[1] / "report.json").read_text())
    assert report["questions"] == {"train": 36, "test": 36}
    assert report["requests_processed_by_vllm"] == 72


def test_the_demo_prints_its_table_and_the_ten_most_and_least_certain_answers(demo):
    stdout, output = demo
    report = json.loads((output / "report.json").read_text())
    names = [row["estimator"] for row in report["estimators"]]
    assert {"MaximumSequenceProbability", "Perplexity"} < set(names) and len(names) >= 4
    for row in report["estimators"]:
        line = next(line for line in stdout.splitlines() if line.strip().startswith(row["estimator"] + " "))
        assert line.split()[-3:] == [f"{row['AUROC']:.3f}", f"{row['PRR']:.3f}", f"{row['seconds']:.4f}"]
    assert len(re.findall(r"^  \d\.\d{3}  (right|wrong)  What is ", stdout, re.MULTILINE)) == 20


def test_the_demo_writes_answers_and_a_picture(demo):
    with (demo[1] / "answers.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 36
    assert {"question", "answers", "topic", "answer", "wrong", "Perplexity"} < set(rows[0])
    assert {row["wrong"] for row in rows} == {"0", "1"}
    assert (demo[1] / "roc.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help_says_what_the_commands_do(arguments):
    run = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=True)
    assert "demo" in run.stdout


def test_a_wrong_argument_of_the_demo_is_one_line_without_a_traceback():
    run = subprocess.run([*COMMAND, "demo", "--layer", "99", "--quiet"], capture_output=True, text=True)
    assert run.returncode == 2
    assert "polygraph-hs demo: layer=99 does not exist" in run.stderr
    assert "Traceback" not in run.stderr


def test_the_readmes_example_runs_as_printed(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(example.strip().splitlines()) <= 16
    # A plain script without a main guard, in another folder, after torch has been used on the CPU.
    script = tmp_path / "example.py"
    script.write_text("import torch\ntorch.randn(2000, 2000) @ torch.randn(2000, 2000)\n" + example)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    assert re.search(r"0\.\d+ The capital of France is Paris", run.stdout)
