// Products of 8-bit activations with 8-bit or 4-bit weights, summed in whole numbers over a segment of the inputs and in
// floats over the segments. Knows the panel layout of native.py; the arithmetic is that of the contract in __init__.py.
#include <algorithm>

#include "../native/export.h"
#include "../native/parallel.h"
#include "../native/scratch.h"
#include "../native/simd.h"

namespace batchgen {
namespace {

constexpr int OUTPUTS = 16;  // of a panel
constexpr int PARTS = OUTPUTS / WIDTH;
constexpr int QUAD_BYTES = 4 * OUTPUTS;  // four inputs of a panel, one byte each
constexpr int SEGMENT_QUADS = 8;         // of the usual segment: 32 inputs
constexpr int64_t BLOCK_TOKENS = 256;    // whose activations stay in the cache while the panels pass
constexpr int64_t LEAST_PARALLEL = 1 << 18;  // products below which waking the threads costs more than it gains
constexpr float SMALLEST = 7.8886090522101181e-31f;  // 2^-100; segments that stay below are zero
constexpr int32_t SIZE_BITS = 0x7fffffff, INFINITE = 0x7f800000;

#if defined(__AVX512VNNI__)
constexpr int TILE_TOKENS = 6, TILE_PANELS = 2;
#elif defined(__AVX2__)
constexpr int TILE_TOKENS = 3, TILE_PANELS = 1;
#else
constexpr int TILE_TOKENS = 1, TILE_PANELS = 1;
#endif

// A weight and a batch as Python lays them out; the fields stand in the same order in native.py.
struct Weight {
    const uint8_t* codes;
    const void* scale;    // [panels, groups, 16]
    const void* minimum;  // alike, or null
    int64_t outputs, inputs, groups, group, segment;  // group and segment: inputs, multiples of 4 unless there is one
    int64_t bits, halves, zero;                       // halves: scale and minimum are float16; value: code - zero

    int64_t quads() const { return (inputs + 3) / 4; }
    int64_t segments() const { return (inputs + segment - 1) / segment; }
    int64_t segments_per_group() const { return groups == 1 ? segments() : group / segment; }
    int64_t panels() const { return (outputs + OUTPUTS - 1) / OUTPUTS; }
    int64_t pairs() const { return (quads() + 1) / 2; }
    int64_t panel_bytes() const { return (bits == 8 ? quads() : pairs()) * QUAD_BYTES; }
};

struct Call {
    const void* x;
    const float* bias;  // or null
    void* out;
    int64_t tokens, x_stride, out_stride, x_bfloat16, out_bfloat16;
};

// Quantised activations: value = code * scale, the scale one per token and segment.
struct Activations {
    int8_t* codes;     // [tokens, code_stride]
    float* scale;      // [tokens, segments]
    int32_t* offsets;  // [tokens, segments]: -zero times the sum of the codes
    float* sums;       // [tokens, groups]: sums of values
    int64_t code_stride;
};

struct ForActivations;
struct ForPanels;

// --- sixteen outputs -------------------------------------------------------------------------------------------------

struct Values {
    Vec part[PARTS];
};
struct Sums {
    Ints part[PARTS];
};

#if defined(__AVX512VNNI__)

struct Codes {
    __m512i bytes;
};
using Four = __m512i;

inline Codes load_codes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }

inline Four load_four(const int8_t* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    return _mm512_set1_epi32(bits);
}

// As the instruction itself: the compiler's intrinsic copies every sum to and fro.
inline void dot(Sums& sums, const Codes& codes, Four four) {
    Ints sum = sums.part[0];
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes.bytes), "v"(four));
    sums.part[0] = sum;
}

#elif defined(__AVX2__)

struct Codes {
    __m256i even[PARTS], odd[PARTS];  // inputs 0 and 2, 1 and 3 of every output, 16 bits each
};
struct Four {
    __m256i even, odd;
};

inline Codes load_codes(const uint8_t* p) {
    Codes codes;
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; ++part) {
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + part);
        codes.even[part] = _mm256_and_si256(bytes, _mm256_set1_epi16(255));
        codes.odd[part] = _mm256_srli_epi16(bytes, 8);
    }
    return codes;
}

inline Four load_four(const int8_t* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    const __m256i bytes = _mm256_set1_epi32(bits);
    return {_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_srai_epi16(bytes, 8)};
}

inline void dot(Sums& sums, const Codes& codes, const Four& four) {
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; ++part) {
        const __m256i even = _mm256_madd_epi16(codes.even[part], four.even);
        const __m256i odd = _mm256_madd_epi16(codes.odd[part], four.odd);
        sums.part[part] += (Ints)even + (Ints)odd;
    }
}

#else

struct Codes {
    Ints part[PARTS];
};
struct Four {
    int32_t part[4];
};

inline Codes load_codes(const uint8_t* p) {
    Codes codes;
    std::memcpy(&codes, p, sizeof codes);
    return codes;
}

inline Four load_four(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }

inline void dot(Sums& sums, const Codes& codes, const Four& four) {
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; ++part)
        for (int byte = 0; byte < 4; ++byte)
            sums.part[part] += ((codes.part[part] >> (8 * byte)) & 255) * four.part[byte];
}

#endif

inline Values load_values(const float* p) {
    Values values;
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; ++part) values.part[part] = load(p + part * WIDTH);
    return values;
}

template <class Out>
inline void store_values(Out* p, const Values& values, int64_t count) {
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; ++part) {
        const int64_t left = count - part * WIDTH;
        if (left >= WIDTH)
            store(p + part * WIDTH, values.part[part]);
        else if (left > 0)
            store_part(p + part * WIDTH, values.part[part], int(left));
    }
}

// Two quads of nibbles as two quads of bytes.
inline void unpack(const uint8_t* packed, uint8_t* bytes) {
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; ++part) {
        Words words;
        std::memcpy(&words, packed + part * sizeof words, sizeof words);
        const Words low = words & 0x0f0f0f0f, high = (words >> 4) & 0x0f0f0f0f;
        std::memcpy(bytes + part * sizeof words, &low, sizeof low);
        std::memcpy(bytes + QUAD_BYTES + part * sizeof words, &high, sizeof high);
    }
}

// The codes of two quads of nibbles.
inline void load_pair(const uint8_t* packed, Codes& low, Codes& high) {
#if defined(__AVX512VNNI__)
    const __m512i bytes = _mm512_loadu_si512(packed), mask = _mm512_set1_epi8(15);
    low.bytes = _mm512_and_si512(bytes, mask);
    high.bytes = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask);
#else
    uint8_t bytes[2 * QUAD_BYTES];
    unpack(packed, bytes);
    low = load_codes(bytes);
    high = load_codes(bytes + QUAD_BYTES);
#endif
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
BATCHGEN_INLINE void add_quads(Sums (&sums)[T][P], const int8_t* x, int64_t x_stride, const uint8_t* codes, int64_t stride,
                      int64_t quads) {
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
BATCHGEN_INLINE void add_segment(Sums (&sums)[T][P], const int8_t* x, int64_t x_stride, const uint8_t* codes, int64_t stride,
                        int64_t quads) {
    if (quads == SEGMENT_QUADS)
        add_quads<T, P>(sums, x, x_stride, codes, stride, SEGMENT_QUADS);
    else
        add_quads<T, P>(sums, x, x_stride, codes, stride, quads);
}

// The same from nibbles; an odd last quad is met by codes of zero.
template <int T, int P>
BATCHGEN_INLINE void add_pairs(Sums (&sums)[T][P], const int8_t* x, int64_t x_stride, const uint8_t* codes,
                               int64_t stride, int64_t quads) {
    for (int64_t pair = 0; 2 * pair < quads; ++pair) {
        Codes low[P], high[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) {
            __builtin_prefetch(codes + (p + P) * stride + pair * QUAD_BYTES);  // of the next panels
            load_pair(codes + p * stride + pair * QUAD_BYTES, low[p], high[p]);
        }
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
            const Four first = load_four(x + t * x_stride + pair * 8), second = load_four(x + t * x_stride + pair * 8 + 4);
#pragma GCC unroll 8
            for (int p = 0; p < P; ++p) dot(sums[t][p], low[p], first);
#pragma GCC unroll 8
            for (int p = 0; p < P; ++p) dot(sums[t][p], high[p], second);
        }
    }
}

template <bool GROUPED, int T, int P>
BATCHGEN_INLINE void add_scaled(Values (&totals)[T][P], const Sums (&sums)[T][P], const Values (&scale)[P], const float* factor,
                       int64_t stride) {
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

template <int T, int P, class Out>
BATCHGEN_INLINE void finish(const Values (&totals)[T][P], const Weight& weight, int64_t first, const Call& call, int64_t token) {
    Out* out = static_cast<Out*>(call.out) + token * call.out_stride + first;
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
        const int64_t left = std::min<int64_t>(OUTPUTS, weight.outputs - first - p * OUTPUTS);
        float bias[OUTPUTS] = {};
        if (call.bias) std::memcpy(bias, call.bias + first + p * OUTPUTS, left * sizeof(float));
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
            Values values = totals[t][p];
#pragma GCC unroll 8
            for (int part = 0; part < PARTS; ++part) values.part[part] += load(bias + part * WIDTH);
            store_values(out + t * call.out_stride + p * OUTPUTS, values, left);
        }
    }
}

template <bool GROUPED, bool NIBBLES, int T, int P, class Out>
void tile(const Weight& weight, const Panels& panels, const Activations& x, const Call& call, int64_t token) {
    const int64_t segments = weight.segments(), per_group = weight.segments_per_group();
    const int64_t segment_quads = (weight.segment + 3) / 4, quads = weight.quads();
    const int8_t* codes = x.codes + token * x.code_stride;
    const float *factor = x.scale + token * segments, *group_sums = x.sums + token * weight.groups;
    const int32_t* offsets = x.offsets + token * segments;
    Values totals[T][P] = {};
    for (int64_t group = 0; group < weight.groups; ++group) {
        Values scale[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p)
            scale[p] = load_values(panels.scale + p * panels.scale_stride + group * OUTPUTS);
        const int64_t end = std::min((group + 1) * per_group, segments);
        for (int64_t segment = group * per_group; segment < end; ++segment) {
            Sums sums[T][P];
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
    finish<T, P, Out>(totals, weight, panels.first, call, token);
}

template <bool GROUPED, bool NIBBLES, int P, class Out, int T = TILE_TOKENS>
void tiles(const Weight& weight, const Panels& panels, const Activations& x, const Call& call, int64_t token,
           int64_t end) {
    for (; token + T <= end; token += T) tile<GROUPED, NIBBLES, T, P, Out>(weight, panels, x, call, token);
    if constexpr (T > 1)
        if (token < end) tiles<GROUPED, NIBBLES, P, Out, T - 1>(weight, panels, x, call, token, end);
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

template <bool NIBBLES, int P, class Out>
void all_tiles(const Weight& weight, const Panels& panels, const Activations& x, const Call& call, int64_t token,
               int64_t end) {
    if (weight.groups == 1)
        tiles<false, NIBBLES, P, Out>(weight, panels, x, call, token, end);
    else
        tiles<true, NIBBLES, P, Out>(weight, panels, x, call, token, end);
}

template <int P, class Out>
void work(const Weight& weight, const Activations& x, const Call& call, int64_t panel, int64_t token) {
    const int64_t end = std::min(token + BLOCK_TOKENS, call.tokens), segment_quads = (weight.segment + 3) / 4;
    // codes that serve one tile only are unpacked on the way, while the next ones arrive from memory
    const bool nibbles = weight.bits == 4 && end - token <= TILE_TOKENS && segment_quads % 2 == 0;
    const int64_t byte_count = weight.bits == 8 || nibbles ? 0 : P * weight.pairs() * 2 * QUAD_BYTES;
    const int64_t float_count = P * weight.groups * OUTPUTS;
    char* space = room<ForPanels>(byte_count + 2 * float_count * int64_t(sizeof(float)));
    float* floats = reinterpret_cast<float*>(space + byte_count);
    Panels panels;
    panels.scale = as_floats(weight, weight.scale, panel, P, floats);
    panels.minimum = as_floats(weight, weight.minimum, panel, P, floats + float_count);
    panels.scale_stride = weight.groups * OUTPUTS;
    panels.first = panel * OUTPUTS;
    if (nibbles) {
        panels.codes = weight.codes + panel * weight.panel_bytes();
        panels.code_stride = weight.panel_bytes();
        return all_tiles<true, P, Out>(weight, panels, x, call, token, end);
    }
    panels.codes = as_bytes(weight, panel, P, reinterpret_cast<uint8_t*>(space));
    panels.code_stride = (weight.bits == 8 ? weight.quads() : 2 * weight.pairs()) * QUAD_BYTES;
    all_tiles<false, P, Out>(weight, panels, x, call, token, end);
}

template <class Out>
void work(const Weight& weight, const Activations& x, const Call& call, int64_t task) {
    const int64_t columns = (weight.panels() + TILE_PANELS - 1) / TILE_PANELS;
    const int64_t panel = task % columns * TILE_PANELS, token = task / columns * BLOCK_TOKENS;
    if (weight.panels() - panel >= TILE_PANELS)
        work<TILE_PANELS, Out>(weight, x, call, panel, token);
    else
        work<1, Out>(weight, x, call, panel, token);
}

// --- activations -----------------------------------------------------------------------------------------------------

typedef int8_t Bytes __attribute__((vector_size(WIDTH)));

template <class T>
inline Vec load_some(const T* p, int64_t count) {
    return count >= WIDTH ? load(p) : load_part(p, int(count));
}

// Segments of one or several tokens, one behind the other, WIDTH of them at a time: a lane for each.
template <class T>
struct Segments {
    const T* from[WIDTH];
    int8_t* codes[WIDTH];
    float* sum[WIDTH];  // of the group it belongs to
    int64_t numbers[WIDTH], space[WIDTH];
    int64_t count = 0;

    void add(const Weight& weight, const Call& call, const Activations& to, int64_t row, int64_t segment, int64_t group) {
        const int64_t first = segment * weight.segment;
        from[count] = static_cast<const T*>(call.x) + row * call.x_stride + first;
        codes[count] = to.codes + row * to.code_stride + first;
        numbers[count] = std::min(weight.segment, weight.inputs - first);
        space[count] = std::min((weight.segment + 3) / 4 * 4, to.code_stride - first);
        sum[count++] = to.sums + row * weight.groups + group;
    }
};

// Lane by lane the largest size of `count` numbers, as bits; NaN and infinity are the largest.
template <class T>
BATCHGEN_INLINE Ints largest_bits(const T* x, int64_t count) {
    Ints top = {};
    for (int64_t i = 0; i < count; i += WIDTH) {
        const Ints bits = (Ints)load_some(x + i, count - i) & SIZE_BITS;
        top = bits > top ? bits : top;
    }
    return top;
}

// The codes of a segment, nearest with ties to even; returns lane by lane their sum. Writes up to `space` bytes.
template <class T>
BATCHGEN_INLINE Ints round_codes(const T* x, int64_t count, float inverse, int8_t* codes, int64_t space) {
    const Vec shifter = splat(12582912.0f);
    Ints sum = {};
    for (int64_t i = 0; i < space; i += WIDTH) {
        const Vec v = i < count ? load_some(x + i, count - i) : Vec{};
        const Ints whole = (Ints)(v * splat(inverse) + shifter) - (Ints)shifter;
        const Bytes bytes = __builtin_convertvector(whole, Bytes);
        sum += whole;
        if (space - i >= WIDTH)
            std::memcpy(codes + i, &bytes, WIDTH);
        else
            std::memcpy(codes + i, &bytes, space - i);
    }
    return sum;
}

// Scales, offsets and values' sums of some segments, and their codes; `at` is where the first one's scale goes.
template <bool WHOLE, class T>
void quantise(const Segments<T>& some, const Weight& weight, const Activations& to, int64_t at) {
    constexpr int64_t WHOLE_SIZE = 4 * SEGMENT_QUADS;
    Ints rows[WIDTH];
    for (int64_t i = some.count; i < WIDTH; ++i) rows[i] = Ints{};
    for (int64_t i = 0; i < some.count; ++i)
        rows[i] = largest_bits(some.from[i], WHOLE ? WHOLE_SIZE : some.numbers[i]);
    const Ints bits = largest_each(rows);
    const Vec largest = (Vec)bits;
    const Ints usable = (bits < INFINITE) & (Ints)(largest >= splat(SMALLEST));
    const Vec scale = usable ? largest / splat(127.0f) : (bits < INFINITE ? Vec{} : splat(NAN));
    float inverse[WIDTH], values[WIDTH];
    store(inverse, usable ? splat(127.0f) / largest : Vec{});
    for (int64_t i = 0; i < some.count; ++i)
        rows[i] = round_codes(some.from[i], WHOLE ? WHOLE_SIZE : some.numbers[i], inverse[i], some.codes[i],
                              WHOLE ? WHOLE_SIZE : some.space[i]);
    for (int64_t i = some.count; i < WIDTH; ++i) rows[i] = Ints{};
    const Ints sums = total_each(rows), offsets = sums * int32_t(-weight.zero);
    store(values, scale * to_floats(sums));
    std::memcpy(to.scale + at, &scale, some.count * sizeof(float));
    std::memcpy(to.offsets + at, &offsets, some.count * sizeof(int32_t));
    for (int64_t i = 0; i < some.count; ++i) *some.sum[i] += values[i];
}

template <class T>
void quantise(const Weight& weight, const Call& call, const Activations& to, int64_t token, int64_t end) {
    const int64_t segments = weight.segments(), per_group = weight.segments_per_group();
    const bool whole = weight.segment == 4 * SEGMENT_QUADS && weight.inputs % weight.segment == 0;
    std::memset(to.sums + token * weight.groups, 0, (end - token) * weight.groups * sizeof(float));
    for (int64_t at = token * segments, segment = 0, group = 0; token < end;) {
        Segments<T> some;
        while (some.count < WIDTH && token < end) {
            some.add(weight, call, to, token, segment, group);
            if (++segment == segments) segment = group = 0, ++token;
            else if (segment == (group + 1) * per_group) ++group;
        }
        whole ? quantise<true>(some, weight, to, at) : quantise<false>(some, weight, to, at);
        at += some.count;
    }
}

template <class In>
void quantise_all(const Weight& weight, const Call& call, const Activations& to) {
    parallel_parts(call.tokens, 1 + 16384 / weight.inputs,
                   [&](int64_t begin, int64_t end) { quantise<In>(weight, call, to, begin, end); });
}

Activations make_activations(const Weight& weight, const Call& call) {
    const int64_t segments = weight.segments(), stride = weight.quads() * 4;
    const int64_t numbers = call.tokens * (2 * segments + weight.groups);
    char* space = room<ForActivations>(numbers * 4 + call.tokens * stride + 4);  // an odd quad is read with its neighbour
    Activations x;
    x.scale = reinterpret_cast<float*>(space);
    x.sums = x.scale + call.tokens * segments;
    x.offsets = reinterpret_cast<int32_t*>(x.sums + call.tokens * weight.groups);
    x.codes = reinterpret_cast<int8_t*>(x.offsets + call.tokens * segments);
    x.code_stride = stride;
    return x;
}

void multiply(const Weight& weight, const Call& call) {
    const Activations x = make_activations(weight, call);
    call.x_bfloat16 ? quantise_all<bfloat16>(weight, call, x) : quantise_all<float>(weight, call, x);
    const int64_t columns = (weight.panels() + TILE_PANELS - 1) / TILE_PANELS;
    const int64_t tasks = columns * ((call.tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS);
    const bool small = call.tokens * weight.inputs * weight.outputs < LEAST_PARALLEL;
    const auto body = [&](int64_t task) {
        call.out_bfloat16 ? work<bfloat16>(weight, x, call, task) : work<float>(weight, x, call, task);
    };
    if (small)
        for (int64_t task = 0; task < tasks; ++task) body(task);
    else
        parallel(tasks, body);
}

}  // namespace
}  // namespace batchgen

BATCHGEN_EXPORT void batchgen_panels(const batchgen::Weight* weight, const batchgen::Call* call) {
    batchgen::multiply(*weight, *call);
}
