"""Runs rows through transformers' `generate`, sorted by length, in left-padded batches: what a careful user writes."""

import sys
import time
from typing import Any

import torch
from protocol import read_call, warm_prompts, write_result
from transformers import AutoModelForCausalLM, LlamaForCausalLM

PAD = 0


def generate(model: LlamaForCausalLM, rows: list[dict[str, Any]]) -> list[list[list[int]]]:
    """Answers of rows that share their settings, [rows][samples][tokens]."""
    width, row = max(len(row["tokens"]) for row in rows), rows[0]
    tokens = torch.tensor([[PAD] * (width - len(row["tokens"])) + row["tokens"] for row in rows])
    mask = torch.tensor([[0] * (width - len(row["tokens"])) + [1] * len(row["tokens"]) for row in rows])
    sampled = row["temperature"] > 0
    answers = model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=row["max_tokens"],
        min_new_tokens=row["max_tokens"],
        num_return_sequences=row["n"],
        do_sample=sampled,
        pad_token_id=PAD,
        **({"temperature": row["temperature"], "top_k": 0} if sampled else {}),
    )
    return answers[:, width:].view(len(rows), row["n"], -1).tolist()


@torch.inference_mode()
def main() -> None:
    rows, options = read_call(sys.argv)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=getattr(torch, options["dtype"])).eval()
    generate(model, [{"tokens": warm_prompts()[2], "max_tokens": 4, "n": 1, "temperature": 0}])
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]["tokens"]))
    size = max(1, options["batch"] // rows[0]["n"])
    answers: list[list[list[int]]] = [[]] * len(rows)
    start, first, computed = time.time(), 0.0, 0
    for at in range(0, len(order), size):
        chosen = order[at : at + size]
        for index, answer in zip(chosen, generate(model, [rows[index] for index in chosen]), strict=True):
            answers[index] = answer
        first = first or time.time()
        computed += max(len(rows[index]["tokens"]) for index in chosen) * len(chosen) * rows[0]["n"]
    write_result(start=start, first=first, end=time.time(), computed_prompt_tokens=computed, answers=answers)


if __name__ == "__main__":
    main()
