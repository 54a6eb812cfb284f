// What products of a batch with a weight in panels of 16 outputs have in common: the call, tiles of a few tokens and
// panels, the tasks they are cut into, and results. Knows neither codes nor scales.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../native/parallel.h"
#include "../native/scratch.h"
#include "../native/simd.h"

namespace batchgen {

constexpr int OUTPUTS = 16;  // of a panel
constexpr int PARTS = OUTPUTS / WIDTH;
constexpr int64_t LEAST_PARALLEL = 5 << 17;  // products below which waking the threads costs more than it gains
constexpr int64_t LEAST_NUMBERS = 1 << 13;   // of the batch that a thread prepares
constexpr int64_t FAR_BYTES = 1 << 20;       // of results: more than a core keeps

#if defined(__AVX512F__)
constexpr int TILE_TOKENS = 6, TILE_PANELS = 2;
#elif defined(__AVX2__)
constexpr int TILE_TOKENS = 3, TILE_PANELS = 1;
#else
constexpr int TILE_TOKENS = 1, TILE_PANELS = 1;
#endif

// A batch and where its products go, as Python lays them out; the fields stand in the same order in native.py.
struct Call {
    int64_t tokens;
    const void* weight;
    const void* x;
    const float* bias;  // or null
    void* out;
    int64_t x_stride, outputs, x_bfloat16, out_bfloat16;  // outputs: that are wanted, the first ones
};

// Rows of a weight that are wanted as numbers, [tokens, inputs].
struct RowsCall {
    int64_t tokens;
    const void* weight;
    const int64_t* index;
    void* out;
    int64_t out_bfloat16;
};

// expand(row, numbers) for every row that is wanted, into `inputs` floats and up to a vector beyond, then stored.
template <class Expand>
void each_row(const RowsCall& call, int64_t inputs, const Expand& expand) {
    parallel_parts(call.tokens, LEAST_NUMBERS / inputs + 1, [&](int64_t begin, int64_t end) {
        float* numbers = reinterpret_cast<float*>(room<struct ForRow>((inputs + 2 * WIDTH) * int64_t(sizeof(float))));
        for (int64_t token = begin; token < end; ++token) {
            expand(call.index[token], numbers);
            const auto put = [&](auto* out) {
                int64_t at = 0;
                for (; at + WIDTH <= inputs; at += WIDTH) store(out + at, load(numbers + at));
                if (at < inputs) store_part(out + at, load(numbers + at), int(inputs - at));
            };
            if (call.out_bfloat16) put(static_cast<bfloat16*>(call.out) + token * inputs);
            else put(static_cast<float*>(call.out) + token * inputs);
        }
    });
}

// A float for each output of a panel.
struct Values {
    Vec part[PARTS];
};

template <int N>
using Count = std::integral_constant<int, N>;

inline int64_t num_panels(int64_t outputs) { return (outputs + OUTPUTS - 1) / OUTPUTS; }

// Memory that is asked for line by line while something else is computed.
struct Ahead {
    const uint8_t *at, *end;
    int64_t lines;  // at each call

    Ahead(const uint8_t* from, int64_t bytes, int64_t calls)
        : at(from), end(from + bytes), lines((bytes + 64 * calls - 1) / (64 * calls)) {}

    BATCHGEN_INLINE void fetch() {
        for (int64_t line = 0; line < lines && at < end; ++line, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

// body(Count<T>, token) for tiles of T tokens that cover token .. end; T is TILE_TOKENS except for the last.
template <int T = TILE_TOKENS, class Body>
void each_tile(int64_t token, int64_t end, const Body& body) {
    for (; token + T <= end; token += T) body(Count<T>(), token);
    if constexpr (T > 1)
        if (token < end) each_tile<T - 1>(token, end, body);
}

inline int64_t num_tiles(int64_t tokens) { return (tokens + TILE_TOKENS - 1) / TILE_TOKENS; }

struct Shape {
    int64_t outputs, inputs;
};

// A block of tokens times the panels from `panel` on. The same thread comes to `num_next` panels from `next` on
// afterwards.
struct Task {
    int64_t panel, next, num_next, token, end;
};

// prepare(token, end) for all tokens, then body(Count<P>, task) for every block of tokens and every P panels.
template <class Prepare, class Body>
void each_task(const Shape& shape, int64_t tokens, int64_t block_tokens, const Prepare& prepare, const Body& body) {
    const int64_t panels = num_panels(shape.outputs), columns = (panels + TILE_PANELS - 1) / TILE_PANELS;
    const int64_t tasks = columns * ((tokens + block_tokens - 1) / block_tokens);
    const auto one = [&](int64_t task, int64_t following) {
        const int64_t panel = task % columns * TILE_PANELS, next = following % columns * TILE_PANELS;
        const int64_t num_next = following < tasks ? std::min<int64_t>(TILE_PANELS, panels - next) : 0;
        const int64_t token = task / columns * block_tokens, end = std::min(token + block_tokens, tokens);
        const Task made{panel, next, num_next, token, end};
        panels - panel < TILE_PANELS ? body(Count<1>(), made) : body(Count<TILE_PANELS>(), made);
    };
    if (tokens * shape.inputs * shape.outputs >= LEAST_PARALLEL)
        return parallel_prepared(tokens, LEAST_NUMBERS / shape.inputs, prepare, tasks, one);
    prepare(0, tokens);
    for (int64_t task = 0; task < tasks; ++task) one(task, task + 1);
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

// Where results go: to memory as numbers [tokens, outputs]. (To draws: draws.h.)
template <class Out>
struct Results {
    // Asks for the lines that a tile will write, while it is computed, where they lie too far apart to be near a core.
    template <int T, int P>
    static void ask(const Call& call, int64_t token, int64_t first) {
        constexpr int64_t BYTES = P * OUTPUTS * sizeof(Out);
        const int64_t stride = call.outputs * int64_t(sizeof(Out));
        if (call.tokens * stride < FAR_BYTES) return;
        const char* row = static_cast<const char*>(call.out) + token * stride + first * int64_t(sizeof(Out));
        for (int t = 0; t < T; ++t, row += stride)
            for (int64_t byte = 0; byte < BYTES; byte += 64) __builtin_prefetch(row + byte, 1, 3);
    }

    // The results of a panel whose first output is `first`; `count` of them are wanted.
    static void put(const Call& call, int64_t token, int64_t first, const Values& values, int64_t count) {
        store_values(static_cast<Out*>(call.out) + token * call.outputs + first, values, count);
    }
};

// The results of a tile whose first output is `first`.
template <class Out, int T, int P>
BATCHGEN_INLINE void finish(const Values (&totals)[T][P], int64_t first, const Call& call, int64_t token) {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p, first += OUTPUTS) {
        const int64_t count = std::min<int64_t>(OUTPUTS, call.outputs - first);
        float bias[OUTPUTS] = {};
        if (call.bias) std::memcpy(bias, call.bias + first, count * sizeof(float));
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
            Values values = totals[t][p];
#pragma GCC unroll 8
            for (int part = 0; part < PARTS; ++part) values.part[part] += load(bias + part * WIDTH);
            Results<Out>::put(call, token + t, first, values, count);
        }
    }
}

// multiply(Out()) for the numbers that are wanted.
template <class Multiply>
void keep_numbers(const Call& call, const Multiply& multiply) {
    call.out_bfloat16 ? multiply(bfloat16()) : multiply(float());
}

}  // namespace batchgen
