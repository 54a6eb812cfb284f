"""`prompt.reorder`: what may move, what the best order is, and that the same rows choose the same."""

from itertools import permutations
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.plan import plan
from batchgen.pipeline.annotation import DatasetSource
from batchgen.pipeline.config import PromptSettings
from batchgen.pipeline.pieces import FixedTemplateError, split_blocks, split_pieces
from batchgen.pipeline.reorder import Arrangement, arrange, best_order


def source(**columns: list[Any]) -> Any:
    from datasets import Dataset

    return DatasetSource(Dataset(pa.table(columns)))


@pytest.mark.parametrize(
    ("text", "blocks", "runs"),
    [
        ("{{ a }}\n\n{{ b }}", ["{{ a }}", "{{ b }}"], [range(2)]),
        ("A: {{ a }}\nmore {{ c }}\n \n\n\nB: {{ b }}\n", ["A: {{ a }}\nmore {{ c }}", "B: {{ b }}\n"], [range(2)]),
        ("{{ a }}\n\nplain\n\n{{ b }}", ["{{ a }}", "plain", "{{ b }}"], [range(1), range(2, 3)]),
        ("{% for x in a %}\n\n{{ x }}{% endfor %}", ["{% for x in a %}\n\n{{ x }}{% endfor %}"], [range(1)]),
        ("{% if a %}{% for x in a %}{{ x }}{% endfor %}\n\n{% endif %}!", None, [range(1)]),
        ("{% raw %}{{ a }}\n\n{{ b }}{% endraw %}", ["{% raw %}{{ a }}\n\n{{ b }}{% endraw %}"], []),
        ("{# a\n\nb #}{{ a }}", ["{# a\n\nb #}{{ a }}"], [range(1)]),
        ("{{ a }}\n\n{{- b }}", ["{{ a }}{{- b }}"], [range(1)]),
        ("{{ a -}}\n\n{{ b }}", ["{{ a -}}\n\n{{ b }}"], [range(1)]),
        ("plain", ["plain"], []),
    ],
)
def test_blocks_are_cut_at_blank_lines_outside_of_structures(
    text: str, blocks: list[str] | None, runs: list[range]
) -> None:
    found = split_blocks(text)
    assert blocks is None or [block.source for block in found.blocks] == blocks
    assert found.runs == runs


TEXTS = st.lists(
    st.sampled_from(["{{ a }}", "{{ b|upper }}", "text", "\n\n", "\n \n", "\n", "{% if a %}\n\nx{% endif %}", " "]),
    max_size=10,
).map("".join)


@given(TEXTS)
def test_the_given_order_is_the_given_text(text: str) -> None:
    found = split_blocks(text)
    assert found.arranged(range(len(found.blocks))) == text
    assert "".join(piece.source for piece in split_pieces(text)) == text


@pytest.mark.parametrize("tag", ["{% set x = a %}", "{% macro m() %}{% endmacro %}", "{% include 'x' %}"])
def test_tags_whose_effect_lasts_are_refused(tag: str) -> None:
    with pytest.raises(FixedTemplateError, match="on which what follows may depend"):
        split_blocks(f"{tag}\n\n{{{{ a }}}}")


COLUMNS = st.lists(st.lists(st.integers(0, 2), min_size=6, max_size=6), min_size=1, max_size=4)


@settings(deadline=None)
@given(COLUMNS, st.lists(st.integers(1, 5), min_size=4, max_size=4))
def test_the_order_is_the_best_of_all(columns: list[list[int]], widths: list[int]) -> None:
    """A value is so many equal tokens; what a trie of the rows holds is counted by the plan."""
    widths = [width * 3 for width in widths[: len(columns)]]

    def cost(order: Any) -> int:
        rows = [[token for at in order for token in [10 * at + columns[at][row]] * widths[at]] for row in range(6)]
        return plan(rows).distinct_tokens

    codes = [np.array(column) for column in columns]
    lengths = [np.full(6, width) for width in widths]
    chosen = best_order(codes, lengths, np.zeros(6, np.int64))
    orders = list(permutations(range(len(columns))))
    assert cost(chosen) == min(map(cost, orders))
    assert tuple(chosen) == next(order for order in orders if cost(order) == cost(chosen))


def test_many_blocks_are_ordered_by_what_each_shares() -> None:
    codes = [np.arange(8) // width for width in (1, 2, 4, 8, 1, 2, 4, 8, 1)]
    assert best_order(codes, [np.full(8, 10)] * 9, np.zeros(8, np.int64)) == [3, 7, 2, 6, 1, 5, 0, 4, 8]


ROWS = {"id": [f"number {at}" for at in range(40)], "topic": [f"topic {at % 3} " * 9 for at in range(40)]}


def test_an_early_id_goes_behind_what_repeats() -> None:
    prompt = PromptSettings(text="Look.\n\nId {{ id }}\n\nTopic {{ topic }}\n", reorder=True)
    found = arrange(prompt, source(**ROWS))
    assert found.orders == {"prompt.text": [0, 2, 1]}
    assert found.applied(prompt).text == "Look.\n\nTopic {{ topic }}\n\n\nId {{ id }}"
    assert "prompt.text as blocks 1, 3, 2" in found.describe()
    assert arrange(prompt, source(**ROWS)) == found


def test_nothing_moves_across_a_block_without_fields_or_out_of_a_message() -> None:
    apart = PromptSettings(text="{{ id }}\n\nand\n\n{{ topic }}", reorder=True)
    assert arrange(apart, source(**ROWS)).changed == {}
    chat = PromptSettings.model_validate(
        {
            "messages": [
                {"role": "system", "content": "{{ id }}"},
                {"role": "user", "content": "{{ id }}\n\n{{ topic }}\n\n!"},
            ],
            "reorder": True,
        }
    )
    found = arrange(chat, source(**ROWS))
    assert found.changed == {}, "behind an id in the system message nothing is shared any more"
    assert "stays as it is" in found.describe()


def test_rows_that_fail_do_not_count_and_none_at_all_changes_nothing() -> None:
    prompt = PromptSettings(text="{{ id[7] / 0 }}\n\n{{ topic }}", reorder=True)
    assert arrange(prompt, source(**ROWS)).changed == {}
    nulls = PromptSettings(text="{{ id }}\n\n{{ topic }}", reorder=True)
    empty = source(id=pa.nulls(3, pa.string()), topic=pa.array(["a"] * 3))
    assert arrange(nulls, empty).changed == {}


def test_a_stored_order_must_fit_the_template() -> None:
    with pytest.raises(FixedTemplateError, match="has 1 blocks"):
        Arrangement({"prompt.text": [1, 0]}).applied(PromptSettings(text="{{ a }}"))
