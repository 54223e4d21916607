"""The LM evaluation harness over HTTP scores a multiple-choice set as transformers does without any server.

https://github.com/EleutherAI/lm-evaluation-harness: its `local-completions` model asks for the log-probabilities of a
prompt's own tokens (echo). The set and its task are made here; nothing is downloaded.
"""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.integration.conftest import start_deployment
from tests.integration.transformers_llama import transformers_llama

HARNESS = shutil.which("lm_eval")
HARNESS_TIMEOUT_S = 900.0
TOLERANCE = 2e-3
"""Of the sum of an answer's log-probabilities: both sides compute in float32."""

QUESTIONS: list[tuple[str, list[str], int]] = [
    ("What is the capital of France?", ["Paris", "Berlin", "Madrid", "Rome"], 0),
    ("What is the capital of Japan?", ["Seoul", "Beijing", "Tokyo", "Bangkok"], 2),
    ("Which planet is known as the red planet?", ["Venus", "Mars", "Jupiter", "Saturn"], 1),
    ("How many legs does a spider have?", ["six", "eight", "ten", "four"], 1),
    ("What do bees make?", ["milk", "honey", "wool", "silk"], 1),
    ("Water freezes at how many degrees Celsius?", ["100", "50", "0", "-50"], 2),
    ("What is the largest ocean on Earth?", ["the Pacific Ocean", "the Atlantic Ocean", "the Indian Ocean"], 0),
    ("Who wrote Romeo and Juliet?", ["Charles Dickens", "William Shakespeare", "Mark Twain"], 1),
    ("What gas do plants take in?", ["oxygen", "nitrogen", "carbon dioxide", "helium"], 2),
    ("What is 2 + 2?", ["3", "4", "5", "22"], 1),
    ("What is the opposite of hot?", ["cold", "warm", "red", "loud"], 0),
    ("Was heißt „toad“ auf Deutsch?", ["Kröte", "Hund", "Bäckerei"], 0),
    ("What is the past tense of 'go'?", ["goed", "went", "gone to", "going"], 1),
    ("How many days are in a week?", ["five", "six", "seven", "eight"], 2),
]
PROMPT = "Question: {question}\nAnswer:"
TASK = {
    "task": "made_here",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": PROMPT.replace("{question}", "{{question}}"),
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
}


@dataclass(frozen=True)
class Score:
    """One answer's log-probability, and whether it is what the model would say."""

    logprob: float
    is_greedy: bool


def write_task(folder: Path) -> None:
    lines = [json.dumps({"question": text, "choices": choices, "answer": right}) for text, choices, right in QUESTIONS]
    data = folder / "questions.jsonl"
    data.write_text("\n".join(lines))
    task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(data)}}}
    (folder / "made_here.yaml").write_text(json.dumps(task))  # JSON is YAML


def run_harness(folder: Path, http_url: str) -> tuple[list[list[Score]], dict[str, float]]:
    """Scores by question and choice, and the metrics."""
    asked = {
        "model": "smol",
        "base_url": f"{http_url}/v1/completions",
        "tokenizer": str(folder / "tokenizer"),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
        "max_retries": 1,
    }
    options = [
        "--model",
        "local-completions",
        "--model_args",
        ",".join(f"{key}={value}" for key, value in asked.items()),
    ]
    options += [
        "--tasks",
        "made_here",
        "--include_path",
        str(folder),
        "--output_path",
        str(folder / "out"),
        "--log_samples",
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HOME": str(folder)}
    done = subprocess.run(
        [str(HARNESS), "run", *options],
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=HARNESS_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [samples] = (folder / "out").rglob("samples_made_here_*.jsonl")
    [results] = (folder / "out").rglob("results_*.json")
    lines = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda line: line["doc_id"])
    scores = [[Score(float(one[0][0]), str(one[0][1]) == "True") for one in line["resps"]] for line in lines]
    metrics = json.loads(results.read_text())["results"]["made_here"]
    return scores, {name: metrics[f"{name},none"] for name in ("acc", "acc_norm")}


def tokenizer_of(model_path: Path) -> PreTrainedTokenizerFast:
    """The model's tokenizer without a class of its own, so that any version of transformers reads the same."""
    read = AutoTokenizer.from_pretrained(str(model_path.parent), gguf_file=model_path.name)
    return PreTrainedTokenizerFast(
        tokenizer_object=read.backend_tokenizer, eos_token=read.eos_token, pad_token=read.eos_token
    )


def expected_score(model: LlamaForCausalLM, tokenizer: Any, context: str, answer: str) -> Score:
    tokens = tokenizer(context + answer, add_special_tokens=False)["input_ids"]
    begin = len(tokenizer(context, add_special_tokens=False)["input_ids"])
    with torch.inference_mode():
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    chosen = [logprobs[position - 1, tokens[position]].item() for position in range(begin, len(tokens))]
    likeliest = [int(logprobs[position - 1].argmax()) for position in range(begin, len(tokens))]
    return Score(sum(chosen), likeliest == tokens[begin:])


def metrics_of(scores: list[list[Score]]) -> dict[str, float]:
    """The harness's two metrics: the likeliest answer, as it is and per byte of its text."""
    hits = {"acc": 0, "acc_norm": 0}
    for (_, choices, right), row in zip(QUESTIONS, scores, strict=True):
        values = [score.logprob for score in row]
        normed = [value / len(choice.encode()) for value, choice in zip(values, choices, strict=True)]
        hits["acc"] += values.index(max(values)) == right
        hits["acc_norm"] += normed.index(max(normed)) == right
    return {name: count / len(QUESTIONS) for name, count in hits.items()}


@pytest.mark.slow
@pytest.mark.skipif(HARNESS is None, reason="lm_eval is not on PATH: pip install 'lm-eval[api]' transformers")
def test_the_harness_scores_over_http_what_transformers_scores(tmp_path: Path, model_path: Path) -> None:
    write_task(tmp_path)
    tokenizer = tokenizer_of(model_path)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    deployment = start_deployment(
        tmp_path, "executor.engine=torch", "executor.dtype=float32", "executor.num_blocks=1024"
    )
    try:
        scores, metrics = run_harness(tmp_path, deployment.http_url)
    finally:
        deployment.stop()
    model = transformers_llama(gguf.GGUFReader(model_path))
    expected = [
        [expected_score(model, tokenizer, PROMPT.format(question=question), f" {choice}") for choice in choices]
        for question, choices, _ in QUESTIONS
    ]
    differences = [
        (abs(ours.logprob - theirs.logprob), question, choice)
        for (question, choices, _), row, other in zip(QUESTIONS, scores, expected, strict=True)
        for choice, ours, theirs in zip(choices, row, other, strict=True)
    ]
    assert max(differences) < (TOLERANCE,)
    assert [[one.is_greedy for one in row] for row in scores] == [[one.is_greedy for one in row] for row in expected]
    assert metrics == pytest.approx(metrics_of(expected))
    assert metrics["acc"] > 0.4, "the model knows something"
    print(f"largest difference {max(differences)}, {metrics}")
