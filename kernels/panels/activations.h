// Activations as 8-bit codes with a scale for each token and segment. Knows the rounding of the contract, not what the
// codes are multiplied by.
#pragma once

#include <limits>

#include "../native/hadamard.h"
#include "weight.h"

namespace batchgen {
namespace {

constexpr float SMALLEST = 7.8886090522101181e-31f;  // 2^-100; segments that stay below are zero
constexpr int32_t SIZE_BITS = 0x7fffffff, INFINITE = 0x7f800000;
constexpr int TURNED = 64;                 // numbers of a Hadamard matrix
constexpr int64_t TURNED_AT_ONCE = 6144;  // numbers that stay near the core until they are rounded

struct ForTurned;

// Where the codes and numbers of segments go that lie one behind the other.
struct Rounded {
    int8_t* codes;
    float* scale;
    int32_t* offsets;
    float* values;  // or null
};

template <class T>
inline Vec load_some(const T* p, int64_t count) {
    return count >= WIDTH ? load(p) : load_part(p, int(count));
}

// Scales, and the factors that make codes, of segments whose largest numbers have these bits, a lane for each.
inline Vec scales_of(Ints bits, Vec& factor) {
    const Vec largest = (Vec)bits;
    const Ints finite = bits < INFINITE, usable = finite & (Ints)(largest >= splat(SMALLEST));
    factor = usable ? splat(127.0f) / largest : Vec{};
    return usable ? largest / splat(127.0f) : (finite ? Vec{} : splat(std::numeric_limits<float>::quiet_NaN()));
}

// Up to WIDTH segments of `vectors` times WIDTH numbers each, one behind the other.
template <bool FULL, class T>
BATCHGEN_INLINE void round_segments(const T* x, int count, int vectors, int32_t zero, const Rounded& to) {
    const int size = vectors * WIDTH;
    Ints rows[WIDTH] = {};
#pragma GCC unroll 16
    for (int i = 0; i < (FULL ? WIDTH : count); ++i)
        for (int v = 0; v < vectors; ++v) {
            const Ints bits = (Ints)load(x + i * size + v * WIDTH) & SIZE_BITS;
            rows[i] = bits > rows[i] ? bits : rows[i];
        }
    Vec factor;
    const Vec scale = scales_of(largest_each(rows), factor);
    float factors[WIDTH];
    store(factors, factor);
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; ++i) {
        rows[i] = Ints{};
        if (!FULL && i >= count) continue;
        for (int v = 0; v < vectors; ++v) {
            const Ints codes = whole(load(x + i * size + v * WIDTH) * splat(factors[i]));
            store_bytes(reinterpret_cast<uint8_t*>(to.codes) + i * size + v * WIDTH, codes);
            rows[i] += codes;
        }
    }
    const Ints sums = total_each(rows), offsets = sums * -zero;
    const Vec values = scale * to_floats(sums);
    std::memcpy(to.scale, &scale, count * sizeof(float));
    std::memcpy(to.offsets, &offsets, count * sizeof(int32_t));
    if (to.values) std::memcpy(to.values, &values, count * sizeof(float));
}

template <class T>
void round_segments(const T* x, int64_t segments, int64_t size, int32_t zero, Rounded to) {
    const int vectors = int(size / WIDTH);
    for (int64_t at = 0; at < segments; at += WIDTH) {
        const int count = int(std::min<int64_t>(segments - at, WIDTH));
        if (count == WIDTH)
            round_segments<true>(x + at * size, WIDTH, vectors, zero, to);
        else
            round_segments<false>(x + at * size, count, vectors, zero, to);
        to.codes += count * size, to.scale += count, to.offsets += count;
        if (to.values) to.values += count;
    }
}

// One segment of `count` numbers, with codes of zero behind them up to `space`.
template <class T>
void round_segment(const T* x, int64_t count, int64_t space, int32_t zero, const Rounded& to) {
    Ints most{};
    for (int64_t i = 0; i < count; i += WIDTH) {
        const Ints bits = (Ints)load_some(x + i, count - i) & SIZE_BITS;
        most = bits > most ? bits : most;
    }
    int32_t bits = 0, sum = 0;
    for (int lane = 0; lane < WIDTH; ++lane) bits = std::max(bits, most[lane]);
    Vec factor;
    const Vec scale = scales_of(Ints{} + bits, factor);
    for (int64_t i = 0; i < space; i += WIDTH) {
        const Ints codes = i < count ? whole(load_some(x + i, count - i) * factor) : Ints{};
        for (int64_t lane = 0; lane < WIDTH && i + lane < space; ++lane) {
            to.codes[i + lane] = int8_t(codes[lane]);
            sum += codes[lane];
        }
    }
    to.scale[0] = scale[0];
    to.offsets[0] = -zero * sum;
    if (to.values) to.values[0] = scale[0] * float(sum);
}

template <class T>
void round_row(const Weight& weight, const T* x, const Rounded& to) {
    const int64_t padded = weight.quads() * 4;
    for (int64_t index = 0, first = 0; first < weight.inputs; ++index, first += weight.segment) {
        const int64_t count = std::min(weight.segment, weight.inputs - first);
        const int64_t space = std::min((weight.segment + 3) / 4 * 4, padded - first);
        const Rounded one{to.codes + first, to.scale + index, to.offsets + index,
                          to.values ? to.values + index : nullptr};
        round_segment(x + first, count, space, int32_t(weight.zero), one);
    }
}

// The sums of the groups of a token, from those of its segments.
inline void add_groups(const Weight& weight, const float* values, float* sums) {
    const int64_t segments = weight.segments(), per_group = weight.segments_per_group();
    for (int64_t group = 0; group < weight.groups; ++group) {
        const int64_t end = std::min((group + 1) * per_group, segments);
        sums[group] = 0;
        for (int64_t segment = group * per_group; segment < end; ++segment) sums[group] += values[segment];
    }
}

// The rows token .. end of activations; x is the first of them.
template <class T>
void round_rows(const Weight& weight, const T* x, int64_t stride, const Activations& to, int64_t token, int64_t end) {
    const int64_t segments = weight.segments(), size = weight.segment;
    const bool regular = size % WIDTH == 0 && weight.inputs % size == 0;
    const bool together = regular && stride == weight.inputs;  // rows one behind the other are one long row
    for (int64_t step = together ? end - token : 1; token < end; token += step, x += stride) {
        const int64_t first = token * segments;
        const Rounded out{to.codes + token * to.code_stride, to.scale + first, to.offsets + first,
                          to.values ? to.values + first : nullptr};
        if (regular)
            round_segments(x, step * segments, size, int32_t(weight.zero), out);
        else
            round_row(weight, x, out);
        if (!to.values || weight.one_to_one()) continue;
        for (int64_t row = token; row < token + step; ++row)
            add_groups(weight, to.values + row * segments, to.sums + row * weight.groups);
    }
}

template <class T>
void quantise(const Weight& weight, const Call& call, const Activations& to, int64_t token, int64_t end) {
    const T* x = static_cast<const T*>(call.x) + token * call.x_stride;
    if (!weight.turned) return round_rows(weight, x, call.x_stride, to, token, end);
    const int64_t inputs = weight.inputs, most = std::max<int64_t>(1, TURNED_AT_ONCE / inputs);
    float* turned = reinterpret_cast<float*>(room<ForTurned>(most * inputs * int64_t(sizeof(float))));
    while (token < end) {
        const int64_t first = token, stop = std::min(token + most, end);
        for (float* out = turned; token < stop; ++token, x += call.x_stride, out += inputs)
            for (int64_t at = 0; at < inputs; at += TURNED)
                turn_block<TURNED>(x + at, weight.balance ? weight.balance + at : nullptr, out + at);
        round_rows<float>(weight, turned, inputs, to, first, stop);
    }
}

}  // namespace
}  // namespace batchgen
