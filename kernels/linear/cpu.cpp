// Products of bfloat16 activations with bfloat16 weights. Knows the panel layout of native.py; the arithmetic is that of
// the contract.
#include "../native/export.h"
#include "../native/scratch.h"
#include "../panels/draws.h"
#include "../panels/pairs.h"

namespace batchgen {
namespace {

// A weight as Python lays it out; the fields stand in the same order in native.py.
struct Weight {
    const uint16_t* numbers;  // [panels, pairs, 16, 2]
    int64_t inputs;

    int64_t pairs() const { return (inputs + 1) / 2; }
    int64_t stretches() const { return (pairs() + STRETCH - 1) / STRETCH; }
};

// A row for each token, an even number of inputs.
struct Rows {
    const uint16_t* first;
    int64_t stride;
};

struct ForActivations;

template <int T, int P, class Out>
void tile(const Weight& weight, const Rows& x, const Call& call, int64_t panel, int64_t token, Ahead& ahead) {
    const int64_t pairs = weight.pairs(), stride = pairs * PAIR;
    const uint16_t *row = x.first + token * x.stride, *numbers = weight.numbers + panel * stride;
    Results<Out>::template ask<T, P>(call, token, panel * OUTPUTS);
    Values sums[T][P] = {};
    for (int64_t pair = 0, next; pair < pairs; pair = next) {
        next = std::min(pair + STRETCH, pairs);
        add_pairs<T, P>(sums, row + pair * 2, x.stride, numbers + pair * PAIR, stride, next - pair);
        ahead.fetch();
    }
    finish<Out>(sums, panel * OUTPUTS, call, token);
}

template <int P, class Out>
void work(const Weight& weight, const Rows& x, const Call& call, const Task& task) {
    const int64_t panel_bytes = weight.pairs() * PAIR * 2, times = num_tiles(task.end - task.token) * weight.stretches();
    const uint8_t* next = reinterpret_cast<const uint8_t*>(weight.numbers) + task.next * panel_bytes;
    Ahead ahead(next, task.num_next * panel_bytes, times);
    each_tile(task.token, task.end, [&](auto tokens, int64_t token) {
        tile<decltype(tokens)::value, P, Out>(weight, x, call, task.panel, token, ahead);
    });
}

// The batch where it lies, or, with an odd number of inputs or floats, copied by `prepare`.
template <class Out>
void multiply(const Call& call) {
    const Weight& weight = *static_cast<const Weight*>(call.weight);
    const bool in_place = call.x_bfloat16 && weight.inputs % 2 == 0;
    const int64_t bytes = in_place ? 0 : call.tokens * weight.pairs() * 4;
    bfloat16* copied = reinterpret_cast<bfloat16*>(room<ForActivations>(bytes));
    const Rows x = in_place ? Rows{static_cast<const uint16_t*>(call.x), call.x_stride}
                            : Rows{reinterpret_cast<const uint16_t*>(copied), weight.pairs() * 2};
    const auto round = call.x_bfloat16 ? round_rows<bfloat16> : round_rows<float>;
    const auto prepare = [&](int64_t token, int64_t end) {
        if (!in_place) round(weight.inputs, call, copied, token, end);
    };
    each_task({call.outputs, weight.inputs}, call.tokens, BLOCK_TOKENS, prepare, [&](auto panels, const Task& task) {
        work<decltype(panels)::value, Out>(weight, x, call, task);
    });
}

}  // namespace
}  // namespace batchgen

BATCHGEN_EXPORT void batchgen_linear(const batchgen::Call* call) {
    batchgen::keep_numbers(*call, [&](auto number) { batchgen::multiply<decltype(number)>(*call); });
}

BATCHGEN_EXPORT void batchgen_linear_draw(const batchgen::DrawCall* call) {
    batchgen::draw_each(*call, batchgen::multiply<batchgen::Draw>);
}

BATCHGEN_EXPORT void batchgen_dense_rows(const batchgen::RowsCall* call) {
    using namespace batchgen;
    const Weight& weight = *static_cast<const Weight*>(call->weight);
    each_row(*call, weight.inputs, [&](int64_t row, float* numbers) {
        const uint16_t* from = weight.numbers + (row / OUTPUTS * weight.pairs() * OUTPUTS + row % OUTPUTS) * 2;
        for (int64_t i = 0; i < weight.inputs; ++i) numbers[i] = to_float(bfloat16{from[i / 2 * PAIR + i % 2]});
    });
}
