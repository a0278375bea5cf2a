// A batch as Python makes it: with the arrays that it reads.

#pragma once

#include <nanobind/ndarray.h>

#include <utility>

#include "ops/batch.h"

namespace aioserve::ops {

template <class T, int Dims>
using Array = nanobind::ndarray<const T, nanobind::ndim<Dims>, nanobind::c_contig, nanobind::device::cpu>;

// Holds on to the arrays that its batch reads.
struct HeldBatch {
    Array<int32_t, 1> query_start, context_lens;
    Array<int32_t, 3> page_table;
    Array<int64_t, 2> token_locations;
    Array<int32_t, 1> positions;
    Array<int64_t, 1> logit_rows;
    Batch batch;

    HeldBatch(Array<int32_t, 1> query_start_, Array<int32_t, 1> context_lens_,
              Array<int32_t, 3> page_table_, Array<int64_t, 2> token_locations_,
              Array<int32_t, 1> positions_, Array<int64_t, 1> logit_rows_, const KVPages& pages)
        : query_start(std::move(query_start_)),
          context_lens(std::move(context_lens_)),
          page_table(std::move(page_table_)),
          token_locations(std::move(token_locations_)),
          positions(std::move(positions_)),
          logit_rows(std::move(logit_rows_)),
          batch({.query_start = query_start.data(),
                 .context_lens = context_lens.data(),
                 .page_table = page_table.data(),
                 .token_locations = token_locations.data(),
                 .positions = positions.data(),
                 .logit_rows = logit_rows.data(),
                 .num_groups = static_cast<int64_t>(page_table.shape(0)),
                 .num_sequences = static_cast<int64_t>(context_lens.shape(0)),
                 .table_width = static_cast<int64_t>(page_table.shape(2)),
                 .num_tokens = static_cast<int64_t>(positions.shape(0)),
                 .num_logit_rows = static_cast<int64_t>(logit_rows.shape(0))},
                pages) {}
};

}  // namespace aioserve::ops
