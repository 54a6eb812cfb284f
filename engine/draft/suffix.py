"""Guesses from the answers the job has already finished, by the longest ending that stood in one of them.

Keeps a suffix automaton per group of prompts with one start, bounded in tokens; a row's own text is looked up too.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from ..sequence import GROUP_START, Sequence
from .ngram import MOST, cut_path, own_text
from .speculation import NO_DRAFT, Draft

DEEPEST = 64  # tokens of a text that the automaton sees as one piece, and longest match
OVERLAP = 8  # tokens that neighbouring pieces share
PROMPT_END = 8  # prompt tokens kept before an answer: how it began
MAX_GROUPS = 8
GENERATION = 2**14  # tokens of a group's younger automaton; a full one becomes the older, and the older goes
MIN_MATCH = 2


class SuffixAutomaton:
    """All runs of up to DEEPEST tokens of the texts added, and how often each ended somewhere.

    States are the classes of runs with equal sets of end places; built token by token (Blumer et al. 1985).
    """

    def __init__(self) -> None:
        self.size = 0  # tokens added
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]

    def add(self, tokens: list[int]) -> None:
        for start in range(0, max(1, len(tokens) - OVERLAP), DEEPEST - OVERLAP):
            state = 0
            for token in tokens[start : start + DEEPEST]:
                state = self._extend(state, token)
                self._count_end(state)
        self.size += len(tokens)

    def find(self, tokens: list[int]) -> tuple[int, int]:
        """The state of the longest ending of `tokens` that is known, and its length."""
        state = matched = 0
        for token in tokens[-DEEPEST:]:
            while state and token not in self._next[state]:
                state = self._link[state]
                matched = self._length[state]
            if token in self._next[state]:
                state, matched = self._next[state][token], matched + 1
        return state, matched

    def draft(self, tokens: list[int], most: int) -> Draft:
        """The likeliest way on behind the longest known ending, no longer than that."""
        state, match = self.find(tokens)
        if match < MIN_MATCH:
            return NO_DRAFT
        found: list[int] = []
        chances: list[float] = []
        while len(found) < min(most, match) and self._next[state]:
            token, following = max(self._next[state].items(), key=lambda way: self._count[way[1]])
            found.append(token)
            chances.append(self._count[following] / (self._count[state] + 0.5))
            state = following
        return cut_path(Draft(tuple(found), tuple(chances), match, "answers"))

    def _extend(self, last: int, token: int) -> int:
        """The state of the text so far and `token`, made where there is none."""
        known = self._next[last].get(token)
        if known is not None:
            return known if self._length[known] == self._length[last] + 1 else self._split(last, token, known)
        state = self._new_state({}, self._length[last] + 1, 0, 0)
        at = last
        while at != -1 and token not in self._next[at]:
            self._next[at][token] = state
            at = self._link[at]
        if at != -1:
            known = self._next[at][token]
            whole = self._length[known] == self._length[at] + 1
            self._link[state] = known if whole else self._split(at, token, known)
        return state

    def _split(self, last: int, token: int, known: int) -> int:
        """Gives the shorter runs of a state, which now end in more places, a state of their own."""
        state = self._new_state(dict(self._next[known]), self._length[last] + 1, self._link[known], self._count[known])
        self._link[known] = state
        while last != -1 and self._next[last].get(token) == known:
            self._next[last][token] = state
            last = self._link[last]
        return state

    def _new_state(self, ways: dict[int, int], length: int, link: int, count: int) -> int:
        self._next.append(ways)
        self._length.append(length)
        self._link.append(link)
        self._count.append(count)
        return len(self._next) - 1

    def _count_end(self, state: int) -> None:
        while state:
            self._count[state] += 1
            state = self._link[state]


@dataclass(slots=True)
class FinishedAnswers:
    """The latest answers of one group: two automata, of which the younger grows."""

    younger: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    older: SuffixAutomaton = field(default_factory=SuffixAutomaton)

    def add(self, tokens: list[int]) -> None:
        if self.younger.size >= GENERATION:
            self.older, self.younger = self.younger, SuffixAutomaton()
        self.younger.add(tokens)

    def draft(self, tokens: list[int], most: int) -> Draft:
        drafts = (automaton.draft(tokens, most) for automaton in (self.younger, self.older) if automaton.size)
        return max(drafts, key=lambda draft: draft.expected, default=NO_DRAFT)


class SuffixDrafter:
    """The better of two guesses: from finished answers of the sequence's group, and from its own text."""

    most = MOST
    writes_pages = False

    def __init__(self) -> None:
        self._groups: OrderedDict[tuple[int, ...], FinishedAnswers] = OrderedDict()

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        return [self._draft(sequence, most) for sequence, most in wanted]

    def verified(self, draft: Draft, num_right: int) -> None:
        return None

    def ended(self, sequence: Sequence) -> None:
        """Its answer, with the end of the prompt before it, is what others are guessed from."""
        sequence.drafting = None
        first = max(0, sequence.prompt_length - PROMPT_END)
        group = self._group(sequence)
        group.add(sequence.tokens[first:])
        while len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)

    def _draft(self, sequence: Sequence, most: int) -> Draft:
        text = sequence.tokens[max(0, sequence.prompt_length - PROMPT_END, len(sequence.tokens) - DEEPEST) :]
        others = self._group(sequence).draft(text, most)
        own = own_text(sequence).draft(sequence.tokens, most)
        return max(others, own, key=lambda draft: draft.expected)

    def _group(self, sequence: Sequence) -> FinishedAnswers:
        """By the start of the prompt when other rows have it too; all other rows are one group."""
        task = sequence.task
        name = task.start if task.cached_tokens >= GROUP_START else ()
        group = self._groups.setdefault(name, FinishedAnswers())
        self._groups.move_to_end(name)
        return group
