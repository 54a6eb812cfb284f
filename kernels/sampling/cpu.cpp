// Arg-max and Gumbel draws over the vocabulary, and the check for numbers; see the contract.
#include "../native/export.h"
#include "../native/parallel.h"
#include "../native/sideways.h"
#include "cpu.h"

namespace batchgen {

int64_t best_id(const float* row, int64_t vocabulary) {
    Best best[4];
    int64_t at = 0;
    for (; at + 4 * WIDTH <= vocabulary; at += 4 * WIDTH)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
            best[i].offer(load(row + at + i * WIDTH), from_zero() + int32_t(at + i * WIDTH));
    for (; at < vocabulary; at += WIDTH) best[0].offer(read(row, at, vocabulary), from_zero() + int32_t(at));
    for (int i = 1; i < 4; ++i)
        for (int lane = 0; lane < WIDTH; ++lane) {
            const bool tie = best[i].values[lane] == best[0].values[lane] && best[i].ids[lane] < best[0].ids[lane];
            if (!tie && !(best[i].values[lane] > best[0].values[lane])) continue;
            best[0].values[lane] = best[i].values[lane], best[0].ids[lane] = best[i].ids[lane];
        }
    const int64_t id = best[0].id();
    return id < vocabulary ? id : 0;
}

namespace {

// A draw from the whole distribution.
int64_t drawn_id(const float* row, int64_t vocabulary, float temperature, uint32_t first, uint32_t second) {
    Best best;
    float reached = -INFINITY;
    for (int64_t at = 0; at < vocabulary; at += WIDTH) {
        const Ints ids = from_zero() + int32_t(at);
        const Vec scaled = read(row, at, vocabulary) / splat(temperature);
        const Vec w = uniform(mix((mix((Words)ids) ^ first) + second));
        if (!any(w <= chance_of(scaled, reached))) continue;
        best.offer(scaled + gumbel(w), ids);
        reached = largest(best.values);
    }
    const int64_t id = best.id();
    return id < vocabulary ? id : 0;
}

// NaN fails every comparison, +inf is not below infinity, and a row of -inf has nothing above it.
bool is_finite(const float* row, int64_t vocabulary) {
    Ints bad{}, seen{};
    for (int64_t at = 0; at < vocabulary; at += WIDTH) {
        const Vec x = read(row, at, vocabulary);
        bad |= ~(x < splat(INFINITY));
        seen |= x > splat(-INFINITY);
    }
    return !any(bad) && any(seen);
}

}  // namespace
}  // namespace batchgen

constexpr int64_t LEAST = 65536;  // logits that are worth waking a thread

// Per-row values of a batch as Python lays them out; the fields stand in the same order in native.py.
struct Draws {
    const float* temperature;
    const int64_t* top_k;
    const float *top_p, *min_p;
    const int64_t* keys;  // two words for each row
    int64_t* tokens;

    void draw(const float* logits, int64_t vocabulary, int64_t row) const {
        const batchgen::Cut cut{top_k[row], top_p[row], min_p[row]};
        const uint32_t first = uint32_t(keys[2 * row]), second = uint32_t(keys[2 * row + 1]);
        tokens[row] = temperature[row] == 0 ? batchgen::best_id(logits, vocabulary)
                      : cut.any() ? batchgen::filtered_id(logits, vocabulary, temperature[row], cut, first, second)
                                  : batchgen::drawn_id(logits, vocabulary, temperature[row], first, second);
    }
};

BATCHGEN_EXPORT void batchgen_sample(const float* logits, int64_t stride, int64_t vocabulary, int64_t num_rows,
                                     const Draws* draws) {
    const auto body = [&](int64_t row) { draws->draw(logits + row * stride, vocabulary, row); };
    if (num_rows * vocabulary < LEAST)
        for (int64_t row = 0; row < num_rows; ++row) body(row);
    else
        batchgen::parallel(num_rows, body);
}

BATCHGEN_EXPORT void batchgen_finite(const float* logits, int64_t stride, int64_t vocabulary, int64_t num_rows,
                                     uint8_t* out) {
    batchgen::parallel_parts(num_rows, LEAST / vocabulary, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) out[row] = batchgen::is_finite(logits + row * stride, vocabulary);
    });
}
