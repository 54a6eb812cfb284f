// Draws from what top-k, top-p and min-p leave of a row; see the contract. No row is sorted: a lower bound of what may
// survive picks candidates, and the last survivor is found among them by ever finer histograms of value.
#include <algorithm>
#include <cfloat>
#include <limits>

#include "../native/scratch.h"
#include "../native/sideways.h"
#include "cpu.h"

namespace batchgen {
namespace {

constexpr int BINS = 256;
constexpr int64_t FEW = 64;                // candidates that are sorted rather than counted
constexpr int64_t GROUP = 64;              // numbers whose largest stands for them
constexpr float NEAR = 5, WIDEST = 100;    // below the best, in logits: what is tried first, what counts as far
constexpr float ROUNDING = 1e-2f;          // by which bounds are lowered

// Some ids of a row, ascending, with logit / temperature and e^(that - the best). Room for WIDTH more.
struct Candidates {
    float *values, *masses;
    int32_t* ids;
    int64_t count = 0;

    void put(int64_t to, const Candidates& from, int64_t at) {
        values[to] = from.values[at], masses[to] = from.masses[at], ids[to] = from.ids[at];
    }
};

// The last of the ids that stay, in the order best first, lowest id first among equals.
struct Last {
    float value;
    int32_t id;

    bool covers(float other, int32_t other_id) const { return other > value || (other == value && other_id <= id); }
};

struct Row {
    const float* logits;
    int64_t vocabulary;
    float temperature;

    Vec read(int64_t at) const { return batchgen::read(logits, at, vocabulary) / splat(temperature); }
};

struct ForCandidates;
struct ForBin;

template <class Purpose>
Candidates candidates(int64_t most) {
    float* space = reinterpret_cast<float*>(room<Purpose>(3 * (most + WIDTH) * sizeof(float)));
    return {space, space + (most + WIDTH), reinterpret_cast<int32_t*>(space + 2 * (most + WIDTH))};
}

// The largest numbers of groups of GROUP; any k of them are k numbers of the row. Returns how many there are.
int64_t group_maxima(const Row& row, float* maxima) {
    int64_t count = 0;
    for (int64_t start = 0; start < row.vocabulary; start += GROUP * WIDTH) {
        Vec most = splat(-INFINITY);
        const int64_t end = std::min(start + GROUP * WIDTH, row.vocabulary);
        for (int64_t at = start; at < end; at += WIDTH) most = larger(row.read(at), most);
        store(maxima + count, most);
        count += WIDTH;
    }
    return count;
}

double total_mass(const Row& row, float best) {
    double total = 0;
    for (int64_t start = 0; start < row.vocabulary; start += GROUP * WIDTH) {
        Vec part{};
        const int64_t end = std::min(start + GROUP * WIDTH, row.vocabulary);
        for (int64_t at = start; at < end; at += WIDTH) part += exp(row.read(at) - splat(best));
        total += double(sum(part));
    }
    return total;
}

void put_where(Ints mask, Vec x, Ints id, Candidates& to) {
#if defined(__AVX512F__)
    const __mmask16 chosen = _mm512_movepi32_mask((__m512i)mask);
    _mm512_storeu_ps(to.values + to.count, _mm512_maskz_compress_ps(chosen, x));
    _mm512_storeu_si512(to.ids + to.count, _mm512_maskz_compress_epi32(chosen, (__m512i)id));
    to.count += __builtin_popcount(chosen);
#else
    for (int lane = 0; lane < WIDTH; ++lane) {
        to.values[to.count] = x[lane], to.ids[to.count] = id[lane];
        to.count -= mask[lane];
    }
#endif
}

// All ids that are at least `least`; returns their mass.
double collect(const Row& row, float best, float least, Candidates& to) {
    to.count = 0;
    for (int64_t at = 0; at < row.vocabulary; at += WIDTH) {
        const Vec x = row.read(at);
        const Ints id = from_zero() + int32_t(at);
        const Ints mask = (x >= splat(least)) & (id < int32_t(row.vocabulary));
        if (any(mask)) put_where(mask, x, id, to);
    }
    store(to.values + to.count, splat(-INFINITY));
    double mass = 0;
    for (int64_t at = 0; at < to.count; at += WIDTH) store(to.masses + at, exp(load(to.values + at) - splat(best)));
    for (int64_t at = 0; at < to.count; ++at) mass += to.masses[at];
    return mass;
}

// What lies in front of the candidates looked at.
struct Before {
    int64_t count = 0;
    double mass = 0;
};

// Keeps those candidates of `all` in `bin` whose numbers fall into the bin that holds the last with fewer than `most`
// and less than `limit` in front; false when it holds none because all stay.
bool narrow(const Candidates& all, float high, float low, int64_t most, double limit, Before& before, Candidates& bin) {
    const float range = std::min(high - low, WIDEST);
    const auto bin_of = [&](float value) { return int(std::min((high - value) / range, 1.0f) * (BINS - 1)); };
    int64_t counts[BINS] = {};
    double masses[BINS] = {};
    for (int64_t at = 0; at < all.count; ++at) {
        const int index = bin_of(all.values[at]);
        ++counts[index], masses[index] += all.masses[at];
    }
    int found = 0;
    for (; found < BINS; ++found) {
        if (before.count + counts[found] > most || before.mass + masses[found] >= limit) break;
        before.count += counts[found], before.mass += masses[found];
    }
    if (found == BINS) return false;
    int64_t kept = 0;
    for (int64_t at = 0, end = all.count; at < end; ++at)
        if (bin_of(all.values[at]) == found) bin.put(kept++, all, at);
    bin.count = kept;
    return true;
}

void sort(Candidates& few) {
    int32_t order[FEW];
    Candidates copy = few;
    float values[FEW], masses[FEW];
    int32_t ids[FEW];
    copy.values = values, copy.masses = masses, copy.ids = ids;
    for (int32_t at = 0; at < few.count; ++at) copy.put(at, few, at), order[at] = at;
    std::sort(order, order + few.count, [&](int32_t a, int32_t b) {
        return values[a] > values[b] || (values[a] == values[b] && ids[a] < ids[b]);
    });
    for (int32_t at = 0; at < few.count; ++at) few.put(at, copy, order[at]);
}

// The last candidate that has fewer than `most` and less than `limit` of mass in front of it.
Last last_of(const Candidates& all, int64_t most, double limit) {
    Before before;
    Candidates left = all, bin = candidates<ForBin>(all.count);
    float low = *std::min_element(all.values, all.values + all.count);
    float high = *std::max_element(all.values, all.values + all.count);
    while (left.count > FEW && high > low) {
        if (!narrow(left, high, low, most, limit, before, bin)) return {-INFINITY, std::numeric_limits<int32_t>::max()};
        left = bin;
        low = *std::min_element(left.values, left.values + left.count);
        high = *std::max_element(left.values, left.values + left.count);
    }
    if (high > low) {
        for (int64_t at = 0; at < left.count; ++at) bin.put(at, left, at);
        bin.count = left.count;
        sort(left = bin);
    }
    Last last{high, -1};
    for (int64_t at = 0; at < left.count && before.count < most && before.mass < limit; ++at) {
        last = {left.values[at], left.ids[at]};
        ++before.count, before.mass += left.masses[at];
    }
    return last;
}

// Drops what lies behind the last; returns the mass of the rest.
double keep(Candidates& all, const Last& last) {
    int64_t kept = 0;
    double mass = 0;
    for (int64_t at = 0; at < all.count; ++at) {
        if (!last.covers(all.values[at], all.ids[at])) continue;
        mass += all.masses[at];
        all.put(kept++, all, at);
    }
    all.count = kept;
    store(all.values + kept, splat(-INFINITY));
    return mass;
}

int64_t drawn_among(const Candidates& all, float best_value, float min_p, uint32_t first, uint32_t second) {
    Best best;
    float reached = -INFINITY;
    for (int64_t at = 0; at < all.count; at += WIDTH) {
        Ints ids;
        std::memcpy(&ids, all.ids + at, sizeof ids);
        const Vec x = load(all.values + at);
        const Ints stays = (load(all.masses + at) >= splat(min_p)) | (x == splat(best_value));
        const Vec w = uniform(mix((mix((Words)ids) ^ first) + second));
        if (!any((w <= chance_of(x, reached)) & stays)) continue;
        best.offer(stays ? x + gumbel(w) : splat(-INFINITY), ids);
        reached = largest(best.values);
    }
    return best.id();
}

// A number that all survivors reach, as far as top-k and min-p tell.
float bound(const Row& row, const Cut& cut, float* maxima, int64_t groups, float best) {
    float least = -INFINITY;
    if (cut.top_k > 0 && cut.top_k <= groups) {
        std::nth_element(maxima, maxima + cut.top_k - 1, maxima + groups, std::greater<float>());
        least = maxima[cut.top_k - 1];
    }
    const bool whole_matters = cut.top_k > 0 && cut.top_p < 1;
    if (cut.min_p > 0 && !whole_matters) least = std::max(least, best + std::log(cut.min_p) - ROUNDING);
    return std::min(least, best);
}

// Candidates that hold at least top_p of the row's mass, or all above `least` when these hold less; returns the mass
// that top-p leaves. What lies more than `far` below the best weighs less than 1 - top_p even if every id does.
double collect_top_p(const Row& row, float top_p, float best, float least, Candidates& to) {
    const double total = total_mass(row, best), limit = top_p * total;
    const float near = std::max(least, best - NEAR);
    if (collect(row, best, near, to) < limit && near > least) {
        const float far = float(std::log(double(row.vocabulary) / ((1.0 - top_p) * total))) + ROUNDING;
        collect(row, best, std::max(least, best - far), to);
    }
    return limit;
}

}  // namespace

int64_t filtered_id(const float* logits, int64_t vocabulary, float temperature, const Cut& cut, uint32_t first,
                    uint32_t second) {
    const Row row{logits, vocabulary, temperature};
    Candidates all = candidates<ForCandidates>(vocabulary);
    const int64_t groups = group_maxima(row, all.values);
    const float best = *std::max_element(all.values, all.values + groups);
    if (!(std::fabs(best) < INFINITY)) return best_id(logits, vocabulary);
    const float least = bound(row, cut, all.values, groups, best);
    if (cut.top_k > 0) {
        collect(row, best, least, all);
        const double whole = keep(all, last_of(all, cut.min_p > 1 ? 1 : cut.top_k, INFINITY));
        if (cut.top_p < 1) keep(all, last_of(all, cut.top_k, std::max(DBL_MIN, cut.top_p * whole)));
    } else if (cut.top_p < 1) {
        const double limit = collect_top_p(row, cut.top_p, best, least, all);
        keep(all, last_of(all, vocabulary, std::max(DBL_MIN, limit)));
    } else {
        collect(row, best, least, all);
    }
    return drawn_among(all, best, cut.min_p, first, second);
}

}  // namespace batchgen
