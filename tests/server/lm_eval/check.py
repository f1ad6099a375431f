"""lm-eval against the server: its scores are those of transformers, cold and warm.

    python tests/server/lm_eval/check.py LM_EVAL_PYTHON

Run it where radixserve is installed; LM_EVAL_PYTHON is the interpreter of an environment with
lm-eval[api]. It writes two local tasks (a choice between texts, and short answers) from the demo
model's subject, serves the demo model, and runs `local-completions` and `local-chat-completions`
twice each: every log-likelihood, every answer and the scores have to be those that transformers
computes from the same checkpoint. The first run computes a question once for its four choices, the
second one the last token of each prompt alone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "radixserve" / "models" / "demo"
TOLERANCE = 2e-3  # of a log-likelihood: float32 in another order of sums
SUBJECTS = ["json", "os", "sys", "re", "math", "random", "itertools", "collections", "pathlib",
            "datetime", "csv", "sqlite3", "threading", "asyncio", "logging", "urllib"]  # fmt: skip


def choices() -> list[dict[str, Any]]:
    texts = [" module provides a function.", " list sorts files by hand.", " import the class", "."]
    return [
        {"question": f"The {name}", "choices": texts, "answer": number % len(texts)}
        for number, name in enumerate(SUBJECTS)
    ]


def questions() -> list[str]:
    return [f"What does the {name} module do?" for name in SUBJECTS[:6]]


class Reference:
    """transformers on the same checkpoint."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)  # for so small a model a second one costs more than it saves
        self._torch = torch
        self.tokenizer: Any = AutoTokenizer.from_pretrained(DEMO)
        self._model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()

    def logprob(self, context: str, continuation: str) -> float:
        """Tokenised as lm-eval does: the context alone, and both together."""
        head = self.tokenizer(context, add_special_tokens=False)["input_ids"]
        ids = self.tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
        with self._torch.no_grad():
            logits = self._model(self._torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(float(logits[at - 1, ids[at]]) for at in range(len(head), len(ids)))

    def num_prefixes(self, docs: list[dict[str, Any]]) -> int:
        """Distinct prefixes of all questions with their choices: tokens to be computed once."""
        texts = [doc["question"] + choice for doc in docs for choice in doc["choices"]]
        each = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        return len({tuple(ids[:end]) for ids in each for end in range(1, len(ids) + 1)})

    def answer(self, question: str) -> str:
        messages = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with self._torch.no_grad():
            found = self._model.generate(ids, max_new_tokens=24, do_sample=False)[0]
        return str(self.tokenizer.decode(found[ids.shape[1] :], skip_special_tokens=True))


def serve() -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join([str(ROOT / "kernels"), str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, "-m", "radixserve", "serve", "demo", f"--port={port}"],
        env={**os.environ, "PYTHONPATH": path},
    )
    url = f"http://127.0.0.1:{port}"
    for _ in range(1_200):
        assert process.poll() is None, "the server did not start"
        try:
            with urllib.request.urlopen(f"{url}/health/ready"):
                return process, url
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server was not ready in time")


def num_computed(url: str) -> int:
    """Tokens of prompts that the server has computed since its start."""
    with urllib.request.urlopen(f"{url}/v1/cache/stats") as answer:
        return int(json.load(answer)["computed_tokens"])


def run_lm_eval(python: str, folder: Path, model: str, arguments: str, task: str) -> Any:
    """(scores, samples) of one run."""
    output = folder / "output"
    shutil.rmtree(output, ignore_errors=True)
    command = [python, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments,
               "--tasks", task, "--include_path", str(folder), "--log_samples",
               "--output_path", str(output)]  # fmt: skip
    command += ["--apply_chat_template"] if "chat" in model else ["--batch_size", "8"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment = {**os.environ, **offline, "HF_HOME": str(folder / "home")}
    environment.pop("PYTHONPATH", None)
    subprocess.run(command, check=True, cwd=folder, env=environment)
    (results,) = output.rglob("results_*.json")
    (samples,) = output.rglob("samples_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    return json.loads(results.read_text())["results"][task], sorted(
        lines, key=lambda line: line["doc_id"]
    )


def check(python: str, folder: Path, url: str) -> None:
    reference = Reference()
    docs = choices()
    wanted = [[reference.logprob(d["question"], text) for text in d["choices"]] for d in docs]
    right = [max(range(4), key=lp.__getitem__) == d["answer"] for d, lp in zip(docs, wanted,
             strict=True)]  # fmt: skip
    answers = [reference.answer(question) for question in questions()]
    write(folder, "choices", docs)
    # Every second answer is right, so that a server that ignored the question would be seen.
    write(folder, "answers", [
        {"question": question, "answer": answer if at % 2 else "something else"}
        for at, (question, answer) in enumerate(zip(questions(), answers, strict=True))
    ])  # fmt: skip
    num_requests, num_prefixes = sum(map(len, wanted)), reference.num_prefixes(docs)
    for state in ("cold", "warm"):
        before = num_computed(url)
        model = f"model=demo,base_url={url}/v1/completions,tokenizer_backend=remote"
        scores, samples = run_lm_eval(
            python, folder, "local-completions", f"{model},num_concurrent=1", "radixserve_choices"
        )
        for sample, logprobs in zip(samples, wanted, strict=True):
            found = [float(one[0]) for one in sample["filtered_resps"]]
            worst = max(abs(a - b) for a, b in zip(found, logprobs, strict=True))
            assert worst < TOLERANCE, (state, sample["doc"], found, logprobs)
        accuracy = sum(right) / len(right)
        assert abs(scores["acc,none"] - accuracy) < 1e-9, (state, scores, accuracy)
        print(f"local-completions, {state}: acc {accuracy} as transformers")
        computed = num_computed(url) - before
        if state == "cold":  # the token before the first other one of each choice is computed again
            assert num_prefixes <= computed <= num_prefixes + num_requests, (computed, num_prefixes)
        else:
            assert computed == num_requests, (computed, num_requests)
        print(f"{num_requests} prompts, {num_prefixes} prefixes, {computed} tokens computed")

        model = f"model=demo,base_url={url}/v1/chat/completions"
        scores, samples = run_lm_eval(
            python, folder, "local-chat-completions", model, "radixserve_answers"
        )
        said = [sample["resps"][0][0] for sample in samples]
        assert said == answers, (state, said, answers)
        assert abs(scores["exact_match,none"] - 0.5) < 1e-9, (state, scores)
        print(f"local-chat-completions, {state}: the answers of transformers")


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = (Path(__file__).parent / f"{name}.yaml").read_text()
    data = f"test: {folder / f'{name}.jsonl'}"
    (folder / f"{name}.yaml").write_text(task.replace(f"test: {name}.jsonl", data))


def main() -> None:
    process, url = serve()
    try:
        with tempfile.TemporaryDirectory() as folder:
            check(sys.argv[1], Path(folder), url)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


if __name__ == "__main__":
    main()
