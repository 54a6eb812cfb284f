// Products of 8-bit activations with 8-bit or 4-bit weights, summed in whole numbers over a segment of the inputs and
// in floats over the segments. Knows the panel layout of native.py; the arithmetic is that of the contract.
#include "../native/export.h"
#include "activations.h"
#include "codes.h"
#include "draws.h"

namespace batchgen {
namespace {

constexpr int UNROLLED_QUADS = 8;
constexpr int64_t BLOCK_TOKENS = 256;  // whose activations stay in the cache while the panels pass

struct ForPanels;

inline Values load_values(const float* p) {
    Values values;
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; ++part) values.part[part] = load(p + part * WIDTH);
    return values;
}

// Finite float16 as float: shifted into place, the exponent mended by one product, which also serves subnormals.
inline Vec widen_halves(const uint16_t* p) {
    Halves halves;
    std::memcpy(&halves, p, sizeof halves);
    const Words bits = __builtin_convertvector(halves, Words);
    const Vec size = (Vec)((bits & 0x7fff) << 13) * splat(5.192296858534828e33f);  // 2^112
    return (Vec)((Words)size | ((bits & 0x8000) << 16));
}

// --- a tile: some tokens times some panels ---------------------------------------------------------------------------

// What a task works on: panels whose codes are bytes and whose scales are floats.
struct Panels {
    const uint8_t* codes;
    const float *scale, *minimum;
    int64_t code_stride, scale_stride;  // from one panel to the next
    int64_t first;                      // output
};

template <int T, int P>
BATCHGEN_INLINE void add_quads(Sums (&sums)[T][P], const int8_t* x, int64_t x_stride, const uint8_t* codes,
                               int64_t stride, int64_t quads) {
    for (int64_t quad = 0; quad < quads; ++quad) {
        Codes panel[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) panel[p] = load_codes(codes + p * stride + quad * QUAD_BYTES);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
            const Four four = load_four(x + t * x_stride + quad * 4);
#pragma GCC unroll 8
            for (int p = 0; p < P; ++p) dot(sums[t][p], panel[p], four);
        }
    }
}

template <int T, int P>
BATCHGEN_INLINE void add_segment(Sums (&sums)[T][P], const int8_t* x, int64_t x_stride, const uint8_t* codes,
                                 int64_t stride, int64_t quads) {
    for (; quads >= UNROLLED_QUADS; quads -= UNROLLED_QUADS) {
        add_quads<T, P>(sums, x, x_stride, codes, stride, UNROLLED_QUADS);
        x += UNROLLED_QUADS * 4, codes += UNROLLED_QUADS * QUAD_BYTES;
    }
    add_quads<T, P>(sums, x, x_stride, codes, stride, quads);
}

// The same from nibbles; an odd last quad is met by codes of zero.
template <int T, int P>
BATCHGEN_INLINE void add_pairs(Sums (&sums)[T][P], const int8_t* x, int64_t x_stride, const uint8_t* codes,
                               int64_t stride, int64_t quads) {
    for (int64_t pair = 0; 2 * pair < quads; ++pair) {
        Codes low[P], high[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) load_pair(codes + p * stride + pair * QUAD_BYTES, low[p], high[p]);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
            const int8_t* eight = x + t * x_stride + pair * 8;
            const Four first = load_four(eight), second = load_four(eight + 4);
#pragma GCC unroll 8
            for (int p = 0; p < P; ++p) dot(sums[t][p], low[p], first);
#pragma GCC unroll 8
            for (int p = 0; p < P; ++p) dot(sums[t][p], high[p], second);
        }
    }
}

template <bool GROUPED, int T, int P>
BATCHGEN_INLINE void add_scaled(Values (&totals)[T][P], const Sums (&sums)[T][P], const Values (&scale)[P],
                                const float* factor, int64_t stride) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
            for (int part = 0; part < PARTS; ++part) {
                const Vec by = splat(factor[t * stride]);
                const Vec whole = __builtin_convertvector(sums[t][p].part[part], Vec);
                Vec& total = totals[t][p].part[part];
                total = fma(whole, GROUPED ? by * scale[p].part[part] : by, total);
            }
}

template <int T, int P>
BATCHGEN_INLINE void add_minimum(Values (&totals)[T][P], const Panels& panels, int64_t group, const float* sums,
                        int64_t stride) {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
        const Values minimum = load_values(panels.minimum + p * panels.scale_stride + group * OUTPUTS);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 8
            for (int part = 0; part < PARTS; ++part)
                totals[t][p].part[part] = fma(splat(sums[t * stride]), minimum.part[part], totals[t][p].part[part]);
    }
}

template <bool GROUPED, bool NIBBLES, int T, int P, class Out>
void tile(const Weight& weight, const Panels& panels, const Activations& x, const Call& call, int64_t token,
          Ahead& ahead) {
    const int64_t segments = weight.segments(), per_group = weight.segments_per_group();
    const int64_t segment_quads = (weight.segment + 3) / 4, quads = weight.quads();
    const int8_t* codes = x.codes + token * x.code_stride;
    const float *factor = x.scale + token * segments, *group_sums = x.sums + token * weight.groups;
    const int32_t* offsets = x.offsets + token * segments;
    Results<Out>::template ask<T, P>(call, token, panels.first);
    Values totals[T][P] = {};
    for (int64_t group = 0; group < weight.groups; ++group) {
        Values scale[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p)
            scale[p] = load_values(panels.scale + p * panels.scale_stride + group * OUTPUTS);
        const int64_t end = std::min((group + 1) * per_group, segments);
        for (int64_t segment = group * per_group; segment < end; ++segment) {
            Sums sums[T][P] = {};
            if (weight.zero)
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t)
#pragma GCC unroll 8
                    for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
                        for (int part = 0; part < PARTS; ++part)
                            sums[t][p].part[part] = Ints{} + offsets[t * segments + segment];
            const int64_t quad = segment * segment_quads;
            const int64_t count = std::min(segment_quads, quads - quad);
            const uint8_t* from = panels.codes + (NIBBLES ? quad / 2 : quad) * QUAD_BYTES;
            if constexpr (NIBBLES)
                add_pairs<T, P>(sums, codes + quad * 4, x.code_stride, from, panels.code_stride, count);
            else
                add_segment<T, P>(sums, codes + quad * 4, x.code_stride, from, panels.code_stride, count);
            add_scaled<GROUPED, T, P>(totals, sums, scale, factor + segment, segments);
            ahead.fetch();
        }
        if constexpr (!GROUPED)
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t)
#pragma GCC unroll 8
                for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
                    for (int part = 0; part < PARTS; ++part) totals[t][p].part[part] *= scale[p].part[part];
        if (panels.minimum) add_minimum<T, P>(totals, panels, group, group_sums + group, weight.groups);
    }
    finish<Out>(totals, panels.first, call, token);
}

// --- a task: a block of tokens times some panels ---------------------------------------------------------------------

// Scales or minima of `count` panels from `panel` on as floats, where they lie or in `space`.
const float* as_floats(const Weight& weight, const void* values, int64_t panel, int64_t count, float* space) {
    const int64_t length = weight.groups * OUTPUTS;
    if (!values) return nullptr;
    if (!weight.halves) return static_cast<const float*>(values) + panel * length;
    const uint16_t* from = static_cast<const uint16_t*>(values) + panel * length;
    for (int64_t index = 0; index < count * length; index += WIDTH) store(space + index, widen_halves(from + index));
    return space;
}

const uint8_t* as_bytes(const Weight& weight, int64_t panel, int64_t count, uint8_t* space) {
    const uint8_t* codes = weight.codes + panel * weight.panel_bytes();
    if (weight.bits == 8) return codes;
    for (int64_t pair = 0; pair < count * weight.pairs(); ++pair)
        unpack(codes + pair * QUAD_BYTES, space + pair * 2 * QUAD_BYTES);
    return space;
}

// Asks for the scales of the next panels at once, and returns where their codes are.
Ahead next_codes(const Weight& weight, const Task& task) {
    for (const void* values : {weight.scale, weight.minimum}) {
        const int64_t bytes = values ? weight.scale_bytes() : 0;
        Ahead(static_cast<const uint8_t*>(values) + task.next * bytes, task.num_next * bytes, 1).fetch();
    }
    const int64_t bytes = weight.panel_bytes(), times = num_tiles(task.end - task.token) * weight.segments();
    return {weight.codes + task.next * bytes, task.num_next * bytes, times};
}

template <bool NIBBLES, int P, class Out>
void all_tiles(const Weight& weight, const Panels& panels, const Activations& x, const Call& call,
               const Task& task, Ahead ahead) {
    each_tile(task.token, task.end, [&](auto tokens, int64_t first) {
        constexpr int T = decltype(tokens)::value;
        if (weight.groups == 1)
            tile<false, NIBBLES, T, P, Out>(weight, panels, x, call, first, ahead);
        else
            tile<true, NIBBLES, T, P, Out>(weight, panels, x, call, first, ahead);
    });
}

template <int P, class Out>
void work(const Weight& weight, const Activations& x, const Call& call, const Task& task) {
    const int64_t panel = task.panel, segment_quads = (weight.segment + 3) / 4;
    // codes that serve one tile only are unpacked on the way
    const bool nibbles = weight.bits == 4 && task.end - task.token <= TILE_TOKENS && segment_quads % 2 == 0;
    const int64_t byte_count = weight.bits == 8 || nibbles ? 0 : P * weight.pairs() * 2 * QUAD_BYTES;
    const int64_t float_count = P * weight.groups * OUTPUTS;
    char* space = room<ForPanels>(byte_count + 2 * float_count * int64_t(sizeof(float)));
    float* floats = reinterpret_cast<float*>(space + byte_count);
    const Ahead ahead = next_codes(weight, task);
    Panels panels;
    panels.scale = as_floats(weight, weight.scale, panel, P, floats);
    panels.minimum = as_floats(weight, weight.minimum, panel, P, floats + float_count);
    panels.scale_stride = weight.groups * OUTPUTS;
    panels.first = panel * OUTPUTS;
    if (nibbles) {
        panels.codes = weight.codes + panel * weight.panel_bytes();
        panels.code_stride = weight.panel_bytes();
        return all_tiles<true, P, Out>(weight, panels, x, call, task, ahead);
    }
    panels.codes = as_bytes(weight, panel, P, reinterpret_cast<uint8_t*>(space));
    panels.code_stride = (weight.bits == 8 ? weight.quads() : 2 * weight.pairs()) * QUAD_BYTES;
    all_tiles<false, P, Out>(weight, panels, x, call, task, ahead);
}

template <class Out>
void multiply(const Call& call) {
    const Weight& weight = *static_cast<const Weight*>(call.weight);
    const Activations x = make_activations(weight, call.tokens);
    const auto round = call.x_bfloat16 ? quantise<bfloat16> : quantise<float>;
    const auto prepare = [&](int64_t token, int64_t end) { round(weight, call, x, token, end); };
    each_task({call.outputs, weight.inputs}, call.tokens, BLOCK_TOKENS, prepare, [&](auto panels, const Task& task) {
        work<decltype(panels)::value, Out>(weight, x, call, task);
    });
}

// --- rows of a weight ------------------------------------------------------------------------------------------------

struct ForScales;

// The numbers of an output, turned back where the weight is turned.
void expand_row(const Weight& weight, int64_t row, float* numbers) {
    const int64_t panel = row / OUTPUTS, lane = row % OUTPUTS, floats = weight.groups * OUTPUTS;
    float* space = reinterpret_cast<float*>(room<ForScales>(2 * floats * int64_t(sizeof(float))));
    const float* scale = as_floats(weight, weight.scale, panel, 1, space);
    const float* minimum = as_floats(weight, weight.minimum, panel, 1, space + floats);
    const uint8_t* codes = weight.codes + panel * weight.panel_bytes() + lane * 4;
    for (int64_t i = 0; i < weight.inputs; ++i) {
        const int64_t quad = i / 4, group = i / weight.group * OUTPUTS + lane;
        const int64_t code = weight.bits == 8 ? codes[quad * QUAD_BYTES + i % 4]
                                              : codes[quad / 2 * QUAD_BYTES + i % 4] >> (quad % 2 * 4) & 15;
        numbers[i] = scale[group] * float(code - weight.zero) + (minimum ? minimum[group] : 0.0f);
    }
    if (weight.turned)
        for (int64_t at = 0; at < weight.inputs; at += TURNED) turn(numbers + at, TURNED);
    if (weight.balance)
        for (int64_t at = 0; at < weight.inputs; at += WIDTH)
            store(numbers + at, load(numbers + at) * load(weight.balance + at));
}

}  // namespace
}  // namespace batchgen

BATCHGEN_EXPORT void batchgen_panels(const batchgen::Call* call) {
    batchgen::keep_numbers(*call, [&](auto number) { batchgen::multiply<decltype(number)>(*call); });
}

BATCHGEN_EXPORT void batchgen_panels_draw(const batchgen::DrawCall* call) {
    batchgen::draw_each(*call, batchgen::multiply<batchgen::Draw>);
}

BATCHGEN_EXPORT void batchgen_panel_rows(const batchgen::RowsCall* call) {
    using namespace batchgen;
    const Weight& weight = *static_cast<const Weight*>(call->weight);
    each_row(*call, weight.inputs, [&](int64_t row, float* numbers) { expand_row(weight, row, numbers); });
}
