#include "linear/weight_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <new>

namespace aioserve::linear {
namespace {

constexpr std::size_t kHugePage = std::size_t{1} << 21;
constexpr std::size_t kRegion = 16 * kHugePage;  // pages that no weight touches cost nothing

std::size_t round_up(std::size_t value, std::size_t unit) {
    return (value + unit - 1) / unit * unit;
}

class Region {
  public:
    explicit Region(std::size_t size) : mapped_(size + kHugePage), size_(size) {
        map_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (map_ == MAP_FAILED) throw std::bad_alloc();
        const auto address = reinterpret_cast<std::uintptr_t>(map_);
        start_ = static_cast<char*>(map_) + (round_up(address, kHugePage) - address);
#if defined(MADV_HUGEPAGE)
        madvise(start_, size_, MADV_HUGEPAGE);  // a wish: without it only speed is lost
#endif
    }
    ~Region() { munmap(map_, mapped_); }
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;

    std::size_t room() const { return size_ - used_; }
    char* take(std::size_t size) {
        char* memory = start_ + used_;
        used_ += size;
        return memory;
    }

  private:
    void* map_;
    std::size_t mapped_;
    char* start_;
    std::size_t size_;
    std::size_t used_ = 0;
};

std::mutex g_mutex;
std::weak_ptr<Region> g_open;  // where the next weight goes, if it fits

}  // namespace

std::shared_ptr<char> allocate_weights(std::size_t num_bytes) {
    const std::size_t size = round_up(num_bytes, 64);
    std::lock_guard lock(g_mutex);
    std::shared_ptr<Region> region = g_open.lock();
    if (!region || region->room() < size) {
        auto fresh = std::make_shared<Region>(std::max(kRegion, round_up(size, kHugePage)));
        char* memory = fresh->take(size);
        if (!region || fresh->room() > region->room()) g_open = fresh;
        return {fresh, memory};
    }
    return {region, region->take(size)};
}

}  // namespace aioserve::linear
