// Which products a task of the narrow path takes, by the formats of its keys and values, its lanes and its width.
#pragma once

#include "cpu_narrow.h"
#include "cpu_narrow_codes.h"
#include "cpu_narrow_plain.h"

namespace batchgen {
namespace {

// Puts the rows at `slots` side by side, as products take them.
using Bring = void(const Stored&, const int64_t* slots, int width, void* out);

// As numbers of type O; scales of whole rows are multiplied later.
template <class Format, int FIXED, class O>
void convert(const Stored& stored, const int64_t* slots, int given, void* out) {
    const int width = FIXED ? FIXED : given;
    const float one = 1;
    for (int key = 0; key < STRIP; ++key) {
        const float* scales = stored.num_scales > 1 ? stored.scales + slots[key] * stored.num_scales : &one;
        Format::row(stored.codes + slots[key] * stored.row_bytes, scales, width, static_cast<O*>(out) + key * width);
    }
}

// As they are.
template <int FIXED_BYTES>
void copy(const Stored& stored, const int64_t* slots, int, void* out) {
    const int64_t bytes = FIXED_BYTES ? FIXED_BYTES : stored.row_bytes;
    for (int key = 0; key < STRIP; ++key)
        std::memcpy(static_cast<char*>(out) + key * bytes, stored.codes + slots[key] * bytes, bytes);
}

// How a task takes its keys, or its values.
struct Way {
    Bring* bring;
    bool in_place;  // rows that lie side by side are taken where they are
    int bytes;      // of a number as products take it
};

template <int FIXED, class O>
Way plain_way(int64_t format) {
    constexpr int bytes = sizeof(O);
    if (format == plain_format(static_cast<O*>(nullptr))) return {copy<FIXED * bytes>, true, bytes};
#if defined(__AVX512BF16__)
    if constexpr (FIXED && bytes == 2)
        if (format == KV_FP8) return {convert<Float8Pairs, FIXED, O>, false, bytes};
#endif
    switch (format) {
        case KV_FLOAT32: return {convert<ReadPlain<float>, FIXED, O>, false, bytes};
        case KV_BFLOAT16: return {convert<ReadPlain<bfloat16>, FIXED, O>, false, bytes};
        case KV_FP8: return {convert<ReadScaled<ReadFloat8>, FIXED, O>, false, bytes};
        case KV_INT8: return {convert<ReadScaled<ReadInt8>, FIXED, O>, false, bytes};
        default: return {convert<ReadInt4, FIXED, O>, false, bytes};
    }
}

using Score = void(Scratch&, int lane, const Rows& keys, int strip, int width);
using Gather = void(Scratch&, int lane, const Rows* values, int strips, int width);

// Lanes of a head that pass its keys together.
struct Part {
    Score* score;
    Gather* gather;
};

template <class Q>
struct Ways {
    Way keys, values;
    void (*keep_query)(Scratch&, int lane, const Q* row, int width);
    void (*arrange)(float* sums, int width);  // puts the sums of values in the order of the numbers
    Part whole, rest;
};

template <class Plain, int N, int FIXED, class Q>
Part choose_part(const Call& call) {
    Part part{Plain::template score<N, FIXED>, Plain::template gather<N, FIXED>};
#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
    if constexpr (sizeof(Q) == 2) {
        if (Codes::take(call.keys.format, call.head_dim)) part.score = score_quads<Codes, N, FIXED>;
        else if (PairQuads::take(call.head_dim)) part.score = score_quads<PairQuads, N, FIXED>;
        if (Codes::take(call.values.format, call.head_dim)) part.gather = gather_pairs<Codes, N, FIXED>;
    }
#endif
    return part;
}

template <class Plain, int FIXED, class Q>
Part choose_lanes(const Call& call, int lanes) {
    static_assert(PART_LANES == 4);
    switch (lanes) {
        case 1: return choose_part<Plain, 1, FIXED, Q>(call);
        case 2: return choose_part<Plain, 2, FIXED, Q>(call);
        case 3: return choose_part<Plain, 3, FIXED, Q>(call);
        default: return choose_part<Plain, 4, FIXED, Q>(call);
    }
}

template <class Plain, int FIXED, class Q>
Ways<Q> choose_ways(const Call& call, int whole, int rest) {
    using Operand = typename Plain::Operand;
    Ways<Q> ways{plain_way<FIXED, Operand>(call.keys.format), plain_way<FIXED, Operand>(call.values.format),
                 Plain::keep_query, Plain::arrange, choose_lanes<Plain, FIXED, Q>(call, whole),
                 choose_lanes<Plain, FIXED, Q>(call, rest)};
#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
    if constexpr (sizeof(Q) == 2) {
        const Way codes{copy<FIXED>, true, 1};
        if (Codes::take(call.keys.format, call.head_dim)) ways.keys = codes, ways.keep_query = Codes::keep_query;
        else if (PairQuads::take(call.head_dim)) ways.keep_query = PairQuads::keep_query;
        if (Codes::take(call.values.format, call.head_dim)) ways.values = codes;
    }
#endif
    return ways;
}

// For parts of `whole` lanes and one of `rest`, if any.
template <class Plain, class Q>
Ways<Q> choose(const Call& call, int whole, int rest) {
    switch (call.head_dim) {
        case 64: return choose_ways<Plain, 64, Q>(call, whole, rest);
        case 128: return choose_ways<Plain, 128, Q>(call, whole, rest);
        default: return choose_ways<Plain, 0, Q>(call, whole, rest);
    }
}

}  // namespace
}  // namespace batchgen
