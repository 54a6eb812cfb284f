"""The grammars of one engine: each distinct one compiled once for its tokenizer, and masks filled for a step's states.

Knows llguidance's tokenizer and threads; what a mask does to logits is a kernel's business.
"""

from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import numpy as np
from llguidance import LLExecutor, LLTokenizer

from .choices import ChoiceTrie, choice_trie
from .grammar import Grammar, GrammarError, new_matcher, source_of
from .grammar_closing import MARGIN, Closing
from .grammar_state import Budget, Mask, MatcherState
from .tokenizer import Tokenizer

MAX_COMPILED = 256  # distinct grammars kept, the latest used ones


class Grammars:
    """Start states by grammar."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._compiled: OrderedDict[Grammar, MatcherState | str] = OrderedDict()
        self._tries: OrderedDict[Grammar, ChoiceTrie] = OrderedDict()
        self._filling: Future[None] | None = None
        self.num_compiled = 0
        self._forcing = True

    def set_forcing(self, forcing: bool) -> None:
        """Whether text without alternatives is fed as known tokens, unsampled; answers are the same either way."""
        self._forcing = forcing
        self._compiled.clear()

    def start(self, grammar: Grammar) -> MatcherState:
        """The state of an answer without tokens. Raises GrammarError, each time, for a grammar that is no good."""
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compiled[grammar] = self._compile(grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        if isinstance(found, str):
            raise GrammarError(found)
        return found

    def trie(self, grammar: Grammar) -> ChoiceTrie:
        """The choices of a grammar as tokens, in the tokenizer's own spelling. Raises GrammarError."""
        if grammar not in self._tries:
            self.start(grammar)
            texts = grammar.options
            self._tries[grammar] = choice_trie(texts, [self._tokens.tokenize_str(text) for text in texts])
            if len(self._tries) > MAX_COMPILED:
                self._tries.popitem(last=False)
        return self._tries[grammar]

    def fill(self, states: Iterable[MatcherState]) -> None:
        """Begins to fill the masks of the states that have none, each distinct one once; `wait` ends it."""
        missing = {id(state): state for state in states if state.mask is None}
        if missing:
            self._filling = self._beside.submit(self._fill, list(missing.values()))

    def wait(self) -> None:
        """Returns when the states of the latest `fill` have their masks."""
        filling, self._filling = self._filling, None
        if filling is not None:
            filling.result()

    def allowed(self, state: MatcherState, ends: frozenset[int], left: int, early: bool = False) -> Mask:
        """What may follow, for an answer that ends with `ends`: these wherever it is complete, no other end.

        `left`: tokens before `max_tokens`; when they get few, JSON keeps to what can still be closed. `early`: the
        answer has fewer than `min_tokens`, so that it goes on as long as the grammar knows how.
        """
        mask = self._with_ends(state, ends)
        if early:
            mask = _without(mask, ends)
        return self._closing.narrowed(state, mask, left) if left <= state.budget.reserve else mask

    def _with_ends(self, state: MatcherState, ends: frozenset[int]) -> Mask:
        assert state.mask is not None
        if ends == self._eos_ids:
            return state.mask
        mask = state.mask.copy()
        _set(mask, self._eos_ids, False)
        if state.accepting:
            _set(mask, ends, True)
        return mask

    def _fill(self, states: list[MatcherState]) -> None:
        masks = np.zeros((len(states), self._words), np.int32)
        places = [(state.matcher, at) for at, state in enumerate(states)]
        self._executor.unsafe_compute_mask_ptr(places, masks.ctypes.data, 4 * self._words, len(states))
        for state, mask in zip(states, masks, strict=True):
            state.mask = mask.copy()  # alone, so that a kept one does not keep the others

    def _compile(self, grammar: Grammar) -> MatcherState | str:
        self.num_compiled += 1
        try:
            matcher = new_matcher(self._tokens, source_of(grammar))
            shortest = self._closing.length(matcher) if grammar.kind == "json_schema" else None
            reserve = 0 if shortest is None else shortest + 2 * MARGIN
            state = MatcherState(matcher, Budget(self._forcing, reserve=reserve))
            ahead = [state.after(token) for token in matcher.compute_ff_tokens()[:1]]  # text without end shows here
            fault = next((further.error for further in ahead if further.error is not None), None)
            return state if fault is None else f"no answer can satisfy it ({fault})"
        except GrammarError as error:
            return str(error)

    @property
    def _words(self) -> int:
        return -(-self._tokens.vocab_size // 32)

    @cached_property
    def _tokens(self) -> LLTokenizer:
        """The vocabulary as bytes, with the tokenizer's own way to spell a text."""
        ends = sorted(self._eos_ids)
        if not ends:
            raise GrammarError("the model has no end token, so an answer could not end where its grammar lets it")
        try:
            return LLTokenizer(self._tokenizer.backend.to_str(), eos_token=ends)
        except ValueError as error:
            raise GrammarError(f"the tokenizer's vocabulary cannot be read as bytes ({error})") from None

    @cached_property
    def _closing(self) -> Closing:
        return Closing(self._tokens)

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()

    @cached_property
    def _beside(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="grammar")


def _without(mask: Mask, ends: frozenset[int]) -> Mask:
    """The mask without the end tokens, unless there is nothing else in it."""
    others = mask.copy()
    _set(others, ends, False)
    return others if others.any() else mask


def _set(mask: Mask, tokens: Iterable[int], allowed: bool) -> None:
    words = mask.view(np.uint32)
    for token in tokens:
        bit = np.uint32(1 << token % 32)
        words[token // 32] = words[token // 32] | bit if allowed else words[token // 32] & ~bit
