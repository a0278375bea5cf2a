// The memory of KV pages, and where the keys and values of a layer lie in a page.

#pragma once

#include <cstdint>
#include <vector>

#include "ops/types.h"

namespace aioserve::ops {

// The group of a layer, whose pages it has a part of, and its place in such a page.
struct KVPlace {
    int64_t group, index;
};

// Pages of all groups: [num_pages, layers_per_page, 2, heads] of a head's keys or values, keys before
// values, laid out as attention reads them:
//
//   keys    [steps][page_size] of 4 bytes: a step is a float32 or a pair of bfloat16 dimensions, the
//           last of an odd number with a zero. So a register holds one step of several keys.
//   values  float32: [page_size][head_dim].
//           bfloat16: [page_size / 2][head_dim][2], pairs of tokens along the sum that they go into;
//           with an odd page size, whose pairs would lie across pages, [page_size][head_dim].
//
// Values take as many bytes as keys. The layout depends on nothing but these sizes and the dtype.
//
// Latent pages are [num_pages, layers_per_page] of one row a token: [page_size][head_dim], whole steps
// of 4 bytes each, of which attention takes all for a key and the first `rank` numbers for the value.
struct KVPages {
    char* storage;
    int64_t num_pages, layers_per_page, heads, page_size, head_dim;
    DType dtype;
    std::vector<KVPlace> places;   // of each layer
    std::vector<int64_t> windows;  // of each group: last positions that it keeps, or 0 for all
    int64_t rank;                  // of latent pages, or 0

    int64_t layers() const { return static_cast<int64_t>(places.size()); }
    int64_t groups() const { return static_cast<int64_t>(windows.size()); }
    int64_t steps() const { return dtype == DType::bfloat16 ? (head_dim + 1) / 2 : head_dim; }
    int64_t head_bytes() const { return 4 * steps() * page_size; }
    int64_t value_dim() const { return rank ? rank : head_dim; }
    int64_t planes_per_layer() const { return rank ? 1 : 2; }
    // The keys, the values or the latents of one layer.
    int64_t plane_bytes() const { return heads * head_bytes(); }
    int64_t planes_per_page() const { return planes_per_layer() * layers_per_page; }
    int64_t page_bytes() const { return planes_per_page() * plane_bytes(); }
    char* page(int64_t index) const { return storage + index * page_bytes(); }
    // The keys of a layer, and its values, in page 0; latents are both.
    char* keys(int64_t layer) const {
        return storage + planes_per_layer() * places[layer].index * plane_bytes();
    }
    char* values(int64_t layer) const { return keys(layer) + (rank ? 0 : plane_bytes()); }
};

}  // namespace aioserve::ops
