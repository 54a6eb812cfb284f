// Where the keys of a task lie, tile by tile, and what comes next. Knows slots, no numbers.
#pragma once

#include <algorithm>

#include "cpu_narrow.h"

namespace batchgen {
namespace {

// Keys of a task side by side in the sequence; slots behind `count` repeat the last.
struct Strip {
    int64_t slots[STRIP];  // of the task's first head
    int count;
    bool side_by_side;  // in the pages too

    template <class Q>
    void find(const Target<Q>& target, int at, int end) {
        count = std::min(STRIP, end - at);
        locate(target.plan, target.call, target.task, target.kv_head, at, count, slots);
        std::fill(slots + count, slots + STRIP, slots[count - 1]);
        side_by_side = true;
        for (int key = 1; key < STRIP; ++key) side_by_side &= slots[key] == slots[0] + key;
    }
};

struct Tile {
    Strip strips[STRIPS];
    int first = 0, count = 0;  // key of the task, strips

    template <class Q>
    void find(const Target<Q>& target, int at, int end) {
        first = at, count = std::min(STRIPS, (end - at + STRIP - 1) / STRIP);
        for (int i = 0; i < count; ++i) strips[i].find(target, at + i * STRIP, end);
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
    Walk(const Target<Q>& target, const Target<Q>* after) : target_(target), after_(after), extent_(target) { find(0); }

    int tiles() const { return extent_.tiles(); }
    const Tile& at(int step) const { return tiles_[step % 2]; }

    // The tile behind `step`; nothing is in it where nothing is known to follow.
    const Tile& look_ahead(int step) {
        find(step + 1);
        return at(step + 1);
    }

private:
    void find(int step) {
        Tile& tile = tiles_[step % 2];
        if (step < tiles()) return tile.find(target_, extent_.begin + step * TILE, extent_.end);
        tile.count = 0;
        if (!after_) return;
        const Extent following(*after_);
        if (following.tiles()) tile.find(*after_, following.begin, following.end);
    }

    const Target<Q>& target_;
    const Target<Q>* after_;
    const Extent extent_;
    Tile tiles_[2];
};

}  // namespace
}  // namespace batchgen
