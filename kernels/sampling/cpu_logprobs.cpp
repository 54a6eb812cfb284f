// Log-probabilities of drawn tokens and the best ones of a row, in one pass over it; see the contract.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "../native/export.h"
#include "../native/parallel.h"
#include "../native/scratch.h"
#include "../native/sideways.h"
#include "cpu.h"

namespace batchgen {
namespace {

constexpr int64_t BLOCK = 1024;   // logits that are read twice while the nearest cache holds them
constexpr int64_t LEAST = 65536;  // logits that are worth waking a thread

// log(sum of e^x) over what was added block by block, from the largest number so far.
struct LogSum {
    float most = -INFINITY;
    double total = 0;

    void add(const float* row, int64_t begin, int64_t end) {
        Vec block = splat(-INFINITY), part{};
        for (int64_t at = begin; at < end; at += WIDTH) block = larger(read(row, at, end), block);
        if (const float reached = largest(block); reached > most) {
            total *= std::exp(double(most) - double(reached));
            most = reached;
        }
        const Vec from = splat(most > -INFINITY ? most : 0.0f);
        for (int64_t at = begin; at < end; at += WIDTH) part += exp2<6>((read(row, at, end) - from) * splat(LOG2_E));
        total += double(sum(part));
    }

    double value() const { return double(most) + std::log(total); }
};

// A logit and its id as one number: the larger, the better; of equal logits the lower id. NaN has a place as well.
uint64_t key_of(float x, int32_t id) {
    x += 0.0f;  // the zeros are equal
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
    return uint64_t(bits) << 32 | uint32_t(~id);
}

int32_t id_of(uint64_t key) { return int32_t(~uint32_t(key)); }

struct ForBest;

// The best logits of a row whose ids are offered in ascending order. Most of them are refused by one comparison.
struct BestFew {
    const int64_t wanted, room_for;
    uint64_t* const keys;
    const float* const row;
    int64_t count = 0;
    float passed = std::numeric_limits<float>::quiet_NaN();  // what no more can enter; NaN: everything can

    BestFew(const float* row, int64_t wanted)
        : wanted(wanted),
          room_for(2 * wanted + WIDTH),
          keys(reinterpret_cast<uint64_t*>(room<ForBest>((room_for + WIDTH) * sizeof(uint64_t)))),
          row(row) {}

    void offer(int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; at += WIDTH) {
            const Ints beaten = read(row, at, end) <= splat(passed);
            if (!any(~beaten)) continue;
            for (int64_t id = at; id < std::min(at + WIDTH, end); ++id)
                if (!beaten[id - at]) keys[count++] = key_of(row[id], int32_t(id));
            if (count > room_for) narrow();
        }
    }

    void narrow() {
        std::nth_element(keys, keys + wanted - 1, keys + count, std::greater<uint64_t>());
        count = wanted;
        passed = row[id_of(keys[wanted - 1])];
    }

    void write(double whole, float* values, int64_t* ids) {
        std::partial_sort(keys, keys + wanted, keys + count, std::greater<uint64_t>());
        for (int64_t rank = 0; rank < wanted; ++rank) {
            ids[rank] = id_of(keys[rank]);
            values[rank] = float(double(row[ids[rank]]) - whole);
        }
    }
};

// Writes the best `top` of a row and returns the log of the sum of all that its logits are the logarithms of.
double rank_row(const float* row, int64_t vocabulary, int64_t top, float* values, int64_t* ids) {
    LogSum whole;
    BestFew best(row, top);
    for (int64_t begin = 0; begin < vocabulary; begin += BLOCK) {
        const int64_t end = std::min(begin + BLOCK, vocabulary);
        whole.add(row, begin, end);
        if (top > 0) best.offer(begin, end);
    }
    best.write(whole.value(), values, ids);
    return whole.value();
}

}  // namespace
}  // namespace batchgen

// tokens, own [num_rows]; values, ids [num_rows, top].
BATCHGEN_EXPORT void batchgen_logprobs(const float* logits, int64_t stride, int64_t vocabulary, int64_t num_rows,
                                       const int64_t* tokens, int64_t top, float* own, float* values, int64_t* ids) {
    batchgen::parallel_parts(num_rows, batchgen::LEAST / vocabulary, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const float* const x = logits + row * stride;
            const double whole = batchgen::rank_row(x, vocabulary, top, values + row * top, ids + row * top);
            own[row] = float(double(x[tokens[row]]) - whole);
        }
    });
}
