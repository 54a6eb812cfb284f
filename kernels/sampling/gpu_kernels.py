"""The sampling kernels in Triton: one program a row. Knows the contract's filters and keys, nothing of launches.

What a filter leaves is the beginning of the row in order of logits, so each filter is a threshold, found by cutting a
range of floats into WAYS parts again and again. It is looked for among few candidates: of the largest numbers in each
of BLOCK places (a number's place is its id modulo BLOCK) enough lie above the candidates' threshold: so do as many
of the row. Where that leaves too many for the scratch memory, in flat rows, the whole row is searched instead.
"""

import triton
import triton.language as tl

from .gpu_rows import LOWEST, best_of, between, counts_above, key_words, masses_above, narrowed, noise, ordered, share


@triton.jit
def check_finite(logits, stride, out, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        place = start + tl.arange(0, BLOCK)
        numbers = tl.load(logits + row * stride + place, mask=place < vocabulary, other=float("-inf"))
        broken |= (numbers != numbers).to(tl.int32)
        largest = tl.maximum(largest, numbers)
    best = tl.max(largest, 0)
    tl.store(out + row, (tl.max(broken, 0) == 0) & (best > float("-inf")) & (best < float("inf")))


@triton.jit(do_not_specialize=["entries"])
def penalise_entries(
    logits, rows, tokens, counts, repetition, presence, frequency, vocabulary, entries, BLOCK: tl.constexpr
):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = entry < entries
    row = tl.load(rows + entry, mask=known, other=0)
    target = logits + row * vocabulary + tl.load(tokens + entry, mask=known, other=0)
    count = tl.load(counts + entry, mask=known, other=0.0)
    value = tl.load(target, mask=known, other=0.0)
    factor = tl.load(repetition + row)
    value = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
    constant = tl.where(count > 0, tl.load(presence + row), 0.0)
    tl.store(target, value - (constant + tl.load(frequency + row) * count), mask=known)


@triton.jit
def is_filtered(top_k, top_p, min_p, row):
    return (tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1) | (tl.load(min_p + row) > 0)


@triton.jit
def draw_from_all(logits, stride, temperature, top_k, top_p, min_p, keys, tokens, vocabulary, BLOCK: tl.constexpr):
    """Rows that are greedy or draw from their whole distribution, in one pass."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    if (heat == 0) | (is_filtered(top_k, top_p, min_p, row) == 0):
        first, second = key_words(keys, row)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        chosen = tl.arange(0, BLOCK)
        for start in range(0, vocabulary, BLOCK):
            place = start + tl.arange(0, BLOCK)
            scores = tl.load(logits + row * stride + place, mask=place < vocabulary, other=float("-inf"))
            if heat > 0:
                scores = tl.div_rn(scores, heat) + noise(first, second, place)
            better = scores > best
            best = tl.where(better, scores, best)
            chosen = tl.where(better, place, chosen)
        tl.store(tokens + row, best_of(best, chosen, vocabulary).to(tl.int64))


@triton.jit
def gather_candidates(
    logits, stride, temperature, top_k, top_p, min_p, best_out, mass_out, floor_out, count_out, values_out, ids_out,
    vocabulary, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of every filtered row: best scaled logit, sum of shares, and a beginning of its order that holds the survivors.

    The beginning is the first top_k and their like, or as many as have top_p of the probability, or those that pass
    min_p; in order of ids. `count_out` says how many these are, also where they are more than fit.
    """
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    if (heat > 0) & is_filtered(top_k, top_p, min_p, row):
        source = logits + row * stride
        largest = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, vocabulary, BLOCK):
            place = start + tl.arange(0, BLOCK)
            largest = tl.maximum(largest, tl.load(source + place, mask=place < vocabulary, other=float("-inf")))
        best = tl.div_rn(tl.max(largest, 0), heat)
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocabulary, BLOCK):
            place = start + tl.arange(0, BLOCK)
            numbers = tl.load(source + place, mask=place < vocabulary, other=float("-inf"))
            sums += share(numbers, best, heat)
        mass = tl.sum(sums, 0)
        wanted, goal, least = tl.load(top_k + row), tl.load(top_p + row) * mass, tl.load(min_p + row)
        by_share = (wanted == 0) & (tl.load(top_p + row) >= 1)
        low = floor_of(largest, best, heat, wanted, goal, by_share)
        targets = (values_out + row * MOST, ids_out + row * MOST)
        count = keep_above(source, low, least, by_share, best, heat, targets, vocabulary, MOST, BLOCK)
        tl.store(best_out + row, best)
        tl.store(floor_out + row, low)
        tl.store(mass_out + row, mass)
        tl.store(count_out + row, count)


@triton.jit
def floor_of(largest, best, heat, wanted, goal, by_share):
    """A threshold that the `wanted` best, or those with a mass of `goal`, pass by the largest numbers of all places."""
    low = tl.full([], LOWEST, tl.int64)
    if by_share == 0:
        high = tl.max(ordered(largest), 0).to(tl.int64)
        while low < high:
            thresholds = between(low, high, 4)
            kept = ordered(largest)[:, None] >= thresholds[None, :]
            if wanted > 0:
                held = tl.sum(kept.to(tl.int32), 0) >= wanted
            else:
                held = tl.sum(tl.where(kept, share(largest, best, heat)[:, None], 0.0), 0) >= goal
            low, high = narrowed(low, high, thresholds, held)
    return low


@triton.jit
def keep_above(
    source, low, least, by_share, best, heat, targets, vocabulary, MOST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Stores numbers above the threshold, or of the `least` share, and their ids, MOST at most; how many there are."""
    values_out, ids_out = targets
    count = 0
    for start in range(0, vocabulary, BLOCK):
        place = start + tl.arange(0, BLOCK)
        numbers = tl.load(source + place, mask=place < vocabulary, other=float("-inf"))
        kept = (place < vocabulary) & (ordered(numbers) >= low)
        if by_share:
            kept &= share(numbers, best, heat) >= least
        ones = kept.to(tl.int32)
        target = count + tl.cumsum(ones, 0) - 1
        stored = kept & (target < MOST)
        tl.store(values_out + target, numbers, mask=stored)
        tl.store(ids_out + target, place, mask=stored)
        count += tl.sum(ones, 0)
    return count


@triton.jit
def draw_from_candidates(
    logits, stride, temperature, top_k, top_p, min_p, keys, best_in, mass_in, floor_in, count_in, values_in, ids_in,
    tokens, vocabulary, MOST: tl.constexpr, WAYS: tl.constexpr, SEARCHED: tl.constexpr,
):  # fmt: skip
    """One draw of each filtered row from what is left of its candidates, or of the row where they did not fit."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    if (heat > 0) & is_filtered(top_k, top_p, min_p, row):
        best, whole = tl.load(best_in + row), tl.load(mass_in + row)
        size = tl.load(count_in + row)
        fits = size <= MOST
        values = values_in + row * MOST
        if fits == 0:
            values = logits + row * stride
            size = vocabulary
        wanted, part = tl.load(top_k + row), tl.load(top_p + row)
        low = tl.load(floor_in + row)
        ties = tl.full([], vocabulary, tl.int64)
        top = ordered(best * heat + tl.zeros([1], tl.float32))
        highest = tl.max(top, 0).to(tl.int64) + 2  # the product may be off by a step
        if (wanted > 0) & (wanted < vocabulary):
            low, ties, whole = cut_to_top_k(values, size, low, highest, wanted, best, heat, WAYS, SEARCHED)
        if part < 1:
            low, ties = cut_to_top_p(values, size, low, highest, ties, part * whole, best, heat, WAYS, SEARCHED)
        first, second = key_words(keys, row)
        kept = (values, size, low, ties, tl.load(min_p + row))
        drawn = draw_of_kept(kept, ids_in + row * MOST, fits, first, second, best, heat, vocabulary, SEARCHED)
        tl.store(tokens + row, drawn)


@triton.jit
def at_threshold(values, size, low, best, heat, SEARCHED: tl.constexpr):
    """How many numbers equal the threshold and how many lie beyond it; the mass beyond, and with the equal ones."""
    edge = tl.arange(0, 2)
    counts = counts_above(values, size, low + edge, 2, SEARCHED)
    masses = masses_above(values, size, low + edge, best, heat, 2, SEARCHED)
    tied, beyond = tl.sum(tl.where(edge == 0, counts, -counts), 0), tl.sum(counts * edge, 0)
    return tied, beyond, tl.sum(masses * edge, 0), tl.sum(tl.where(edge == 0, masses, 0.0), 0)


@triton.jit
def cut_to_top_k(values, size, low, highest, wanted, best, heat, WAYS: tl.constexpr, SEARCHED: tl.constexpr):
    """The threshold of the `wanted` best, how many that equal it are among them, and the mass of all of them."""
    high = highest
    if wanted == size:
        high = low
    while low < high:
        thresholds = between(low, high, WAYS)
        counts = counts_above(values, size, thresholds, WAYS, SEARCHED)
        low, high = narrowed(low, high, thresholds, counts >= wanted)
    tied, beyond, mass, with_ties = at_threshold(values, size, low, best, heat, SEARCHED)
    ties = wanted - beyond
    whole = mass + (with_ties - mass) * (ties.to(tl.float32) / tl.maximum(tied, 1).to(tl.float32))
    return low, ties, whole


@triton.jit
def cut_to_top_p(values, size, floor, highest, ties, goal, best, heat, WAYS: tl.constexpr, SEARCHED: tl.constexpr):
    """The threshold of the fewest best with a mass of `goal`, and how many that equal it are among them.

    `ties` of those that equal the `floor` are left to choose from.
    """
    low, high = floor, highest
    while low < high:
        thresholds = between(low, high, WAYS)
        masses = masses_above(values, size, thresholds, best, heat, WAYS, SEARCHED)
        low, high = narrowed(low, high, thresholds, masses >= goal)
    tied, _, mass, with_ties = at_threshold(values, size, low, best, heat, SEARCHED)
    each = (with_ties - mass) / tl.maximum(tied, 1).to(tl.float32)
    needed = tl.maximum(tl.ceil((goal - mass) / tl.maximum(each, 1e-38)).to(tl.int64), 1)
    return low, tl.where(low == floor, tl.minimum(needed, ties), needed)


@triton.jit
def draw_of_kept(kept, ids_in, fits, first, second, best, heat, vocabulary, SEARCHED: tl.constexpr):
    """The id with the largest noisy score among the numbers above the threshold, its first ties, and min_p's share."""
    values, size, low, ties, least = kept
    top_score = tl.full([SEARCHED], float("-inf"), tl.float32)
    chosen = tl.full([SEARCHED], vocabulary, tl.int32)
    seen = 0
    for start in range(0, size, SEARCHED):
        place = start + tl.arange(0, SEARCHED)
        known = place < size
        numbers = tl.load(values + place, mask=known, other=float("-inf"))
        order = ordered(numbers)
        tied = (known & (order == low)).to(tl.int32)
        above = (order > low) | ((tied > 0) & (seen + tl.cumsum(tied, 0) <= ties))
        seen += tl.sum(tied, 0)
        above &= known & (share(numbers, best, heat) >= least)
        ids = place
        if fits:
            ids = tl.load(ids_in + place, mask=known, other=0)
        scores = tl.div_rn(numbers, heat) + noise(first, second, ids)
        better = above & (scores > top_score)
        top_score = tl.where(better, scores, top_score)
        chosen = tl.where(better, ids, chosen)
    return best_of(top_score, chosen, vocabulary).to(tl.int64)


@triton.jit
def rank_candidates(
    logits, stride, best_in, mass_in, floor_in, count_in, values_in, ids_in, tokens, own, values_out, ids_out,
    top, vocabulary, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Log-softmax of the row's token and of its `top` best, one after the other, found in the order of logit and id."""
    row = tl.program_id(0).to(tl.int64)
    best, size = tl.load(best_in + row), tl.load(count_in + row)
    total = tl.log(tl.load(mass_in + row))
    fits = size <= MOST
    values = values_in + row * MOST
    if fits == 0:
        values = logits + row * stride
        size = vocabulary
    tl.store(own + row, tl.load(logits + row * stride + tl.load(tokens + row)) - best - total)
    last_order = tl.full([], 2**31, tl.int64)
    last_id = tl.full([], -1, tl.int64)
    for rank in range(top):
        largest = tl.full([BLOCK], -(2**32), tl.int64)
        chosen = tl.zeros([BLOCK], tl.int64) + vocabulary
        found = tl.zeros([BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            place = start + tl.arange(0, BLOCK)
            known = place < size
            numbers = tl.load(values + place, mask=known, other=float("-inf"))
            ids = place.to(tl.int64)
            if fits:
                ids = tl.load(ids_in + row * MOST + place, mask=known, other=0).to(tl.int64)
            order = ordered(numbers).to(tl.int64)
            later = known & ((order < last_order) | ((order == last_order) & (ids > last_id)))
            better = later & (order > largest)
            largest = tl.where(better, order, largest)
            chosen = tl.where(better, ids, chosen)
            found = tl.where(better, numbers, found)
        last_order = tl.max(largest, 0)
        last_id = tl.min(tl.where(largest == last_order, chosen, vocabulary), 0)
        value = tl.max(tl.where(chosen == last_id, found, float("-inf")), 0)
        tl.store(values_out + row * top + rank, value - best - total)
        tl.store(ids_out + row * top + rank, tl.minimum(last_id, vocabulary - 1))
