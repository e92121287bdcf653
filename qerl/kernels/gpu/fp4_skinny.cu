// y = x W^T / divisor + bias + scale (x A^T) B^T for at most 8 rows of x and a weight in 4 bits (fp4_tiles.py), in
// one launch; PAIRED: the weight is gate and up, INTERLEAVED, and y = silu(gate) up.
//
// W is read once, in the order of the tensor cores' operands: a lane multiplies the very bytes it finds. A block owns
// a part of K and a run of strips (16 rows of W). It keeps its part of x, and each of its warps takes an equal run of
// (strip, 64 inputs) units, which the copy engine brings into a ring of the warp's own, without waiting for the
// others; sums that cross warps meet in shared memory, sums that cross blocks in `parts`, added in a fixed order by
// the block that arrives last. So the same call gives the same bits. (Prefetching into registers instead is 1.6 times
// slower: a warp has six scoreboards, and waiting for x means waiting for weights.)
//
// LoRA: x A^T is computed first, by the blocks that hold the strips of A, and left in `parts` for all; B is applied
// where sums are finished. A waits for nobody, and all blocks are resident at once, so nobody waits for ever.
//
// The grid may start before the kernel before it has ended (programmatic dependent launch): weights are fetched at
// once, x after `griddepcontrol.wait`.
//
// Given by the compiler's command line: WARPS, STAGES of CHUNK units in a warp's ring, RANK (0: no LoRA), INTERLEAVED,
// PAIRED, HEAVY.

#define COLS 8 // rows of x
#define THREADS (32 * WARPS)
#define STAGE (576 * CHUNK) // bytes: codes, then scales

struct Args {
    const u16 *x;         // bf16 [M, K], rows x_stride apart
    const uint4 *words;   // [strips, k_tiles, 32 lanes]
    const uint2 *scales;  // [strips, k_tiles, 8]
    const float *divisor; // [16 strips]
    const u16 *bias;      // bf16 [N] or null
    const u16 *a;         // bf16 [a_strips * 16, K]
    const u16 *b;         // bf16 [N, RANK]
    const int *column;    // first of the RANK rows of A for each 64 rows of W
    u16 *y;               // bf16 [M, N] or, paired, [M, N / 2]
    float *parts;         // [k_parts, strips + a_strips, 16, COLS]
    int *counts;          // [groups + 2], zero before and after: arrivals of each group, strips of A, blocks
    float scale;
    int m, n, k, x_stride, strips, a_strips, k_tiles, k_parts, groups, slots;
    int slots_at, ring_at; // bytes into shared memory
};

// The row of y that is row i of a strip.
static __device__ __forceinline__ int row_of(const Args &p, int strip, int i) {
    return INTERLEAVED ? strip * 8 + i % 8 + i / 8 * (p.n / 2) : strip * 16 + i;
}

static __device__ __forceinline__ float to_float(u16 v) { return __uint_as_float((u32)v << 16); }

static __device__ __forceinline__ u16 to_bf16(float v) {
    u16 out;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(v));
    return out;
}

static __device__ __forceinline__ void copy(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

static __device__ __forceinline__ void mma(float *c, const u32 *a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// What a lane needs of one unit, 64 inputs of a strip: its codes, its rows' scales, and x.
struct Unit {
    u32 word[4], x[4][2];
    u32 s[2];
};

// Unit i of the stage at `at`; `x_at`: the lane's address for ldmatrix at these inputs.
static __device__ __forceinline__ void load(Unit &v, u32 at, int i, int lane, u32 x_at) {
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "r"(at + i * 512 + lane * 16));
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];"
                 : "=r"(v.s[0]), "=r"(v.s[1])
                 : "r"(at + 512 * CHUNK + i * 64 + lane / 4 * 8));
#pragma unroll
    for (int j = 0; j < 2; j++) // two k16 at a time
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x[2 * j][0]), "=r"(v.x[2 * j][1]), "=r"(v.x[2 * j + 1][0]), "=r"(v.x[2 * j + 1][1])
                     : "r"(x_at + j * 64));
}

// Two sums, of even and of odd k16, so that products need not wait for each other.
static __device__ __forceinline__ void multiply(float acc[2][4], const Unit &v) {
    u32 a[16];
    decode(v.word, v.s, a);
#pragma unroll
    for (int q = 0; q < 4; q++) mma(acc[q % 2], a + 4 * q, v.x[q][0], v.x[q][1]);
}

static __device__ __forceinline__ void put(float *slot, float acc[4], int lane) { // [16 rows, COLS]
#pragma unroll
    for (int i = 0; i < 4; i++) slot[(lane / 4 + i / 2 * 8) * COLS + lane % 4 * 2 + i % 2] = acc[i];
}

static __device__ __forceinline__ void put(float *slot, float acc[2][4], int lane) {
#pragma unroll
    for (int i = 0; i < 4; i++) acc[0][i] += acc[1][i], acc[1][i] = 0.f;
    put(slot, acc[0], lane);
#pragma unroll
    for (int i = 0; i < 4; i++) acc[0][i] = 0.f;
}

// To a lane's cells those of a slot.
static __device__ __forceinline__ void plus(float *c, const float2 *slot, int lane) {
    const float2 upper = slot[lane], lower = slot[lane + 32];
    c[0] += upper.x, c[1] += upper.y, c[2] += lower.x, c[3] += lower.y;
}

#if RANK > 0
// x A^T of one strip of A over this block's inputs; its 16 x COLS sums go to `parts`.
static __device__ void low_rank(const Args &p, int strip, int k0, int k_count, const char *xs, int x_row, float *slots,
                                float *out) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    float acc[4] = {};
    const u16 *rows = p.a + (u64)(strip * 16 + g) * p.k + t * 16;
    for (int tile = warp; tile < k_count; tile += WARPS) {
        int at = (k0 + tile) * 64;
        uint4 v[4] = {};
        if (at + t * 16 < p.k) { // of 16 inputs a lane has all or none: K is a multiple of 16
            const uint4 *upper = (const uint4 *)(rows + at), *lower = (const uint4 *)(rows + at + (u64)8 * p.k);
            v[0] = upper[0], v[1] = upper[1], v[2] = lower[0], v[3] = lower[1];
        }
        const u32 *up = (const u32 *)&v[0], *low = (const u32 *)&v[2];
#pragma unroll
        for (int q = 0; q < 4; q++) { // lane t's inputs 16 t + 4 q ... of both operands: their order is free
            u32 a[4] = {up[2 * q], low[2 * q], up[2 * q + 1], low[2 * q + 1]};
            uint2 b = *(const uint2 *)(xs + g * x_row + tile * 128 + t * 32 + q * 8);
            mma(acc, a, b.x, b.y);
        }
    }
    put(slots + warp * 16 * COLS, acc, lane);
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * COLS; i += THREADS) {
        float sum = 0.f;
        for (int w = 0; w < WARPS; w++) sum += slots[w * 16 * COLS + i];
        out[i] = sum;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(p.counts + p.groups, 1);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) skinny(const __grid_constant__ Args p) {
    extern __shared__ __align__(16) char shared[];
    __shared__ int arrived, first[WARPS]; // first: the strip that each warp begins with
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int group = blockIdx.x % p.groups, part = blockIdx.x / p.groups;
    const int k0 = p.k_tiles * part / p.k_parts, k_count = p.k_tiles * (part + 1) / p.k_parts - k0;
    const int x_row = k_count * 128 + 16; // bytes: the pad keeps ldmatrix free of bank conflicts
    char *xs = shared;
    float *slots = (float *)(shared + p.slots_at); // [WARPS, slots, 16, COLS]

    // This block's strips. A strip of A weighs as much as HEAVY strips of W; those come first.
    const int heavy = p.a_strips * HEAVY, weight = heavy + p.strips;
    const int from = (int)((u64)weight * group / p.groups), to = (int)((u64)weight * (group + 1) / p.groups);
    const int a0 = min((from + HEAVY - 1) / HEAVY, p.a_strips), a1 = min((to + HEAVY - 1) / HEAVY, p.a_strips);
    const int s0 = max(from - heavy, 0), count = max(to - heavy, 0) - s0;
    const int units = count * k_count;
    const int u0 = (int)((u64)units * warp / WARPS), u1 = (int)((u64)units * (warp + 1) / WARPS);
    asm volatile("griddepcontrol.launch_dependents;");

    const u32 ring = (u32)__cvta_generic_to_shared(shared) + p.ring_at + warp * STAGES * STAGE;
    const u32 barriers = (u32)__cvta_generic_to_shared(shared) + p.ring_at + WARPS * STAGES * STAGE + warp * STAGES * 8;
    if (lane == 0) first[warp] = u0 / max(k_count, 1);
    // What is fetched next: the unit, how many its strip has left, and where they lie.
    int ahead = u0, ahead_strip = u0 / max(k_count, 1), ahead_left = k_count - (u0 - ahead_strip * k_count);
    u32 ahead_at = (u32)(s0 + ahead_strip) * p.k_tiles + k0 + k_count - ahead_left;
    auto fetch = [&](int stage) {
        if (ahead < u1) {
            const int n = min(CHUNK, min(ahead_left, u1 - ahead));
            const u32 to_ = ring + stage * STAGE, barrier = barriers + stage * 8;
            expect(barrier, n * 576);
            copy(to_, p.words + (u64)ahead_at * 32, n * 512, barrier);
            copy(to_ + 512 * CHUNK, p.scales + (u64)ahead_at * 8, n * 64, barrier);
            ahead += n, ahead_at += n, ahead_left -= n;
            if (ahead_left == 0) {
                ahead_at = (u32)(s0 + ++ahead_strip) * p.k_tiles + k0;
                ahead_left = k_count;
            }
        }
    };
    if (chosen()) {
        for (int i = 0; i < STAGES; i++) begin(barriers + i * 8, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async;" ::: "memory");
        for (int i = 0; i < STAGES; i++) fetch(i);
    }
    __syncwarp();

    // Rows and inputs that x has not are zero. What sums will need at the end is brought near.
    const int k_end = min(p.k - k0 * 64, k_count * 64), x_bytes = k_end * 2;
    for (int row = 0; row < COLS; row++)
        for (int i = (row < p.m ? x_bytes : 0) + threadIdx.x * 16; i < k_count * 128; i += THREADS * 16)
            *(uint4 *)(xs + row * x_row + i) = make_uint4(0, 0, 0, 0);
    for (int i = threadIdx.x; i < count * (RANK > 0 ? RANK / 4 : 1); i += THREADS) { // 16 rows of B are RANK / 4 lines
        int local = i / (RANK > 0 ? RANK / 4 : 1), line = i % (RANK > 0 ? RANK / 4 : 1);
        const int strip = s0 + local;
        if (line == 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(p.divisor + strip * 16));
#if RANK > 0
        const int row = row_of(p, strip, line / (RANK / 8) * 8); // eight at a time lie together
        if (row < p.n) asm volatile("prefetch.global.L2 [%0];" ::"l"(p.b + (u64)row * RANK + line % (RANK / 8) * 64));
#endif
    }
#if RANK > 0
    for (int i = threadIdx.x; i < (a1 - a0) * 16 * k_count; i += THREADS) // 64 inputs of a row of A are a line
        if ((k0 + i % k_count) * 64 < p.k)
            asm volatile("prefetch.global.L2 [%0];"
                         ::"l"(p.a + (u64)(a0 * 16 + i / k_count) * p.k + (k0 + i % k_count) * 64));
#endif
    const u32 x_barrier = (u32)__cvta_generic_to_shared(shared) + p.ring_at + WARPS * STAGES * (STAGE + 8);
    if (warp == 0 && chosen()) {
        begin(x_barrier, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async;" ::: "memory");
        asm volatile("griddepcontrol.wait;" ::: "memory");
        expect(x_barrier, p.m * x_bytes);
        for (int row = 0; row < p.m; row++)
            copy((u32)__cvta_generic_to_shared(xs) + row * x_row, p.x + (u64)row * p.x_stride + k0 * 64, x_bytes,
                 x_barrier);
    } else {
        asm volatile("griddepcontrol.wait;" ::: "memory");
    }
    __syncthreads();
    wait(x_barrier, 0);

#if RANK > 0
    for (int i = a0; i < a1; i++)
        low_rank(p, i, k0, k_count, xs, x_row, slots,
                 p.parts + ((u64)part * (p.strips + p.a_strips) + p.strips + i) * 16 * COLS);
#endif

    float acc[2][4] = {};
    float *slot = slots + warp * p.slots * 16 * COLS;
    const u32 x_lane = (u32)__cvta_generic_to_shared(xs) + lane % 8 * x_row + lane / 8 * 16;
    int inner = u0 % max(k_count, 1), stage = 0, phase = 0;
    for (int u = u0; u < u1;) {
        const int n = min(CHUNK, min(k_count - inner, u1 - u));
        const u32 at = ring + stage * STAGE;
        wait(barriers + stage * 8, phase);
        Unit v[2];
        int i = 0;
#pragma unroll 1
        for (; i + 4 <= n; i += 4) { // while one unit is multiplied, the next is loaded
            load(v[0], at, i, lane, x_lane + (inner + i) * 128);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (j < 3) load(v[(j + 1) % 2], at, i + j + 1, lane, x_lane + (inner + i + j + 1) * 128);
                multiply(acc, v[j % 2]);
            }
        }
#pragma unroll 1
        for (; i < n; i++) {
            load(v[0], at, i, lane, x_lane + (inner + i) * 128);
            multiply(acc, v[0]);
        }
        __syncwarp();
        if (chosen()) fetch(stage);
        if (++stage == STAGES) stage = 0, phase ^= 1;
        u += n, inner += n;
        if (inner == k_count || u == u1) {
            inner = 0;
            put(slot, acc, lane);
            slot += 16 * COLS;
        }
    }
    __syncthreads();

    // A warp for each strip; a lane has the cells that the tensor cores gave it: rows g and g + 8, columns 2t and 2t + 1.
    const u64 step = (u64)(p.strips + p.a_strips) * 16 * COLS;
    auto cells = [&](int local, float *c) { // over this block's warps, in their order
        c[0] = c[1] = c[2] = c[3] = 0.f;
#pragma unroll 1
        for (int v = 0; v < WARPS; v++) {
            int f = (int)((u64)units * v / WARPS), l = (int)((u64)units * (v + 1) / WARPS);
            if (f < (local + 1) * k_count && l > local * k_count && f < l)
                plus(c, (const float2 *)(slots + (v * p.slots + local - first[v]) * 16 * COLS), lane);
        }
    };
    bool finishes = true;
    int order = -1; // of this block among those that need the counts no more
    if (p.k_parts > 1) {
        for (int local = warp; local < count; local += WARPS) {
            float c[4];
            cells(local, c);
            float2 *to_ = (float2 *)(p.parts + part * step + (u64)(s0 + local) * 16 * COLS);
            to_[lane] = make_float2(c[0], c[1]), to_[lane + 32] = make_float2(c[2], c[3]);
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) arrived = atomicAdd(p.counts + group, 1);
        __syncthreads();
        finishes = arrived == p.k_parts - 1;
        __threadfence();
    }
    if (finishes) {
#if RANK > 0
        if (threadIdx.x == 0)
            while (look(p.counts + p.groups) < p.a_strips * p.k_parts) __nanosleep(20);
        __syncthreads();
        u32 *low = (u32 *)xs; // scale x A^T, pairs of its columns [8 a_strips, COLS]: nobody reads x any more
        for (int i = threadIdx.x; i < p.a_strips * 8 * COLS; i += THREADS) {
            const float *from_ = p.parts + (u64)p.strips * 16 * COLS + i / COLS * 2 * COLS + i % COLS;
            float even = 0.f, odd = 0.f;
            for (int q = 0; q < p.k_parts; q++) even += __ldcg(from_ + q * step), odd += __ldcg(from_ + q * step + COLS);
            low[i] = to_pair(p.scale * even, p.scale * odd);
        }
#endif
        if (threadIdx.x == 0 && (RANK > 0 || p.k_parts > 1)) order = atomicAdd(p.counts + p.groups + 1, 1);
        __syncthreads();
        const int g = lane / 4, t = lane % 4;
        for (int i = warp; i < count; i += WARPS) {
            const int strip = s0 + i, upper = row_of(p, strip, g), lower = row_of(p, strip, g + 8);
#if RANK > 0
            u32 b[RANK / 16][4];
#pragma unroll
            for (int r = 0; r < RANK / 16; r++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    b[r][j] = __ldg((const u32 *)(p.b + (u64)min(j % 2 ? lower : upper, p.n - 1) * RANK) + r * 8 + j / 2 * 4 + t);
#endif
            float c[4] = {};
            if (p.k_parts == 1)
                cells(i, c);
            else
                for (int q = 0; q < p.k_parts; q++)
                    plus(c, (const float2 *)(p.parts + q * step + (u64)strip * 16 * COLS), lane);
            const float f = 128.f / p.divisor[strip * 16 + g], h = 128.f / p.divisor[strip * 16 + g + 8];
            c[0] *= f, c[1] *= f, c[2] *= h, c[3] *= h;
#if RANK > 0
            auto inner_of = [&](int row) { return low + (p.column[row / 64] / 2 + t) * COLS + g; };
            const u32 *at = inner_of(upper);
#if INTERLEAVED
            const u32 *up_at = inner_of(lower);
#endif
#pragma unroll
            for (int r = 0; r < RANK / 16; r++) {
                const u32 *v = b[r];
#if INTERLEAVED // gate's rows and up's have inner products of their own
                const u32 gate[4] = {v[0], 0, v[2], 0}, up[4] = {0, v[1], 0, v[3]};
                mma(c, gate, at[r * 8 * COLS], at[(r * 8 + 4) * COLS]);
                mma(c, up, up_at[r * 8 * COLS], up_at[(r * 8 + 4) * COLS]);
#else
                mma(c, v, at[r * 8 * COLS], at[(r * 8 + 4) * COLS]);
#endif
            }
#endif
            if (p.bias) {
                const float v = upper < p.n ? to_float(p.bias[upper]) : 0.f, w = lower < p.n ? to_float(p.bias[lower]) : 0.f;
                c[0] += v, c[1] += v, c[2] += w, c[3] += w;
            }
#if PAIRED
            c[0] = swiglu(c[0], c[2]), c[1] = swiglu(c[1], c[3]);
#endif
            const int width = PAIRED ? p.n / 2 : p.n;
#pragma unroll
            for (int j = 0; j < (PAIRED ? 2 : 4); j++) {
                const int m = 2 * t + j % 2, n = j / 2 ? lower : upper;
                if (n < width && m < p.m) p.y[(u64)m * width + n] = to_bf16(c[j]);
            }
        }
    } else if (threadIdx.x == 0)
        order = atomicAdd(p.counts + p.groups + 1, 1);
    if (order == gridDim.x - 1) // the last of all leaves the counts as they were
        for (int i = 0; i < p.groups + 2; i++) p.counts[i] = 0;
}
