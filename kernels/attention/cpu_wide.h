// Where the wide path keeps the lanes of a task and the packed tile of keys that they pass.
#pragma once

#include "cpu.h"
#include "cpu_product.h"

namespace batchgen {
namespace {

constexpr int VALUE_STRIDE = MAX_HEAD_DIM + 16;  // 33 cache lines: rows fall into different sets
template <class Kind>
constexpr int KEY_STRIDE = MAX_HEAD_DIM / Kind::PACK + 16;
template <class Kind>
constexpr int elements(int numbers) {
    return (numbers + Kind::PACK - 1) / Kind::PACK;
}

struct alignas(64) Scratch {
    float query[MAX_LANES / LANES][MAX_HEAD_DIM][LANES];
    float output[MAX_LANES / LANES][MAX_HEAD_DIM][LANES];
    float rows[WIDTH][MAX_HEAD_DIM];
    float keys[WIDE_KEYS * KEY_STRIDE<Single>];
    float values[WIDE_KEYS * VALUE_STRIDE];
    float room[WIDE_KEYS * MAX_HEAD_DIM];
    float scores[WIDE_KEYS][LANES];
    float chances[WIDE_KEYS][LANES];
    float largest[MAX_LANES], total[MAX_LANES], top[LANES], correction[LANES];
    float unit[MAX_LANES];     // what scores are multiples of
    int32_t start[MAX_LANES];  // where sums of whole numbers start
    float scales[WIDE_KEYS];   // of keys that are whole numbers
    int32_t low[MAX_LANES], high[MAX_LANES];  // the visible keys
    const void* query_row[MAX_LANES];
    void* output_row[MAX_LANES];
    int64_t partial[MAX_LANES];  // whose weight is to be remembered, or -1
};

// A tile of keys as the scores see it.
struct Tile {
    int first, count;
    bool masked;
};

}  // namespace
}  // namespace batchgen
