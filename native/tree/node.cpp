#include "tree/node.h"

#include <cstring>

namespace aioserve {

size_t common_prefix(std::span<const Token> left, std::span<const Token> right) {
    constexpr size_t kBlock = 64;
    const size_t size = std::min(left.size(), right.size());
    size_t i = 0;
    while (i + kBlock <= size &&
           std::memcmp(&left[i], &right[i], kBlock * sizeof(Token)) == 0) {
        i += kBlock;
    }
    while (i < size && left[i] == right[i]) ++i;
    return i;
}

}  // namespace aioserve
