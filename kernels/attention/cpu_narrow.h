// One step of the narrow path: TILE keys of one head and the N lanes that read them. What the kinds of numbers share.
#pragma once

#include "cpu.h"

namespace batchgen {
namespace {

constexpr int TILE = 16;  // keys of a step
constexpr int PADDED = MAX_HEAD_DIM + 2 * WIDTH;

// The lanes of a task, those of a head side by side.
struct alignas(64) Scratch {
    float query[UNIT_LANES][PADDED];   // as the kind of the keys takes it
    float output[UNIT_LANES][PADDED];  // in the order in which the kind of the values adds
    float scores[UNIT_LANES][TILE];
    float chances[UNIT_LANES][TILE];
    float total[UNIT_LANES][WIDTH];  // to be added up
    float largest[UNIT_LANES], shift[UNIT_LANES], correction[UNIT_LANES];
    float step[UNIT_LANES];      // queries as whole numbers are multiples of
    int32_t offset[UNIT_LANES];  // their products with codes that were raised above zero are too large by
    int32_t low[UNIT_LANES], high[UNIT_LANES];
    float rows[TILE * MAX_HEAD_DIM];  // those of a head that do not lie side by side, or are converted
    float scales[TILE];
};

// The keys, or the values, of a head in a tile, side by side, and those to fetch meanwhile.
struct Strip {
    const char *rows, *ahead;
    const float* scales;  // [TILE] what the numbers of a row are multiplied by, or null

    const char* row(int key, int64_t bytes) const { return rows + key * bytes; }
    void fetch(int key, int64_t bytes) const { prefetch(ahead + key * bytes, bytes); }
    Vec scale(int key) const { return scales ? load(scales + key) : splat(1.0f); }
};

}  // namespace
}  // namespace batchgen
