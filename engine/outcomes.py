"""What the outcome of a step changes: answers grow, end or fail, and their rows with them.

Pure Python on tokens; which step comes next is not decided here.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from .admission import Admission
from .choices import ChoiceTrie
from .draft.speculation import Speculation
from .intake import Intake
from .request import FinishReason, RowError, Sample
from .residents import Residents
from .sequence import Drawn, Feed, Sequence
from .statistics import Statistics
from .stopping import finish_reason


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Takes what feeds drew, in the order of the steps."""

    intake: Intake
    residents: Residents
    admission: Admission
    statistics: Statistics
    speculation: Speculation

    def take(self, feed: Feed, results: list[Drawn]) -> None:
        """The tokens drawn up to and with the first that differs from the draft; what was fed behind it is void."""
        sequence = feed.sequence
        num_right = num_accepted(feed.draft, results)
        error = self._fault(results[0]) if results else None
        if error is None:
            self._advance(feed, feed.known + num_right)
        self.speculation.verified(sequence, feed.draft, num_right)
        trie = sequence.task.trie
        if trie is not None:
            self._score(feed, trie, results)
        elif self._runs_on(sequence, results[: num_right + 1]) and not sequence.under_way:
            self.residents.shorten(sequence)  # else what is under way has drafts in the blocks behind

    def _runs_on(self, sequence: Sequence, results: list[Drawn]) -> bool:
        """Receives tokens as long as none of them ends the answer or is an error; says whether it goes on."""
        for result in results:
            error = self._fault(result)
            if error is not None:
                self._fail(sequence, error)
                return False
            if self._receive(sequence, result):
                return False
        return not results or self._takes_known(sequence)

    def _takes_known(self, sequence: Sequence) -> bool:
        """Appends what the grammar forces, to be fed unsampled; says whether the answer goes on."""
        for token in known_tokens(sequence):
            self.statistics.forced_tokens += 1
            if self._append(sequence, token):
                return False
        return True

    def _advance(self, feed: Feed, end: int) -> None:
        """Keys of the sequence's tokens below `end` are computed."""
        sequence, size = feed.sequence, self.residents.tree.block_size
        sequence.computed = max(sequence.computed, end)
        first = max(feed.start - 1, 0) // size  # the block before counts too: its last tokens may have been copied
        for index in range(first, min(self.residents.blocks(end), len(sequence.path))):
            node = sequence.path[index]
            node.filled = max(node.filled, min(end - index * size, len(node.tokens)))
        statistics = self.statistics
        statistics.computed_prompt_tokens += max(0, min(end, sequence.prompt_length) - feed.start)
        statistics.recomputed_tokens += max(0, min(end, sequence.computed_before) - feed.start)
        sequence.computed_before = max(sequence.computed_before, end)

    def _fault(self, drawn: Drawn) -> RowError | None:
        """The step's own error, or a token that no tokenizer knows."""
        legal = self.intake.limits.vocabulary
        if drawn.error is None and not 0 <= drawn.token < legal:
            message = f"token id {drawn.token} was drawn, outside 0 .. {legal - 1}"
            return RowError("engine", "generate", message, retryable=True)
        return drawn.error

    def _receive(self, sequence: Sequence, drawn: Drawn) -> bool:
        """A token that was drawn; says whether the answer ends with it."""
        sequence.foreseen -= sequence.foreseen > 0
        if drawn.logprob is not None:
            sequence.logprobs.append(drawn.logprob)
        return self._append(sequence, drawn.token)

    def _append(self, sequence: Sequence, token: int) -> bool:
        """One more token; says whether the answer ends with it."""
        task, sampling = sequence.task, sequence.task.request.sampling
        self.statistics.output_tokens += 1
        sequence.tokens.append(token)
        sequence.counts.add(token)
        stopped = token not in task.ends and sequence.stops.push(token)
        reason = finish_reason(token, sequence.answer_length, stopped, sampling, task.ends)
        if reason != "stop":
            sequence.grammar = sequence.grammar.after(token)
        if sequence.grammar.finished:
            reason = "stop"
        if reason is not None:
            self._finish(sequence, reason)
        return reason is not None

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        task, sampling = sequence.task, sequence.task.request.sampling
        answer = sequence.tokens[sequence.prompt_length :]
        logprobs = sequence.logprobs if sampling.logprobs is not None else None
        task.samples[sequence.sample] = Sample(answer, reason, logprobs)
        self.residents.drop(sequence)
        self.admission.observe(sequence)
        if task.done:
            self._complete(sequence)
        self.speculation.ended(sequence)

    def _score(self, feed: Feed, trie: ChoiceTrie, results: list[Drawn]) -> None:
        """Nodes of the trie are done; the last one decides."""
        sequence, task = feed.sequence, feed.sequence.task
        error = next(filter(None, map(self._fault, results)), None)
        if error is not None:
            self._fail(sequence, error)
            return
        for (_, node), result in zip(feed.nodes, results, strict=True):
            task.scores[node] = result.scores
        if feed.samples:
            self.residents.drop(sequence)
        if all(task.scores):
            answer = task.samples[0] = task.decide(trie)
            self.statistics.output_tokens += len(answer.tokens)
            self._complete(sequence)

    def _complete(self, sequence: Sequence) -> None:
        self.statistics.cached_prompt_tokens += sequence.task.cached_tokens
        self.intake.complete(sequence.task)

    def _fail(self, sequence: Sequence, error: RowError) -> None:
        """Ends the row of `sequence` with an error; rows that waited for its prompt start over."""
        task = sequence.task
        task.error = error
        self.residents.drop_all([other for other in self.residents.everyone if other.task is task])
        self.admission.forget(task)
        self._complete(sequence)


def known_tokens(sequence: Sequence) -> Ordered[int]:
    """Tokens that must follow; an answer with log-probabilities draws them instead, to have theirs."""
    return sequence.grammar.forced() if sequence.task.request.sampling.logprobs is None else ()


def num_accepted(draft: Ordered[int], results: Ordered[Drawn]) -> int:
    """How many leading drafted tokens are what was drawn in their place."""
    for place, (token, result) in enumerate(zip(draft, results, strict=False)):
        if result.error is not None or result.token != token:
            return place
    return len(draft)
