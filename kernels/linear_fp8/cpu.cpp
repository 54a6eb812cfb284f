// Products of bfloat16 activations with weights in 8-bit floats (e4m3), which bfloat16 holds exactly. Sums of a group
// of inputs are floats, scaled once. Knows the panel layout of native.py; the arithmetic is that of the contract.
#include "../native/export.h"
#include "../native/scratch.h"
#include "../panels/draws.h"
#include "../panels/pairs.h"

namespace batchgen {
namespace {

struct Float8 {
    uint8_t code;
};

// A weight as Python lays it out; the fields stand in the same order in native.py.
struct Weight {
    const Float8* codes;  // [panels, pairs, 16, 2]
    const float* scale;   // [panels, groups, 16]
    int64_t inputs, groups, group;

    int64_t pairs() const { return (inputs + 1) / 2; }
    int64_t stretches() const { return (pairs() + STRETCH - 1) / STRETCH; }  // at least, however groups cut them
};

struct ForActivations;
struct ForPanels;

// --- codes as numbers ------------------------------------------------------------------------------------------------

#if defined(__AVX512BF16__)

// An e4m3 moved to the place of a bfloat16 has an exponent that is too small by 120; those without a leading one, whose
// exponent is zero, are looked up.
BATCHGEN_INLINE Pair decode(const Float8* p) {
    const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512i size = _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x7f)), 4);
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x80)), 8);
    // m * 2^-9 for m = 0 .. 7
    const __m512i table = _mm512_set4_epi64(0, 0, 0x3c603c403c203c00ll, 0x3bc03b803b000000ll);
    const __mmask32 small = _mm512_testn_epi16_mask(wide, _mm512_set1_epi16(0x78));
    const __m512i usual = _mm512_add_epi16(size, _mm512_set1_epi16(120 << 7));
    return {_mm512_or_si512(_mm512_mask_permutexvar_epi16(usual, small, wide & _mm512_set1_epi16(7), table), sign)};
}

#else

// An e4m3 moved to the place of a float has an exponent that is too small by 120; the product mends it for all.
inline Words widen(Words codes) {
    const Words number = (Words)((Vec)((codes & 0x7f) << 20) * splat(1.329227995784916e36f));  // 2^120
    return number | ((codes & 0x80) << 24);
}

BATCHGEN_INLINE Pair decode(const Float8* p) {
    Pair pair;
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; ++part) {
        Halves both;
        std::memcpy(&both, p + part * sizeof both, sizeof both);
        const Words words = __builtin_convertvector(both, Words);
        pair.part[part] = (widen(words & 0xff) >> 16) | widen(words >> 8);
    }
    return pair;
}

#endif

BATCHGEN_INLINE Pair load_pair(const Float8* p) { return decode(p); }

// --- a tile: some tokens times some panels ---------------------------------------------------------------------------

// `panel`: codes, or the numbers they stand for; `stride` from one panel to the next.
template <int T, int P, class Out, class Number>
void tile(const Weight& weight, const Number* panel, int64_t stride, int64_t first, const uint16_t* x, const Call& call,
          int64_t token, Ahead& ahead) {
    const int64_t x_stride = weight.pairs() * 2;
    Results<Out>::template ask<T, P>(call, token, first);
    Values totals[T][P] = {};
    for (int64_t group = 0; group < weight.groups; ++group) {
        int64_t pair = group * weight.group / 2;
        const int64_t end = group + 1 == weight.groups ? weight.pairs() : (group + 1) * weight.group / 2;
        Values sums[T][P] = {};
        const uint16_t* row = x + token * x_stride;
        for (int64_t next; pair < end; pair = next) {
            next = std::min(pair + STRETCH, end);
            add_pairs<T, P>(sums, row + pair * 2, x_stride, panel + pair * PAIR, stride, next - pair);
            ahead.fetch();
        }
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) {
            const float* scale = weight.scale + ((first / OUTPUTS + p) * weight.groups + group) * OUTPUTS;
#pragma GCC unroll 8
            for (int part = 0; part < PARTS; ++part) {
                const Vec by = load(scale + part * WIDTH);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t)
                    totals[t][p].part[part] = fma(sums[t][p].part[part], by, totals[t][p].part[part]);
            }
        }
    }
    finish<Out>(totals, first, call, token);
}

// --- a task: a block of tokens times some panels ---------------------------------------------------------------------

template <int P, class Out>
void work(const Weight& weight, const uint16_t* x, const Call& call, const Task& task) {
    const int64_t stride = weight.pairs() * PAIR, tokens = task.end - task.token, first = task.panel * OUTPUTS;
    const uint8_t* next = &weight.codes[task.next * stride].code;
    Ahead ahead(next, task.num_next * stride, num_tiles(tokens) * weight.stretches());
    const Float8* codes = weight.codes + task.panel * stride;
    const auto all_tiles = [&](const auto* numbers) {
        each_tile(task.token, task.end, [&](auto tokens, int64_t at) {
            tile<decltype(tokens)::value, P, Out>(weight, numbers, stride, first, x, call, at, ahead);
        });
    };
    // codes that serve one tile only are decoded on the way
    if (tokens <= TILE_TOKENS) return all_tiles(codes);
    uint16_t* numbers = reinterpret_cast<uint16_t*>(room<ForPanels>(P * stride * 2));
    for (int64_t at = 0; at < P * stride; at += PAIR) store_pair(numbers + at, decode(codes + at));
    all_tiles(static_cast<const uint16_t*>(numbers));
}

template <class Out>
void multiply(const Call& call) {
    const Weight& weight = *static_cast<const Weight*>(call.weight);
    char* space = room<ForActivations>(call.tokens * weight.pairs() * 4);
    bfloat16* rounded = reinterpret_cast<bfloat16*>(space);
    const uint16_t* x = reinterpret_cast<const uint16_t*>(space);
    const auto round = call.x_bfloat16 ? round_rows<bfloat16> : round_rows<float>;
    const auto prepare = [&](int64_t token, int64_t end) { round(weight.inputs, call, rounded, token, end); };
    each_task({call.outputs, weight.inputs}, call.tokens, BLOCK_TOKENS, prepare, [&](auto panels, const Task& task) {
        work<decltype(panels)::value, Out>(weight, x, call, task);
    });
}

// The numbers of an output.
void expand_row(const Weight& weight, int64_t row, float* numbers) {
    const int64_t panel = row / OUTPUTS, lane = row % OUTPUTS;
    const float* scale = weight.scale + panel * weight.groups * OUTPUTS + lane;
    for (int64_t pair = 0; pair < weight.pairs(); ++pair) {
        uint16_t both[PAIR];
        store_pair(both, decode(weight.codes + (panel * weight.pairs() + pair) * PAIR));
        for (int64_t i = 2 * pair; i < std::min(2 * pair + 2, weight.inputs); ++i)
            numbers[i] = to_float(bfloat16{both[lane * 2 + i % 2]}) * scale[i / weight.group * OUTPUTS];
    }
}

}  // namespace
}  // namespace batchgen

BATCHGEN_EXPORT void batchgen_linear_fp8(const batchgen::Call* call) {
    batchgen::keep_numbers(*call, [&](auto number) { batchgen::multiply<decltype(number)>(*call); });
}

BATCHGEN_EXPORT void batchgen_fp8_draw(const batchgen::DrawCall* call) {
    batchgen::draw_each(*call, batchgen::multiply<batchgen::Draw>);
}

BATCHGEN_EXPORT void batchgen_fp8_rows(const batchgen::RowsCall* call) {
    using namespace batchgen;
    const Weight& weight = *static_cast<const Weight*>(call->weight);
    each_row(*call, weight.inputs, [&](int64_t row, float* numbers) { expand_row(weight, row, numbers); });
}
