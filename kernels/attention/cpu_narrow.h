// One step of the narrow path: a tile of keys of one head and the N lanes that read them. What the kinds of numbers share.
#pragma once

#include "cpu.h"

namespace batchgen {
namespace {

constexpr int STRIP = 16;  // keys that are scored together
constexpr int STRIPS = 2;  // of a tile at most
constexpr int TILE = STRIP * STRIPS;  // keys under one largest score
constexpr int PADDED = MAX_HEAD_DIM + 2 * WIDTH;
constexpr int QUERY = 2 * MAX_HEAD_DIM + 128;  // numbers of 16 bits, each four times; and lanes in other sets of the cache

// The lanes of a task, those of a head side by side.
struct alignas(64) Scratch {
    float query[UNIT_LANES][QUERY];    // as the kind of the keys takes it
    float output[UNIT_LANES][PADDED];  // in the order in which the kind of the values adds
    float scores[UNIT_LANES][TILE];
    float chances[UNIT_LANES][TILE];
    float total[UNIT_LANES][WIDTH];  // to be added up
    float largest[UNIT_LANES], shift[UNIT_LANES], correction[UNIT_LANES];
    float step[UNIT_LANES];      // queries as whole numbers are multiples of
    int32_t offset[UNIT_LANES];  // their products with codes that were raised above zero are too large by
    int32_t low[UNIT_LANES], high[UNIT_LANES];
    float rows[TILE * MAX_HEAD_DIM];  // those of a head that do not lie side by side, or are converted
    float scales[STRIPS][STRIP];
};

// Memory that is read soon. Always in place: the compiler takes a function that only fetches for one without effects, and
// drops its calls.
BATCHGEN_INLINE void prefetch(const void* from, int64_t bytes) {
#pragma GCC unroll 8
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(from) + at, 0, 3);
}

// The rows of a strip that are fetched while another is worked on, one by one: many at once hold up what follows.
struct Ahead {
    const char* rows = nullptr;
    int64_t row_bytes = 0;
    int count = 0;

    BATCHGEN_INLINE void fetch(int key) const {
        if (key >= count) return;
        const char* row = rows + key * row_bytes;
        if (row_bytes <= 64) __builtin_prefetch(row, 0, 3);
        else prefetch(row, row_bytes);
    }
};

// The keys, or the values, of a head in a strip, side by side.
struct Rows {
    const char* rows;
    const float* scales;  // [STRIP] what the numbers of a row are multiplied by, or null
    Ahead ahead;

    const char* row(int key, int64_t bytes) const { return rows + key * bytes; }
    Vec scale(int key) const { return scales ? load(scales + key) : splat(1.0f); }
};

}  // namespace
}  // namespace batchgen
