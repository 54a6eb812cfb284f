// Where the keys of a task lie, tile by tile, and what is fetched ahead. Knows slots, no numbers.
#pragma once

#include <algorithm>

#include "cpu_narrow.h"

namespace batchgen {
namespace {

constexpr int AHEAD = 2;  // tiles fetched ahead

// Keys of a task from `first` on; slots behind `count` repeat the last.
struct Tile {
    int64_t slots[TILE];  // of the task's first head
    int first = 0, count = 0;
    bool side_by_side;

    template <class Q>
    void find(const Target<Q>& target, int at, int end) {
        first = at, count = std::min(TILE, end - at);
        locate(target.plan, target.call, target.task, target.kv_head, first, count, slots);
        std::fill(slots + count, slots + TILE, slots[count - 1]);
        side_by_side = slots[TILE - 1] == slots[0] + TILE - 1;
    }
};

// The keys that any lane of a task sees.
struct Extent {
    int32_t begin = INT32_MAX, end = 0;

    template <class Q>
    explicit Extent(const Target<Q>& target) {
        for (int query = 0; query < target.task.num_queries; ++query) {
            int32_t low, high;
            target.visible(query, low, high);
            begin = std::min(begin, low), end = std::max(end, high);
        }
    }

    int tiles() const { return end > begin ? (end - begin + TILE - 1) / TILE : 0; }
};

// The tiles of a task one after the other, then the first of the task that follows.
template <class Q>
class Walk {
public:
    Walk(const Target<Q>& target, const Target<Q>* after) : target_(target), after_(after), extent_(target) {
        for (int step = 0; step < AHEAD; ++step) find(step);
    }

    int tiles() const { return extent_.tiles(); }
    const Tile& at(int step) const { return ring_[step % (AHEAD + 1)]; }

    const Tile& look_ahead(int step) {
        find(step + AHEAD);
        return at(step + AHEAD);
    }

private:
    void find(int step) {
        Tile& tile = ring_[step % (AHEAD + 1)];
        if (step < tiles()) return tile.find(target_, extent_.begin + step * TILE, extent_.end);
        if (after_) {
            const Extent following(*after_);
            const int first = following.begin + (step - tiles()) * TILE;
            if (first < following.end) return tile.find(*after_, first, following.end);
        }
        tile = ring_[(step + AHEAD) % (AHEAD + 1)];  // nothing is left to fetch: the one before
    }

    const Target<Q>& target_;
    const Target<Q>* after_;
    const Extent extent_;
    Tile ring_[AHEAD + 1];
};

}  // namespace
}  // namespace batchgen
