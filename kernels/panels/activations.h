// Activations as 8-bit codes with a scale for each token and segment. Knows the rounding of the contract, not what the
// codes are multiplied by.
#pragma once

#include <limits>

#include "../native/hadamard.h"
#include "../native/sideways.h"
#include "weight.h"

namespace batchgen {
namespace {

constexpr float SMALLEST = 7.8886090522101181e-31f;  // 2^-100; segments that stay below are zero
constexpr int32_t SIZE_BITS = 0x7fffffff, INFINITE = 0x7f800000;
constexpr int TURNED = 64;              // numbers of a Hadamard matrix
constexpr float TURNED_NORM = 0.125f;  // 1 / sqrt(TURNED)

struct ForTurned;

// Where the codes and numbers of segments go that lie one behind the other.
struct Rounded {
    int8_t* codes;
    float* scale;
    int32_t* offsets;
    float* values;  // or null
};

inline Rounded rounded_from(const Activations& to, int64_t code, int64_t segment) {
    return {to.codes + code, to.scale + segment, to.offsets + segment, to.values ? to.values + segment : nullptr};
}

template <class T>
inline Vec load_some(const T* p, int64_t count) {
    return count >= WIDTH ? load(p) : load_part(p, int(count));
}

// Scales of segments whose largest numbers have these bits, a lane for each, and the factors that make codes of them.
// The numbers are too large by 1 / norm.
inline Vec scales_of(Ints bits, float norm, Vec& factor) {
    const Vec largest = (Vec)bits * splat(norm);
    const Ints finite = bits < INFINITE, usable = finite & (Ints)(largest >= splat(SMALLEST));
    factor = usable ? splat(127.0f) / largest * splat(norm) : Vec{};
    return usable ? largest / splat(127.0f) : (finite ? Vec{} : splat(std::numeric_limits<float>::quiet_NaN()));
}

inline Ints larger_bits(Ints bits, Vec x) {
    const Ints size = (Ints)x & SIZE_BITS;
    return size > bits ? size : bits;
}

// Codes of numbers side by side, and their sums.
template <class T>
BATCHGEN_INLINE Ints round_numbers(const T* x, int vectors, Vec factor, int8_t* codes) {
    uint8_t* to = reinterpret_cast<uint8_t*>(codes);
    Ints sums{};
    for (; vectors >= 4; vectors -= 4, x += 4 * WIDTH, to += 4 * WIDTH) {
        Ints four[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums += four[i] = whole(load(x + i * WIDTH) * factor);
        store_bytes(to, four);
    }
    for (; vectors > 0; --vectors, x += WIDTH, to += WIDTH) {
        const Ints one = whole(load(x) * factor);
        store_bytes(to, one);
        sums += one;
    }
    return sums;
}

// Up to WIDTH segments of `vectors` times WIDTH numbers each, one behind the other. The largest of rows[i] is the size
// of the largest number of segment i, as bits.
template <bool FULL, class T>
BATCHGEN_INLINE void round_segments(const T* x, Ints (&rows)[WIDTH], int count, int vectors, float norm, int32_t zero,
                                    Rounded& to) {
    Vec factor;
    const Vec scale = scales_of(largest_each(rows), norm, factor);
    float factors[WIDTH];
    store(factors, factor);
    const int size = vectors * WIDTH;
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; ++i)
        rows[i] = FULL || i < count ? round_numbers(x + i * size, vectors, splat(factors[i]), to.codes + i * size) : Ints{};
    const Ints sums = total_each(rows), offsets = sums * -zero;
    const Vec values = scale * to_floats(sums);
    std::memcpy(to.scale, &scale, count * sizeof(float));
    std::memcpy(to.offsets, &offsets, count * sizeof(int32_t));
    if (to.values) std::memcpy(to.values, &values, count * sizeof(float));
    to.codes += count * size, to.scale += count, to.offsets += count;
    if (to.values) to.values += count;
}

template <bool FULL, class T>
BATCHGEN_INLINE void round_segments(const T* x, int count, int vectors, int32_t zero, Rounded& to) {
    Ints rows[WIDTH] = {};
#pragma GCC unroll 16
    for (int i = 0; i < (FULL ? WIDTH : count); ++i)
        for (int v = 0; v < vectors; ++v) rows[i] = larger_bits(rows[i], load(x + (i * vectors + v) * WIDTH));
    round_segments<FULL>(x, rows, count, vectors, 1.0f, zero, to);
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
    const Vec scale = scales_of(Ints{} + bits, 1.0f, factor);
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

// The sums of the groups of tokens, from those of their segments.
inline void add_groups(const Weight& weight, const Activations& to, int64_t token, int64_t end) {
    if (!to.values || weight.one_to_one()) return;
    const int64_t segments = weight.segments(), per_group = weight.segments_per_group();
    for (; token < end; ++token)
        for (int64_t group = 0; group < weight.groups; ++group) {
            const float* values = to.values + token * segments;
            float& sum = to.sums[token * weight.groups + group] = 0;
            const int64_t stop = std::min((group + 1) * per_group, segments);
            for (int64_t segment = group * per_group; segment < stop; ++segment) sum += values[segment];
        }
}

// The rows token .. end of activations; x is the first of them.
template <class T>
void round_rows(const Weight& weight, const T* x, int64_t stride, const Activations& to, int64_t token, int64_t end) {
    const int64_t segments = weight.segments(), size = weight.segment;
    const bool regular = size % WIDTH == 0 && weight.inputs % size == 0;
    const bool together = regular && stride == weight.inputs;  // rows one behind the other are one long row
    for (int64_t step = together ? end - token : 1; token < end; token += step, x += stride) {
        const Rounded out = rounded_from(to, token * to.code_stride, token * segments);
        if (regular)
            round_segments(x, step * segments, size, int32_t(weight.zero), out);
        else
            round_row(weight, x, out);
    }
}

// Turns a segment, and returns the sizes of its numbers that are largest.
template <class T>
BATCHGEN_INLINE Ints turn_segment(const T* x, const float* balance, int64_t size, float* turned) {
    Ints most{};
    for (int64_t at = 0; at < size; at += TURNED) {
        Vec block[TURNED / WIDTH];
        turn_block<TURNED>(x + at, balance ? balance + at : nullptr, block);
#pragma GCC unroll 16
        for (int i = 0; i < TURNED / WIDTH; ++i) {
            most = larger_bits(most, block[i]);
            store(turned + at + i * WIDTH, block[i]);
        }
    }
    return most;
}

// The same for a weight that is turned; segments stay near the core until they are rounded.
template <class T>
void round_turned(const Weight& weight, const T* x, int64_t stride, const Activations& to, int64_t token, int64_t end) {
    const int64_t size = weight.segment, segment = token * weight.segments();
    float* turned = reinterpret_cast<float*>(room<ForTurned>(WIDTH * size * int64_t(sizeof(float))));
    Rounded out = rounded_from(to, token * to.code_stride, segment);
    int64_t first = 0;  // input of the segment that is next
    for (int64_t left = end * weight.segments() - segment; left > 0; left -= WIDTH) {
        const int count = int(std::min<int64_t>(left, WIDTH));
        Ints rows[WIDTH] = {};
        for (int i = 0; i < count; ++i) {
            rows[i] = turn_segment(x + first, weight.balance ? weight.balance + first : nullptr, size, turned + i * size);
            first += size;
            if (first == weight.inputs) first = 0, x += stride;
        }
        round_segments<false>(turned, rows, count, int(size / WIDTH), TURNED_NORM, int32_t(weight.zero), out);
    }
}

template <class T>
void quantise(const Weight& weight, const Call& call, const Activations& to, int64_t token, int64_t end) {
    const T* x = static_cast<const T*>(call.x) + token * call.x_stride;
    const auto round = weight.turned ? round_turned<T> : round_rows<T>;
    round(weight, x, call.x_stride, to, token, end);
    add_groups(weight, to, token, end);
}

}  // namespace
}  // namespace batchgen
