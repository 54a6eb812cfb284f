// Queries, keys and values of the wide path as products of plain numbers take them: float32, or pairs of bfloat16.
#pragma once

#include <type_traits>

#include "../native/scratch.h"
#include "cpu_wide.h"

namespace batchgen {
namespace {

template <class T>
inline void copy_row(const T* from, int width, T* to) {
    constexpr int STEP = CACHE_LINE / int(sizeof(T));
    int at = 0;
    for (; at + STEP <= width; at += STEP) std::memcpy(to + at, from + at, CACHE_LINE);
    if (at < width) std::memcpy(to + at, from + at, (width - at) * sizeof(T));
}

// A row of numbers as elements of the kind; an odd last bfloat16 is paired with zero.
template <class Kind, class T>
void pack_row(const T* row, int width, float* out) {
    using Operand = typename Kind::Operand;
    Operand* to = reinterpret_cast<Operand*>(out);
    if constexpr (std::is_same_v<Operand, T>) copy_row(row, width, to);
    else ReadPlain<T>::row(reinterpret_cast<const char*>(row), nullptr, width, to);
    if (Kind::PACK == 2 && width % 2) std::memset(to + width, 0, sizeof(Operand));
}

// Two rows side by side as pairs; the second may be absent.
inline void pack_pair(const bfloat16* first, const bfloat16* second, int width, float* out) {
    const auto pairs = [&](Vec a, Vec b) { return (Vec)((Words)b | ((Words)a >> 16)); };
    int at = 0;
    for (; at + WIDTH <= width; at += WIDTH)
        store(out + at, pairs(load(first + at), second ? load(second + at) : Vec{}));
    const int rest = width - at;
    if (rest) store(out + at, pairs(load_part(first + at, rest), second ? load_part(second + at, rest) : Vec{}));
}

// The rows at `slots` as numbers that the kind multiplies.
template <class Kind>
void find_rows(const Stored& stored, const int64_t* slots, int count, int width, Scratch& s,
               const typename Kind::Operand** rows) {
    read_rows(stored, slots, count, width, reinterpret_cast<typename Kind::Operand*>(s.room), width, rows);
}

// Scores of keys that are, or become, plain numbers.
template <class Kind>
struct Numbers {
    using Product = Kind;
    using Operand = typename Kind::Operand;

    // The elements of some queries: where they lie, if they are whole vectors as they lie, else in rows of their own.
    template <class Q>
    static void bring_queries(int first, int count, int width, Scratch& s, const void** rows) {
        const bool direct = std::is_same_v<Operand, Q> && width % (WIDTH * Kind::PACK) == 0;
        store(s.unit + first, splat(1.0f));
        for (int lane = 0; lane < count; ++lane) {
            rows[lane] = direct ? s.query_row[first + lane] : s.rows[lane];
            if (!direct) pack_row<Kind>(static_cast<const Q*>(s.query_row[first + lane]), width, s.rows[lane]);
        }
    }

    static void pack_keys(const Stored& keys, const int64_t* slots, int count, int width, Scratch& s) {
        const Operand* rows[WIDE_KEYS];
        find_rows<Kind>(keys, slots, count, width, s, rows);
        for (int key = 0; key < count; ++key) pack_row<Kind>(rows[key], width, s.keys + key * KEY_STRIDE<Kind>);
    }

    struct Ends : Ranked {
        Vec start(const float*, int) const { return Vec{}; }
        Vec result(Vec sum, int) const { return sum; }
    };

    static Ends ends(const Scratch&, int, float* top) { return {{top}}; }
};

template <class Kind>
void pack_values(const Stored& values, const int64_t* slots, int count, int width, Scratch& s) {
    const typename Kind::Operand* rows[WIDE_KEYS];
    find_rows<Kind>(values, slots, count, width, s, rows);
    if constexpr (Kind::PACK == 1) {
        for (int key = 0; key < count; ++key) pack_row<Kind>(rows[key], width, s.values + key * VALUE_STRIDE);
    } else {
        for (int key = 0; key < count; key += 2)
            pack_pair(rows[key], key + 1 < count ? rows[key + 1] : nullptr, width, s.values + key / 2 * VALUE_STRIDE);
    }
}

}  // namespace
}  // namespace batchgen
