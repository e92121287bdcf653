// y = x W^T / divisor + bias + (scale x A^T) B^T for a weight in 4 bits (fp4_tiles.py), in one launch, on Hopper;
// PAIRED: the weight is gate and up, INTERLEAVED, and y = silu(gate) up.
//
// The product is y^T = W x^T on warpgroup tensor cores: W's codes are decoded into registers, which may be the left
// operand, and x is the right one, from shared memory. A block computes tiles of 64 CW rows of W and BM rows of x. A
// producer thread has the copy engine bring 128 inputs at a time into a ring; each of CW warpgroups decodes 64 rows,
// and while the tensor cores are at one piece, the next is decoded.
//
// Blocks take whole tiles while there is one for each. What is left over is cut into units (tile, 128 inputs), and each
// block takes an equal run of them, whatever tiles it crosses. Sums of a tile that several share are left in `parts`;
// each of them then waits for the others and finishes a share of the tile. All blocks are resident at once, so nobody
// waits for ever. Nothing is added atomically: the same call gives the same bits.
//
// LoRA: units of x A^T come first, spread over the blocks, and leave their sums in `a_parts`; three warps of each block
// add these up while the others go on. The result comes through the ring as x does, and is multiplied by B in the block
// that has a tile's first inputs, after all others it has of that tile.
//
// The grid may start before the kernel before it has ended (programmatic dependent launch): weights are fetched at
// once, and LoRA's A and B read; all else comes after `griddepcontrol.wait`. So nothing may write weights or adapter in
// a launch that lets its successors come early (`launch.early`).
//
// Given by the compiler's command line: BM, CW, STAGES of the ring, RANK (0: no LoRA), INTERLEAVED, PAIRED, REGISTERS of
// a consumer and of the OTHERS (0: as they come). `multiply`, the instruction for 64 x BM x 16, is written out by
// fp4_wgmma.py.

#define KT 2       // tiles of 64 inputs in a stage of the ring
#define STRIP (KT * 512)       // bytes of codes: 16 rows of W
#define SCALES_AT (WARPS * STRIP) // into the weights of a stage
#define W_BYTES (WARPS * KT * 576)
#define X_BYTES (128 * BM)
#define W_AT (STAGES * KT * X_BYTES) // x first: its tiles must lie at multiples of 1024
#define BARRIERS_AT (W_AT + STAGES * W_BYTES)
#define WARPS (4 * CW)
#define HELPERS 3 // warps of LoRA
#define CHUNK (RANK < 32 ? 16 : 32) // of the rank, at once
#define STEP (INTERLEAVED ? 8 : 16) // from the first row of y in a strip to that in the next

struct __align__(64) Map {
    char bytes[128];
};

struct Args {
    Map x_map;            // of x: KT tiles of BM rows and 64 inputs
    Map words_map;        // of the weight's codes: WARPS strips and KT tiles
    Map scales_map;
    Map low_map;          // of `low`: BM rows and 64 columns
    const float *divisor; // [16 strips]
    const u16 *bias;      // bf16 [N] or null
    const u16 *a;         // bf16 [16 a_strips, K]
    const u16 *b;         // bf16 [N, RANK]
    const int *column;    // first of the RANK rows of A for each 64 rows of y
    u16 *y;               // bf16 [M, N] or, paired, [M, N / 2]
    u16 *low;             // bf16 [M to a multiple of 8, 16 a_strips]: scale x A^T
    float *parts;         // [2 blocks, WARPS, BM / 8, 32, 4]
    float *a_parts;       // [k_units, a_strips, M to a multiple of 8, 16]
    int *counts;          // zero before and after: pieces of x A^T, helpers done, blocks done, then one a tile
    float scale;
    int m, n, k, strips, k_tiles, k_units, m_tiles;
    int waves, per, total;        // whole tiles of a block; then units of a block, LoRA's included, and of all
    int a_strips, a_each, a_more; // LoRA: units of x A^T that each block has, and how many blocks have one more
};

// From row g of a strip to row g + 8, in y; and where rows g end.
static __device__ __forceinline__ int apart(const Args &p) { return INTERLEAVED ? p.n / 2 : 8; }
static __device__ __forceinline__ int uppers(const Args &p) { return INTERLEAVED ? p.n / 2 : p.n; }

static __device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

static __device__ __forceinline__ void copy(u32 to, const Map *map, int i, int j, int k, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(to), "l"(map), "r"(i), "r"(j), "r"(k), "r"(barrier)
                 : "memory");
}

static __device__ __forceinline__ void copy(u32 to, const Map *map, int i, int j, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(i), "r"(j), "r"(barrier)
                 : "memory");
}

// All `threads` that come to this barrier have written what other blocks will read: count it.
static __device__ __forceinline__ void report(int *count, int barrier, int threads, bool first) {
    __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
    if (first) {
        __threadfence();
        atomicAdd(count, 1);
    }
}

static __device__ __forceinline__ void await(const int *count, int wanted, int barrier, int threads, bool first) {
    if (first) {
        while (look(count) < wanted) __nanosleep(20);
        __threadfence();
    }
    __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// COUNT times eight rows of x, from m0 on, and a strip: `c` as the tensor cores leave it, rows g and g + 8 of the strip,
// rows 2t and 2t + 1 of x.
template <int COUNT> static __device__ __forceinline__ void finish(const Args &p, int strip, int m0, int lane, float *c) {
    const int g = lane / 4, t = lane % 4, n = strip * STEP + g, width = PAIRED ? p.n / 2 : p.n;
    const float upper = p.bias && n < uppers(p) ? __uint_as_float((u32)__ldg(p.bias + n) << 16) : 0.f;
    const float lower = p.bias && n + apart(p) < p.n ? __uint_as_float((u32)__ldg(p.bias + n + apart(p)) << 16) : 0.f;
#pragma unroll
    for (int q = 0; q < COUNT; q++) {
        const float v[4] = {c[4 * q] + upper, c[4 * q + 1] + upper, c[4 * q + 2] + lower, c[4 * q + 3] + lower};
#if PAIRED
        const u32 out[1] = {to_pair(swiglu(v[0], v[2]), swiglu(v[1], v[3]))};
#else
        const u32 out[2] = {to_pair(v[0], v[1]), to_pair(v[2], v[3])};
#endif
#pragma unroll
        for (int i = 0; i < 2 - PAIRED; i++) {
            u32 two; // now row g of x, and of the strip's half 2t and 2t + 1
            asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(two) : "r"(out[i]));
            const int m = m0 + 8 * q + g, at = strip * STEP + i * apart(p) + 2 * t;
            if (m < p.m && at < (i ? p.n : uppers(p))) *(u32 *)(p.y + (u64)m * width + at) = two;
        }
    }
}

// What a block does, one after another: inputs k to k + run, in units, of a tile.
struct Runs {
    int wave, unit, end, tile, k, run;

    __device__ __forceinline__ Runs(const Args &p, int a0, int a1)
        : wave(0), unit(min(p.total, (int)blockIdx.x * p.per - a0)), end(min(p.total, ((int)blockIdx.x + 1) * p.per - a1)) {}

    __device__ __forceinline__ bool next(const Args &p) {
        if (wave < p.waves) {
            tile = wave++ * gridDim.x + blockIdx.x, k = 0, run = p.k_units;
            return true;
        }
        if (unit >= end) return false;
        tile = unit / p.k_units, k = unit - tile * p.k_units, run = min(p.k_units - k, end - unit);
        unit += run, tile += p.waves * gridDim.x;
        return true;
    }
};

// The block that has a unit of those that are left over.
static __device__ __forceinline__ int block_of(const Args &p, int unit) {
    const int less = p.per - p.a_each - 1; // units of the first a_more blocks
    return unit < p.a_more * less ? unit / less : (unit + p.a_more) / (less + 1);
}

#if RANK > 0
static __device__ __forceinline__ float4 operator+(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// x A^T: report this block's pieces and, when all are there, compute this warp's share of the sums. Four lanes have 16
// rows of A, eight the pieces.
static __device__ __forceinline__ void low_rank(const Args &p, int warp, int lane, u32 a_done, int pieces) {
    const int rows = (p.m + 7) / 8 * 8, t = lane % 4;
    const bool first = warp == 0 && lane == 0;
    if (first && pieces > 0) {
        wait(a_done, 0);
        __threadfence();
        atomicAdd(p.counts, pieces);
    }
    await(p.counts, p.k_units * p.m_tiles, 2, 32 * HELPERS, first);
    const u64 step = (u64)p.a_strips * rows * 4; // float4 of a piece
    for (int job = blockIdx.x * HELPERS + warp; job < p.a_strips * p.m; job += gridDim.x * HELPERS) {
        const int strip = job % p.a_strips, m = job / p.a_strips;
        const float4 *from = (const float4 *)p.a_parts + ((u64)strip * rows + m) * 4 + t;
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
        for (int k = lane / 4; k < p.k_units; k += 8) sum = sum + __ldcg(from + k * step);
#pragma unroll
        for (int o = 4; o < 32; o *= 2) {
            float4 other = make_float4(__shfl_xor_sync(~0u, sum.x, o), __shfl_xor_sync(~0u, sum.y, o),
                                       __shfl_xor_sync(~0u, sum.z, o), __shfl_xor_sync(~0u, sum.w, o));
            sum = lane & o ? other + sum : sum + other;
        }
        if (lane < 4)
            *(uint2 *)(p.low + (u64)m * p.a_strips * 16 + strip * 16 + t * 4) =
                make_uint2(to_pair(p.scale * sum.x, p.scale * sum.y), to_pair(p.scale * sum.z, p.scale * sum.w));
    }
    asm volatile("fence.proxy.async;" ::: "memory"); // the copy engine will read it
    report(p.counts + 1, 2, 32 * HELPERS, first);
}
#endif

extern "C" __global__ void __launch_bounds__(128 * CW + 128, 1) linear(const __grid_constant__ Args p) {
    extern __shared__ char unaligned[];
    const u32 shared = ((u32)__cvta_generic_to_shared(unaligned) + 1023) / 1024 * 1024;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int a0 = blockIdx.x * p.a_each + min((int)blockIdx.x, p.a_more), a1 = a0 + p.a_each + (blockIdx.x < p.a_more);
    Runs runs(p, a0, a1);
    const u32 full = shared + BARRIERS_AT, empty = full + 8 * STAGES, a_done = empty + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) begin(full + 8 * i, 1), begin(empty + 8 * i, WARPS);
        if (a1 > a0) begin(a_done, WARPS * (a1 - a0));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async;" ::: "memory");
    }
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;");

    if (warp >= WARPS) { // the producer, and LoRA's helpers
#if REGISTERS
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(OTHERS));
#endif
        if (warp == WARPS) {
            if (chosen()) {
                for (const Map *map : {&p.x_map, &p.low_map}) // what comes after the wait should not wait for its map
                    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
                auto bring_w = [&](int i, int tile, int k) {
                    const u32 to = shared + W_AT + i * W_BYTES, barrier = full + 8 * i;
                    expect(barrier, KT * X_BYTES + W_BYTES);
                    copy(to, &p.words_map, 0, KT * k, tile / p.m_tiles * WARPS, barrier);
                    copy(to + SCALES_AT, &p.scales_map, 0, KT * k, tile / p.m_tiles * WARPS, barrier);
                };
                auto bring_x = [&](int i, int m_tile, int k) {
                    copy(shared + i * KT * X_BYTES, &p.x_map, 0, m_tile * BM, KT * k, full + 8 * i);
                };
                int stage = 0, phase = 1; // a new barrier's phase before the first counts as done
                auto next = [&] {
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                };
                Runs first = runs;
                const bool any = first.next(p);
                const int ahead = any ? max(0, min(STAGES - (a1 - a0), first.run)) : 0;
#pragma unroll 1
                for (int i = 0; i < ahead; i++) bring_w(a1 - a0 + i, first.tile, first.k + i);
                asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll 1
                for (int a = a0; a < a1; a++, next()) {
                    wait(empty + 8 * stage, phase);
                    expect(full + 8 * stage, KT * X_BYTES);
                    bring_x(stage, a / p.k_units, a % p.k_units);
                }
#pragma unroll 1
                for (int i = 0; i < ahead; i++) bring_x(a1 - a0 + i, first.tile % p.m_tiles, first.k + i);
                for (int done = ahead; runs.next(p); done = 0) { // as the others take them
#pragma unroll 1
                    for (int i = 0; i < runs.run; i++, next())
                        if (i >= done) {
                            wait(empty + 8 * stage, phase);
                            bring_w(stage, runs.tile, runs.k + i), bring_x(stage, runs.tile % p.m_tiles, runs.k + i);
                        }
#if RANK > 0
                    if (runs.k == 0) {
                        while (look(p.counts + 1) < (int)gridDim.x) __nanosleep(20);
                        asm volatile("fence.proxy.async;" ::: "memory");
#pragma unroll 1
                        for (int c = 0; c < 16 * p.a_strips; c += 64 * KT, next()) {
                            wait(empty + 8 * stage, phase);
                            expect(full + 8 * stage, KT * X_BYTES);
                            for (int j = 0; j < KT; j++)
                                copy(shared + (stage * KT + j) * X_BYTES, &p.low_map, c + 64 * j,
                                     runs.tile % p.m_tiles * BM, full + 8 * stage);
                        }
                    }
#endif
                }
            }
        }
#if RANK > 0
        else {
            asm volatile("griddepcontrol.wait;" ::: "memory");
            low_rank(p, warp - WARPS - 1, lane, a_done, a1 - a0);
        }
#endif
        return;
    }

#if REGISTERS
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
    float acc[BM / 2];
    const u32 words = shared + W_AT + warp * STRIP + lane * 16;
    const u32 scales = shared + W_AT + SCALES_AT + warp * KT * 64 + lane / 4 * 8;
    const u64 x_form = (u64)1 << 62 | (u64)64 << 32 | (u64)1 << 16 | shared >> 4; // rows of 128 bytes, swizzled
    int stage = 0, phase = 0;
    bool waited = false;
    int first_tile = -1, last_tile = -1; // tiles of which this block has a part only
    u32 even[16], odd[16] = {};
#if RANK > 0
#pragma unroll 1
    for (int a = a0; a < a1; a++) { // 128 inputs of x A^T
        const int m_tile = a / p.k_units, k = a - m_tile * p.k_units, rows = (p.m + 7) / 8 * 8;
        const int last = (p.a_strips + 3) / 4 - 1;
#pragma unroll 1
        for (int group = warp / 4; group <= last; group += CW) {
            const int strip = min(group * 4 + warp % 4, p.a_strips - 1);
            const u32 *upper = (const u32 *)(p.a + (u64)(strip * 16 + lane / 4) * p.k + k * 128) + lane % 4;
            const u32 *lower = upper + (u64)4 * p.k;
            const bool whole = 2 * k + 1 < p.k_tiles;
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int at = i / 4 * 8 + i % 4 / 2 * 4;
                even[i] = __ldg((i % 2 ? lower : upper) + at);
                odd[i] = whole ? __ldg((i % 2 ? lower : upper) + 32 + at) : 0;
            }
            wait(full + 8 * stage, phase);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int i = 0; i < 8; i++)
                multiply(acc, (i < 4 ? even : odd) + i % 4 * 4,
                         x_form + (u32)((stage * KT + i / 4) * X_BYTES >> 4) + i % 4 * 2, i > 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
            for (int i = 0; i < BM / 2; i++) asm volatile("" : "+f"(acc[i])::"memory");
            if (!waited) {
                asm volatile("griddepcontrol.wait;" ::: "memory"); // from here on memory is written
                waited = true;
            }
            float *out = p.a_parts + (((u64)k * p.a_strips + strip) * rows + m_tile * BM + lane % 4 * 2) * 16 + lane / 4;
            const int left = strip == group * 4 + warp % 4 ? rows - m_tile * BM : 0;
#pragma unroll
            for (int q = 0; q < BM / 8; q++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (q * 8 < left) __stcg(out + (q * 8 + i % 2) * 16 + i / 2 * 8, acc[4 * q + i]);
        }
        wait(full + 8 * stage, phase); // also those without rows: in step with the ring
        __syncwarp();
        if (lane == 0) arrive(empty + 8 * stage), arrive(a_done);
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
#endif
    while (runs.next(p)) {
        const int tile = runs.tile, k = runs.k, run = runs.run;
        const int strip = tile / p.m_tiles * WARPS + warp, m0 = tile % p.m_tiles * BM;
#if RANK > 0
        u32 b[CHUNK / 16][4]; // the first of the strip's B, early
        auto read_b = [&](int r) {
            const int upper = min(strip * STEP + lane / 4, uppers(p) - 1), lower = min(upper + apart(p), p.n - 1);
#pragma unroll
            for (int i = 0; i < CHUNK / 16; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    b[i][j] = __ldg((const u32 *)(p.b + (u64)(j % 2 ? lower : upper) * RANK + r) + lane % 4 + i * 8 + j / 2 * 4);
        };
        if (k == 0) read_b(0);
#if !INTERLEAVED
        const int column = __ldg(p.column + min(strip * 16, p.n - 1) / 64);
#endif
#endif
        const int divisors = min(strip, p.strips - 1) * 16 + lane / 4;
        const float f = 128.f / __ldg(p.divisor + divisors), h = 128.f / __ldg(p.divisor + divisors + 8);
        int held = -1; // the stage that the tensor cores may still be reading
        auto piece = [&](u32 *a, const u32 *before, int j, bool add) {
            const u32 at = stage * W_BYTES;
            u32 w[4], s[2];
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                         : "r"(words + at + j * 512));
            asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(s[0]), "=r"(s[1]) : "r"(scales + at + j * 64));
            decode(w, s, a); // while the tensor cores are at the piece before
            const u64 x_at = x_form + (u32)((stage * KT + j) * X_BYTES >> 4);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int q = 0; q < 4; q++) multiply(acc, a + 4 * q, x_at + 2 * q, add || q > 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); // that piece is done
#pragma unroll
            for (int i = 0; i < 16; i++) asm volatile("" ::"r"(before[i])); // and its registers are free
            if (j == 0 && held >= 0 && lane == 0) arrive(empty + 8 * held);
        };
#pragma unroll 1
        for (int i = 0; i < run; i++) {
            wait(full + 8 * stage, phase);
            piece(even, odd, 0, i > 0);
            piece(odd, even, 1, true);
            held = stage;
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
#if RANK > 0 && INTERLEAVED
        const int first = min(strip * 8, p.n / 2 - 1); // not early: registers are few
        const int column = __ldg(p.column + first / 64), up_column = __ldg(p.column + (p.n / 2 + first) / 64);
#endif
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int i = 0; i < BM / 2; i++) asm volatile("" : "+f"(acc[i])::"memory");
        if (lane == 0) arrive(empty + 8 * held);
#pragma unroll
        for (int i = 0; i < BM / 2; i++) acc[i] *= i % 4 < 2 ? f : h;
#if RANK > 0
        if (k == 0) {
            const int before = stage; // columns lie in this stage and, if they are more than 128, the ones after it
            auto add = [&](u32 *a, int c) {
                const int at = before + c / 128 < STAGES ? before + c / 128 : before + c / 128 - STAGES;
                multiply(acc, a, x_form + (u32)((at * KT + c % 128 / 64) * X_BYTES >> 4) + c % 64 / 8, 1);
            };
#pragma unroll 1
            for (int c = 0; c < 16 * p.a_strips; c += 64 * KT) {
                wait(full + 8 * stage, phase);
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
#pragma unroll 1
            for (int r = 0; r < RANK; r += CHUNK) {
                if (r > 0) read_b(r);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int i = 0; i < CHUNK / 16; i++) {
#if INTERLEAVED
                    u32 gate[4] = {b[i][0], 0, b[i][2], 0}, up[4] = {0, b[i][1], 0, b[i][3]};
                    add(gate, column + r + 16 * i);
                    add(up, up_column + r + 16 * i);
#else
                    add(b[i], column + r + 16 * i);
#endif
                }
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            }
#pragma unroll
            for (int i = 0; i < BM / 2; i++) asm volatile("" : "+f"(acc[i])::"memory");
            for (int c = 0, i = before; c < 16 * p.a_strips; c += 64 * KT) {
                if (lane == 0) arrive(empty + 8 * i);
                if (++i == STAGES) i = 0;
            }
        }
#endif
        if (!waited) {
            asm volatile("griddepcontrol.wait;" ::: "memory"); // from here on memory is written
            waited = true;
        }
        if (run == p.k_units) {
            finish<BM / 8>(p, strip, m0, lane, acc);
        } else {
            const int slot = 2 * blockIdx.x + (k > 0 ? 0 : 1); // the end of a tile, or its beginning
            float4 *out = (float4 *)p.parts + ((u64)slot * WARPS + warp) * (BM / 8) * 32 + lane;
#pragma unroll
            for (int q = 0; q < BM / 8; q++)
                __stcg(out + q * 32, make_float4(acc[4 * q], acc[4 * q + 1], acc[4 * q + 2], acc[4 * q + 3]));
            report(p.counts + 4 + tile, 1, 32 * WARPS, threadIdx.x == 0);
            first_tile = first_tile < 0 ? tile : first_tile;
            last_tile = tile;
        }
    }
    for (int tile = first_tile; tile >= 0; tile = tile < last_tile ? last_tile : -1) {
        const int begin_ = (tile - p.waves * (int)gridDim.x) * p.k_units;
        const int owner = block_of(p, begin_), closer = block_of(p, begin_ + p.k_units - 1);
        const int sharers = closer - owner + 1, share = blockIdx.x - owner;
        const int rows = (min(BM, p.m - tile % p.m_tiles * BM) + 7) / 8, jobs = WARPS * rows;
        int *count = p.counts + 4 + tile;
        await(count, sharers, 1, 32 * WARPS, threadIdx.x == 0);
        for (int job = jobs * share / sharers + warp; job < jobs * (share + 1) / sharers; job += WARPS) {
            const int w = job / rows, q = job % rows;
            float c[4] = {};
#pragma unroll 4
            for (int other = owner; other <= closer; other++) {
                const int slot = 2 * other + (other == owner ? 1 : 0);
                const float4 v = __ldcg((const float4 *)p.parts + (((u64)slot * WARPS + w) * (BM / 8) + q) * 32 + lane);
                c[0] += v.x, c[1] += v.y, c[2] += v.z, c[3] += v.w;
            }
            finish<1>(p, tile / p.m_tiles * WARPS + w, tile % p.m_tiles * BM + 8 * q, lane, c);
        }
        if (threadIdx.x == 0 && atomicAdd(count, 1) == 2 * sharers - 1) *count = 0;
    }
#if RANK > 0
    if (!waited) asm volatile("griddepcontrol.wait;" ::: "memory");
    if (threadIdx.x == 0 && atomicAdd(p.counts + 2, 1) == (int)gridDim.x - 1) p.counts[0] = p.counts[1] = p.counts[2] = 0;
#endif
}
