"""How long a job takes under given settings: its schedule in the mean, step by step, at the rates of the machine.

Knows amounts and rates, no row; which settings are taken is decided in options.py. The formulas are those of a
sequential roofline whose terms are measured: fed tokens, drawn rows, and pairs of a query and a key.
"""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from .rates import Rates

STRIDES = 32  # answers are followed in so many strides,
MOST_STRIDES = 400  # and all of them in about so many
WAVES = 6  # of max_sequences answers that are followed; more go on like the last
RIGHT = 0.6  # of drafted tokens, where nothing is known yet
CHAIN = 4
SPREAD = 0.6, 1.0, 1.4  # of the mean: lengths of answers that begin together
MICRO_RUN_SHARE, MICRO_RUN_MOST = 0.02, 60.0  # of a job's time, and seconds
MICRO_RUN_CALLS = 0.25  # of the largest steps, with all layers
REST = 0.5  # of answers are still under way when max_tokens bounds them loosely


@dataclass(frozen=True, slots=True)
class Workload:
    """A job in means per row. `own` and `common`: prompt tokens of a row alone, and such as its neighbours share.

    `answer`: tokens fed back and drawn per sample, `forced` the share of them that a grammar knows, `computed` the
    prompt tokens that are left to compute per row when prefixes are computed once, `longest` the longest row in tokens.
    """

    rows: int
    own: float
    common: float
    computed: float
    answer: float
    longest: int
    samples: int = 1
    forced: float = 0.0
    scored: bool = False  # choices are scored; nothing is decoded
    certain: bool = False  # every answer has max_tokens

    @property
    def prompt(self) -> float:
        return self.own + self.common

    @property
    def answers(self) -> int:
        return self.rows * self.samples

    @property
    def decoded(self) -> float:
        """Steps of an answer behind the one that ends its prompt."""
        return 0.0 if self.scored else max(0.0, (self.answer - 1) * (1 - self.forced))

    @property
    def tokens(self) -> float:
        """All tokens to compute."""
        return self.rows * self.computed + self.answers * self.answer


@dataclass(frozen=True, slots=True)
class Settings:
    """What is chosen for a job."""

    weights: str
    kv_cache: str
    block_size: int
    max_batch_tokens: int
    max_sequences: int
    sharing: bool  # keys of common prefixes are read once for the rows that share them
    speculation: bool


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of the job and to the first answer, its steps and the tokens fed in them; KV tokens held at most."""

    seconds: float
    steps: float
    tokens: float
    first_row_seconds: float
    kv_tokens: float

    @property
    def step_seconds(self) -> float:
        """Of a step in the mean."""
        return self.seconds / self.steps

    @property
    def step_tokens(self) -> float:
        """Fed in a step in the mean."""
        return self.tokens / self.steps


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step of a job under settings."""

    work: Workload
    settings: Settings
    rates: Rates

    def seconds(self, decoding: float, prompt: float, drafted: float = 0.0) -> float:
        """`decoding` answers, `prompt` tokens of prompts, `drafted` tokens behind answers."""
        rates, work, settings = self.rates, self.work, self.settings
        starting = prompt / max(1.0, work.computed / work.samples)
        drawn, fed = decoding + drafted + starting, decoding + drafted + prompt
        if not fed:
            return 0.0
        known = decoding * work.forced / (1 - work.forced) if work.forced < 1 else 0.0
        return (
            rates.step
            + rates.sequence * (decoding + starting)
            + rates.layers[settings.weights].at(fed + known)
            + rates.head[settings.weights].at(drawn)
            + (decoding + drafted + known) * self._answer_keys(decoding)
            + prompt * (work.prompt - min(work.computed, work.prompt) / 2) * rates.shared_pair[settings.kv_cache]
        )

    def _answer_keys(self, decoding: float) -> float:
        """Seconds of one answer's query with all its keys."""
        work, rates, kv_cache = self.work, self.rates, self.settings.kv_cache
        own = work.own / (work.samples if self._samples_share(decoding) else 1) + work.answer / 2
        together = work.prompt - own + work.answer / 2
        if self._pays(decoding, together):
            return own * rates.own_pair[kv_cache] + together * rates.shared_pair[kv_cache]
        return (own + together) * rates.own_pair[kv_cache]

    def _samples_share(self, decoding: float) -> bool:
        return self._pays(min(decoding, self.work.samples), self.work.own)

    def _pays(self, num_queries: float, num_keys: float) -> bool:
        return self.settings.sharing and self.rates.sharing[self.settings.kv_cache].pays(num_queries, num_keys)

    def drafted(self, decoding: float) -> tuple[float, float]:
        """Seconds per step of plain progress with drafts, and how many times as far a step gets."""
        if not decoding:
            return 0.0, 1.0
        best, gain = self.seconds(decoding, 0.0), 1.0
        for length in range(1, CHAIN + 1):
            seconds = self.seconds(decoding, 0.0, decoding * length)
            further = sum(RIGHT**place for place in range(length + 1))
            if further / seconds > gain / best:
                best, gain = seconds, further
        return best, gain


def predict(work: Workload, settings: Settings, rates: Rates, kv_tokens: float = float("inf")) -> Prediction:
    """The job under these settings, with room for `kv_tokens`."""
    most = sequences_that_fit(work, settings, kv_tokens)
    followed = min(work.answers, max(1, int(WAVES * most)))
    cost = StepCost(work, settings, rates)
    seen = _follow(cost, most, followed)
    rest = (work.answers - followed) * seen.marginal
    scale = (seen.seconds + rest) / seen.seconds
    held = min(seen.held + work.common, kv_tokens)
    return Prediction(seen.seconds * scale, seen.steps * scale, seen.tokens * scale, seen.first, held)


def sequences_that_fit(work: Workload, settings: Settings, kv_tokens: float) -> float:
    """Answers at once: what is asked for, what there is, and what the KV memory is expected to hold."""
    spare = settings.block_size / 2
    each = work.own / work.samples + work.answer * (1 + REST) / 2 + spare
    room = max(1.0, (kv_tokens - work.common) / each)
    return max(1.0, min(settings.max_sequences, settings.max_batch_tokens, work.answers, room))


def affordable_seconds(work: Workload, rates: Rates) -> float:
    """What micro-runs may take of a job, by rates that are only built in."""
    settings = Settings("native", next(iter(rates.kv_bytes)), 16, 512, 256, sharing=True, speculation=False)
    return min(MICRO_RUN_MOST, MICRO_RUN_SHARE * predict(work, settings, rates).seconds)


def micro_run_seconds(rates: Rates) -> float:
    """About what micro-runs take: two layers of the model, some calls for each number."""
    calls = sum(curve.seconds[-1] for part in (rates.layers, rates.head) for curve in part.values())
    return 1.0 + MICRO_RUN_CALLS * calls


@dataclass(slots=True)
class _Seen:
    """What was seen of the answers that were followed. `marginal`: seconds of one answer more; `held`: tokens that they
    have for themselves at once, at most.
    """

    seconds: float = 0.0
    held: float = 0.0
    first: float = 0.0
    steps: float = 0.0
    tokens: float = 0.0
    marginal: float = 0.0


def _follow(cost: StepCost, most: float, answers: int) -> _Seen:
    """Steps until `answers` have ended: every answer that runs feeds a token, prompts the rest of the budget."""
    work, budget = cost.work, float(cost.settings.max_batch_tokens)
    each = max(work.computed / work.samples, 1e-9)
    stride = max(1.0, work.decoded / STRIDES, answers * (each + work.decoded) / budget / MOST_STRIDES)
    running: list[tuple[float, float, float]] = []  # a heap of (end, how many, start), in steps of progress
    waiting, active, starts, now, seen = float(answers), 0.0, 0.0, 0.0, _Seen()  # starts: summed over active
    tokens = work.own / work.samples + work.answer - work.decoded  # of an answer at its start
    drafts, lengths = _drafts(cost), (1.0,) if work.certain else SPREAD
    marks: list[tuple[float, float]] = []  # (answers let in, seconds) while answers are let in
    while waiting > 1e-9 or running:
        steps = stride if running or waiting * each > budget else 1.0
        entering = min(waiting, max(0.0, most - active), max(0.0, budget - active) * steps / each)
        prompt = entering * each / steps
        if prompt:
            seconds, further = cost.seconds(active, prompt), 1.0
        else:
            seconds, further = drafts(active)
            steps = max(1.0, steps / further)
        seen.seconds += seconds * steps
        seen.steps += steps
        seen.tokens += (active * further + prompt) * steps
        waiting, active = waiting - entering, active + entering
        now += steps * further
        if entering:
            for length in lengths:
                heappush(running, (now + length * work.decoded, entering / len(lengths), now))
            starts += entering * now
            marks.append((answers - waiting, seen.seconds))
        seen.held = max(seen.held, active * (tokens + now) - starts)
        while running and running[0][0] <= now + 1e-9:
            seen.first = seen.first or seen.seconds
            _, ended, start = heappop(running)
            active, starts = max(0.0, active - ended), starts - ended * start
    seen.marginal = _slope(marks, seen.seconds, answers)
    return seen


def _drafts(cost: StepCost) -> Callable[[float], tuple[float, float]]:
    """Seconds and progress of a step without prompts, by the answers in it."""
    if cost.settings.speculation:
        return cost.drafted
    return lambda active: (cost.seconds(active, 0.0), 1.0)


def _slope(marks: list[tuple[float, float]], seconds: float, answers: int) -> float:
    """Seconds per answer in the second half of those that were let in."""
    middle, last = marks[len(marks) // 2], marks[-1]
    return (last[1] - middle[1]) / (last[0] - middle[0]) if last[0] > middle[0] else seconds / answers
