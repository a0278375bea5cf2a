// Copies KV pages within a device's memory, and between it and pinned pages of the host.
//
// Compiled where it runs, from its text: it includes nothing.
//
// A cache is [pages, parts, part bytes], where a part is one head's keys or values in one layer, and
// its first tokens are its first bytes. Parts have nothing to do with each other, so each is one
// block's, which makes the copies one after the other: together the blocks copy a page as one run of
// memory. The threads wait for each other in between: a copy may read what the one before wrote.

struct Copy {
    int source_cache, source_page, target_cache, target_page, tokens;
};

struct alignas(16) Word16 {
    unsigned words[4];
};

template <typename Word>
__device__ void copy_words(char* target, const char* source, long long bytes) {
    Word* to = reinterpret_cast<Word*>(target);
    const Word* from = reinterpret_cast<const Word*>(source);
    const long long count = bytes / static_cast<long long>(sizeof(Word));
    for (long long i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}

// In the widest words that the addresses and the length are multiples of.
__device__ void copy_bytes(char* target, const char* source, long long bytes) {
    const unsigned long long all = reinterpret_cast<unsigned long long>(target) |
                                   reinterpret_cast<unsigned long long>(source) |
                                   static_cast<unsigned long long>(bytes);
    if (all % 16 == 0)
        copy_words<Word16>(target, source, bytes);
    else if (all % 8 == 0)
        copy_words<unsigned long long>(target, source, bytes);
    else if (all % 4 == 0)
        copy_words<unsigned>(target, source, bytes);
    else if (all % 2 == 0)
        copy_words<unsigned short>(target, source, bytes);
    else
        copy_words<char>(target, source, bytes);
}

// The block's part of a page.
__device__ char* part_of(char* storage, long long page, long long part_bytes) {
    return storage + (page * gridDim.x + blockIdx.x) * part_bytes;
}

// A block for each part. `storages`: the memory of each cache. `token_bytes`: of a token in a part.
extern "C" __global__ void copy_pages(char* const* storages, const Copy* copies, long long num_copies,
                                      long long part_bytes, long long token_bytes) {
    for (long long i = 0; i < num_copies; ++i) {
        const Copy copy = copies[i];
        const char* source = part_of(storages[copy.source_cache], copy.source_page, part_bytes);
        char* target = part_of(storages[copy.target_cache], copy.target_page, part_bytes);
        if (source != target) copy_bytes(target, source, copy.tokens * token_bytes);
        __syncthreads();
    }
}
