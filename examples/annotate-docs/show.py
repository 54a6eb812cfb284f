"""Prints the first annotated rows: the output directory is a Hugging Face data set."""

import textwrap
from pathlib import Path

from datasets import load_from_disk

ROWS = 8

dataset = load_from_disk(str(Path(__file__).parent / "out"))
for row in dataset.select(range(min(ROWS, len(dataset)))):
    print(f"\n{row['name']}  [{row['finish_reason']}, {row['usage']['completion_tokens']} tokens]")
    print(textwrap.fill(row["completion"] or str(row["error"]), width=100, initial_indent="  ", subsequent_indent="  "))
print(f"\n{len(dataset)} rows in {Path(__file__).parent / 'out'}: datasets.load_from_disk opens them")
