// How the integers of a unit, 16 inputs of 32 columns, lie in memory, and one column of it at a time.
// `unpack.inl` has the same for the vectors of tiles.

#pragma once

#include <cstddef>
#include <cstdint>

#include "linear/grouped/tile.h"

namespace aioserve::linear::grouped {

// That of integers of so many bits, or that choose from a table. False where there is none.
bool find_storage(int bits, bool has_table, Storage& storage);

// The 16 unsigned integers of `column`, to memory and back. Columns share no byte.
void store_column(Storage storage, const uint8_t* integers, char* unit, int column);
void load_column(Storage storage, const char* unit, int column, uint8_t* integers);

}  // namespace aioserve::linear::grouped
