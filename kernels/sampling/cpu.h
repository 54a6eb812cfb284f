// What draws share: the noise of vocabulary entries, reading a row, the best of what was offered; see the contract.
#pragma once

#include "../native/exponential.h"
#include "../native/simd.h"

namespace batchgen {

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

// What w must not exceed to win against `reached`: noise is at most -log w, so an id whose w is above e^(x - reached) can't,
// and its logarithms need not be taken. Far from 0 a sum is rounded by more than noise differs: it may yet reach as much.
inline Vec chance_of(Vec x, float reached) {
    const Vec behind = x - splat(reached - std::fabs(reached) * 0x1p-22f);
    return exp2<4>((behind < Vec{} ? behind : Vec{}) * splat(LOG2_E)) * splat(1.001f);
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

// The row's best id. A row without numbers gives some id.
int64_t best_id(const float* row, int64_t vocabulary);

// How a row's distribution is cut; neutral values cut nothing.
struct Cut {
    int64_t top_k;
    float top_p, min_p;

    bool any() const { return top_k > 0 || top_p < 1 || min_p > 0; }
};

// A draw from what the cut leaves of a row.
int64_t filtered_id(const float* row, int64_t vocabulary, float temperature, const Cut& cut, uint32_t first,
                    uint32_t second);

}  // namespace batchgen
