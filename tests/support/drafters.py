"""Drafters that mean no good: always wrong, random, now and then right, longer than there is room for."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchgen.engine.draft.speculation import Draft, Drafting, Eager
from batchgen.engine.statistics import Statistics

Guess = Callable[[list[int], int], int]  # from tokens and their number of prompt tokens to a next token


@dataclass
class Scripted:
    """Calls `guess` token by token; `lengths` says how many it drafts each time, whatever room there is."""

    guess: Guess
    lengths: Sequence[int]
    most: int = 8
    writes_pages: bool = False
    calls: int = 0

    def propose(self, wanted):
        return [self._draft(sequence) for sequence, _ in wanted]

    def _draft(self, sequence) -> Draft:
        self.calls += 1
        tokens = list(sequence.tokens)
        for _ in range(self.lengths[self.calls % len(self.lengths)]):
            tokens.append(self.guess(tokens, sequence.prompt_length))
        found = tuple(tokens[len(sequence.tokens) :])
        return Draft(found, (0.5,) * len(found), 1, "script")

    def verified(self, draft: Draft, num_right: int) -> None:
        return None

    def ended(self, sequence) -> None:
        return None


def scripted(guess: Guess, lengths: Sequence[int], vocabulary: int) -> Callable[[Statistics], Drafting]:
    return lambda statistics: Drafting(Scripted(guess, lengths), Eager(), vocabulary, statistics)


def adversaries(truth: Guess, vocabulary: int, seed: int = 0) -> dict[str, Guess]:
    """`truth` is what a greedy answer would go on with."""
    noise = random.Random(seed)

    def wrong(tokens: list[int], prompt_length: int) -> int:
        return (truth(tokens, prompt_length) + 1) % vocabulary

    def at_random(tokens: list[int], prompt_length: int) -> int:
        return noise.randrange(vocabulary)

    def sometimes(tokens: list[int], prompt_length: int) -> int:
        return (truth if noise.random() < 0.7 else wrong)(tokens, prompt_length)

    def illegal(tokens: list[int], prompt_length: int) -> int:
        return noise.choice([-1, vocabulary, 2**40, truth(tokens, prompt_length)])

    return {"right": truth, "wrong": wrong, "random": at_random, "sometimes": sometimes, "illegal": illegal}
