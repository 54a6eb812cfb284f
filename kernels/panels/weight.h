// A weight in panels and the activations it meets, as they lie in memory. Knows layouts, no arithmetic.
#pragma once

#include <cstdint>

#include "../native/scratch.h"
#include "frame.h"

namespace batchgen {
namespace {

// As Python lays it out; the fields stand in the same order in native.py.
struct Weight {
    const uint8_t* codes;
    const void* scale;    // [panels, groups, 16]
    const void* minimum;  // alike, or null
    const float* balance;  // [inputs], or null: what inputs are multiplied by before they are turned
    int64_t inputs, groups, group, segment;  // group and segment: inputs, multiples of 4 unless there is one
    int64_t bits, halves, zero;                       // halves: scale and minimum are float16; value: code - zero
    int64_t turned;                                   // inputs are a multiple of TURNED

    int64_t quads() const { return (inputs + 3) / 4; }
    int64_t segments() const { return (inputs + segment - 1) / segment; }
    int64_t segments_per_group() const { return groups == 1 ? segments() : group / segment; }
    bool one_to_one() const { return groups == segments(); }  // segments are groups
    int64_t pairs() const { return (quads() + 1) / 2; }
    int64_t panel_bytes() const { return (bits == 8 ? quads() : pairs()) * 4 * OUTPUTS; }
    int64_t scale_bytes() const { return groups * OUTPUTS * (halves ? 2 : 4); }  // of a panel
};

// Quantised activations: value = code * scale, the scale one per token and segment.
struct Activations {
    int8_t* codes;     // [tokens, code_stride]
    float* scale;      // [tokens, segments]
    int32_t* offsets;  // [tokens, segments]: -zero times the sum of the codes
    float* values;     // [tokens, segments]: sums of values, or null where the weight has no minimum
    float* sums;       // [tokens, groups]: the same by group
    int64_t code_stride;
};

struct ForActivations;

inline Activations make_activations(const Weight& weight, int64_t tokens) {
    const int64_t segments = tokens * weight.segments(), stride = weight.quads() * 4;
    const int64_t values = weight.minimum ? segments : 0;
    const int64_t sums = weight.one_to_one() ? 0 : tokens * weight.groups;
    // an odd quad is read with its neighbour
    char* space = room<ForActivations>((2 * segments + values + sums) * 4 + tokens * stride + 4);
    Activations x;
    x.scale = reinterpret_cast<float*>(space);
    x.offsets = reinterpret_cast<int32_t*>(x.scale + segments);
    x.values = weight.minimum ? x.scale + 2 * segments : nullptr;
    x.sums = x.scale + 2 * segments + (weight.one_to_one() ? 0 : values);
    x.codes = reinterpret_cast<int8_t*>(x.scale + 2 * segments + values + sums);
    x.code_stride = stride;
    return x;
}

}  // namespace
}  // namespace batchgen
