// Copies KV pages within a device's memory, and between it and pinned pages of the host.
//
// Compiled where it runs, from its text: it includes nothing.
//
// A cache is [planes, pages, heads, page bytes], where a plane is the keys or the values of a layer,
// and a page's first tokens are its first bytes. Planes and heads have nothing to do with each
// other, so each is one block's, which makes the copies one after the other. The threads wait for
// each other in between: a copy may read what the one before wrote.

struct Cache {
    char* storage;
    long long num_pages;
};

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

__device__ char* head_of(const Cache& cache, long long plane, long long page, long long head,
                         long long heads, long long page_bytes) {
    return cache.storage + ((plane * cache.num_pages + page) * heads + head) * page_bytes;
}

// Block (plane * heads + head). `page_bytes` and `token_bytes` are those of one head.
extern "C" __global__ void copy_pages(const Cache* caches, const Copy* copies, long long num_copies,
                                      long long heads, long long page_bytes,
                                      long long token_bytes) {
    const long long plane = blockIdx.x / heads;
    const long long head = blockIdx.x % heads;
    for (long long i = 0; i < num_copies; ++i) {
        const Copy copy = copies[i];
        const char* source = head_of(caches[copy.source_cache], plane, copy.source_page, head,
                                     heads, page_bytes);
        char* target = head_of(caches[copy.target_cache], plane, copy.target_page, head, heads,
                               page_bytes);
        if (source != target) copy_bytes(target, source, copy.tokens * token_bytes);
        __syncthreads();
    }
}
