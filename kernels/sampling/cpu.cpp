// Arg-max and Gumbel draws over the vocabulary, and the check for numbers; see the contract.
#include "../native/export.h"
#include "../native/parallel.h"
#include "../native/simd.h"

namespace batchgen {
namespace {

inline Words mix(Words x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

// Natural logarithm of positive normal numbers, to two units in the last place.
inline Vec log(Vec x) {
    const Ints bits = (Ints)x - 0x3f3504f3;  // the mantissa of the root of one half: m in 0.71 .. 1.41
    const Vec power = __builtin_convertvector(bits >> 23, Vec);
    const Vec f = (Vec)((bits & 0x7fffff) + 0x3f3504f3) - splat(1.0f);
    const Vec square = f * f;
    Vec p = fma(splat(7.0376836292e-2f), f, splat(-1.1514610310e-1f));
    p = fma(p, f, splat(1.1676998740e-1f));
    p = fma(p, f, splat(-1.2420140846e-1f));
    p = fma(p, f, splat(1.4249322787e-1f));
    p = fma(p, f, splat(-1.6668057665e-1f));
    p = fma(p, f, splat(2.0000714765e-1f));
    p = fma(p, f, splat(-2.4999993993e-1f));
    p = fma(p, f, splat(3.3333331174e-1f));
    p = fma(p * f, square, power * splat(-2.12194440e-4f));
    p = fma(square, splat(-0.5f), p);
    return fma(power, splat(0.693359375f), f + p);
}

inline Vec uniform(Words bits) {
    const Ints low = (Ints)(bits & 0x7fffffffu);
    const Vec w = (__builtin_convertvector(low, Vec) + splat(0.5f)) * splat(0x1p-31f);
    const Vec most = splat(1.0f - 0x1p-24f);
    return w < most ? w : most;
}

// -log(-log(1 - w)); what rounding takes from 1 - w is given back, or small w would lose their digits.
inline Vec gumbel(Vec w) {
    const Vec rest = splat(1.0f) - w;
    const Vec lost = (splat(1.0f) - rest) - w;
    return -log(-(log(rest) + lost / rest));
}

inline bool any(Ints mask) {
    Ints zero{};
    return std::memcmp(&mask, &zero, sizeof mask) != 0;
}

inline Ints from_zero() {
    Ints lanes;
    for (int lane = 0; lane < WIDTH; ++lane) lanes[lane] = lane;
    return lanes;
}

// The best of what was offered; lowest id among equals, as ids come in ascending order.
struct Best {
    Vec values = splat(-INFINITY);
    Ints ids = from_zero();

    void offer(Vec x, Ints id) {
        const Ints better = x > values;
        values = better ? x : values;
        ids = better ? id : ids;
    }

    int32_t id() const {
        int32_t best = 0;
        float value = -INFINITY;
        for (int lane = 0; lane < WIDTH; ++lane) {
            if (values[lane] < value || (values[lane] == value && ids[lane] > best)) continue;
            value = values[lane], best = ids[lane];
        }
        return best;
    }
};

inline Vec read(const float* row, int64_t at, int64_t vocabulary) {
    if (at + WIDTH <= vocabulary) return load(row + at);
    const Vec part = load_part(row + at, int(vocabulary - at));
    return from_zero() < int32_t(vocabulary - at) ? part : splat(-INFINITY);
}

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

// A draw from the whole distribution. Noise is at most -log w, so an id whose w is above e^(logit - best) can't win, and
// its logarithms are not taken.
int64_t drawn_id(const float* row, int64_t vocabulary, float temperature, uint32_t first, uint32_t second) {
    Best best;
    float reached = -INFINITY;
    for (int64_t at = 0; at < vocabulary; at += WIDTH) {
        const Ints ids = from_zero() + int32_t(at);
        const Vec scaled = read(row, at, vocabulary) / splat(temperature);
        const Vec w = uniform(mix((mix((Words)ids) ^ first) + second));
        const Vec behind = scaled - splat(reached);
        const Vec chance = exp2<4>((behind < Vec{} ? behind : Vec{}) * splat(LOG2_E)) * splat(1.001f);
        if (!any(w <= chance)) continue;
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

// tokens[i] for the rows named; temperature 0 takes the best. keys [R, 2].
BATCHGEN_EXPORT void batchgen_sample(const float* logits, int64_t stride, int64_t vocabulary, const int64_t* rows,
                                     int64_t num_rows, const float* temperature, const int64_t* keys, int64_t* tokens) {
    batchgen::parallel_parts(num_rows, LEAST / vocabulary, [&](int64_t begin, int64_t end) {
        for (int64_t index = begin; index < end; ++index) {
            const int64_t row = rows[index];
            const float* mine = logits + row * stride;
            const uint32_t first = uint32_t(keys[2 * row]), second = uint32_t(keys[2 * row + 1]);
            tokens[row] = temperature[row] == 0
                              ? batchgen::best_id(mine, vocabulary)
                              : batchgen::drawn_id(mine, vocabulary, temperature[row], first, second);
        }
    });
}

BATCHGEN_EXPORT void batchgen_finite(const float* logits, int64_t stride, int64_t vocabulary, int64_t num_rows,
                                     uint8_t* out) {
    batchgen::parallel_parts(num_rows, LEAST / vocabulary, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) out[row] = batchgen::is_finite(logits + row * stride, vocabulary);
    });
}
