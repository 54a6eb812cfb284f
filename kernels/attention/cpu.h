// What attention's C++ files share: the call, number kinds, and where results go. Shape letters as in the contract.
#pragma once

#include <cmath>
#include <cstdint>

#include "../kv_format/cpu.h"
#include "../native/exponential.h"

namespace batchgen {

constexpr int LANES = 64;        // (query, head) pairs worked on at once by the wide path
constexpr int MAX_LANES = 256;   // of a task
constexpr int WIDE_KEYS = 96;    // keys of a tile of the wide path
constexpr int NARROW_LANES = 16; // tasks of so few lanes a head take the narrow path
constexpr int PART_LANES = 4;    // of a head that pass a key together there
constexpr int UNIT_LANES = 16;   // of all heads of such a task
constexpr float NO_SCORE = -1e30f;  // largest score before any was seen: finite, so that differences are numbers

struct Task {
    int64_t first_query, num_queries;  // in the list of queries
    int64_t first_block, num_keys;     // in the list of blocks
    int64_t start;                     // position of the first key
    int64_t first_partial;             // row of the partial results of its first query
    int64_t first_head, num_heads;     // key/value heads; one on the wide path
};

struct Plan {
    const Task* tasks;
    const int64_t *queries, *positions, *blocks;
    const int64_t* direct;                                         // [T] 1: the query has one partial, it is the result
    const int64_t *merged_queries, *merge_offsets, *merge_partials;  // CSR: partials of the queries with several
    int64_t num_tasks, num_merged, num_partials, block_size;
};

// The keys or the values of a layer: rows of codes and of scales.
struct Stored {
    const char* codes;
    const float* scales;
    int64_t format, row_bytes, num_scales;
};

struct Call {
    int64_t tokens;
    const Plan* plan;
    const void* query;
    void* out;
    Stored keys, values;
    int64_t query_stride, query_head_stride;  // elements
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t head_step, block_step;  // rows from head to head and from block to block
    int64_t query_bfloat16, turned;  // turned: keys are, so the query has to be
    int64_t window;  // keys seen, 0: all
    double scale, softcap;  // softcap 0: none
    const float* sinks;     // [Q] logits that join the sum, or null
};

// The scores of a layer: cap * tanh(product * scale / cap), then exp2((score - largest) * exponent).
struct Scoring {
    float exponent, cap, before_cap;

    explicit Scoring(const Call& call)
        : exponent(float((call.softcap ? 1.0 : call.scale) * 1.4426950408889634)),
          cap(float(call.softcap)),
          before_cap(call.softcap ? float(call.scale / call.softcap) : 0.0f) {}

    // Products are ranked as they are: nothing caps or hides them.
    bool ranks(bool masked) const { return !masked && !cap; }
};

// Partial results of all tasks: normalised outputs, the largest score (in powers of two) and the sum they were
// divided by.
template <class Q>
struct Partials {
    Q* outputs;              // [partial, Q, D]
    float *largest, *total;  // [partial, Q]
};

// Where the lanes of a task live: every query with each member of the group of heads that share the key/value head.
template <class Q>
struct Target {
    const Plan& plan;
    const Call& call;
    const Task& task;
    Partials<Q> partials;
    int kv_head, group;

    int64_t row(int query) const { return plan.queries[task.first_query + query]; }
    int64_t head(int member) const { return int64_t(kv_head) * group + member; }

    const Q* query_row(int query, int member) const {
        return static_cast<const Q*>(call.query) + row(query) * call.query_stride + head(member) * call.query_head_stride;
    }

    // The row for a normalised output; `partial` is the partial result it is, or -1.
    Q* output_row(int query, int member, int64_t& partial) const {
        partial = -1;
        const int64_t result = row(query);
        if (plan.direct[result])
            return static_cast<Q*>(call.out) + (result * call.num_heads + head(member)) * call.head_dim;
        partial = (task.first_partial + query) * call.num_heads + head(member);
        return partials.outputs + partial * call.head_dim;
    }

    // What the sink of a head adds to a whole sum of exponentials, `largest` the power of two these were divided by.
    float sink(int member, int64_t partial, float largest) const {
        return call.sinks && partial < 0 ? std::exp2(call.sinks[head(member)] * LOG2_E - largest) : 0.0f;
    }

    void remember(int64_t partial, float largest, float total) const {
        if (partial < 0) return;
        partials.largest[partial] = largest;
        partials.total[partial] = total;
    }

    // The visible keys of a query, from low up to high, counted from the task's first.
    void visible(int query, int32_t& low, int32_t& high) const {
        const int64_t position = plan.positions[row(query)] - task.start;
        high = int32_t(clamp(position + 1, task.num_keys));
        low = call.window ? int32_t(clamp(position + 1 - call.window, high)) : 0;
    }

    static int64_t clamp(int64_t x, int64_t most) { return x < 0 ? 0 : (x < most ? x : most); }
};

// The rows of keys first .. first + count of a task in what is stored.
inline void locate(const Plan& plan, const Call& call, const Task& task, int kv_head, int64_t first, int64_t count,
                   int64_t* slots) {
    const int64_t head = kv_head * call.head_step;
    const int64_t* block = plan.blocks + task.first_block + first / plan.block_size;
    int64_t offset = first % plan.block_size;
    for (int64_t* end = slots + count; slots < end; offset = 0, ++block) {
        const int64_t slot = head + *block * call.block_step + offset;
        const int64_t run = plan.block_size - offset < end - slots ? plan.block_size - offset : end - slots;
        for (int64_t key = 0; key < run; ++key) *slots++ = slot + key;
    }
}

constexpr KVFormat plain_format(const float*) { return KV_FLOAT32; }
constexpr KVFormat plain_format(const bfloat16*) { return KV_BFLOAT16; }

// Rows made numbers of type O in `room`, `stride` apart.
template <class Format, class O>
void unpack(const Stored& stored, const int64_t* slots, int count, int width, O* room, int stride) {
    for (int key = 0; key < count; ++key) {
        const char* codes = stored.codes + slots[key] * stored.row_bytes;
        Format::row(codes, stored.scales + slots[key] * stored.num_scales, width, room + key * stride);
    }
}

// The rows at `slots` as numbers of type O: where they lie, if that is what the pages hold, else made in `room`.
template <class O>
void read_rows(const Stored& stored, const int64_t* slots, int count, int width, O* room, int stride, const O** rows) {
    if (stored.format == plain_format(room)) {
        const O* all = reinterpret_cast<const O*>(stored.codes);
        for (int key = 0; key < count; ++key) rows[key] = all + slots[key] * width;
        return;
    }
    for (int key = 0; key < count; ++key) rows[key] = room + key * stride;
    switch (stored.format) {
        case KV_FLOAT32: return unpack<ReadPlain<float>>(stored, slots, count, width, room, stride);
        case KV_BFLOAT16: return unpack<ReadPlain<bfloat16>>(stored, slots, count, width, room, stride);
        case KV_FP8: return unpack<ReadScaled<ReadFloat8>>(stored, slots, count, width, room, stride);
        case KV_INT8: return unpack<ReadScaled<ReadInt8>>(stored, slots, count, width, room, stride);
        default: return unpack<ReadInt4>(stored, slots, count, width, room, stride);
    }
}

template <class Q>
void attend_wide(const Target<Q>& target);
// `after`, if any, is what the thread does next: its first keys are fetched meanwhile.
template <class Q>
void attend_narrow(const Target<Q>& target, const Target<Q>* after);

}  // namespace batchgen
