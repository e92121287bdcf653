// What the CUDA kernels for 4-bit weights share; it is put before each of them.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

static __device__ __forceinline__ u32 to_pair(float low, float high) { // bf16
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

static __device__ __forceinline__ float swiglu(float gate, float up) {
    return __fdividef(gate, 1.f + __expf(-gate)) * up;
}

// A ring's barrier counts arrivals, and bytes that the copy engine brings.
static __device__ __forceinline__ void begin(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

static __device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

static __device__ __forceinline__ void wait(u32 barrier, u32 phase) {
    asm volatile("{\n .reg .pred done;\n"
                 " again:\n mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                 " @done bra over;\n bra again;\n over:\n}" ::"r"(barrier), "r"(phase)
                 : "memory");
}

// One lane of a whole warp: the compiler knows that it is one, which `lane == 0` does not tell it.
static __device__ __forceinline__ bool chosen() {
    u32 yes;
    asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(yes));
    return yes;
}

// A count that other blocks raise, and what they wrote before they did.
static __device__ __forceinline__ int look(const int *p) {
    int v;
    asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// A bf16 pair times the pair's first or second scale, + (-0).
template <int HALF> static __device__ __forceinline__ u32 times(u32 v, u32 s) {
    u32 out;
    asm("{\n .reg .b16 s<2>;\n .reg .b32 both;\n mov.b32 {s0, s1}, %2;\n mov.b32 both, {s%4, s%4};\n"
        " fma.rn.bf16x2 %0, %1, both, %3;\n}"
        : "=r"(out)
        : "r"(v), "r"(s), "r"(0x80008000u), "n"(HALF));
    return out;
}

// A word and its two rows' scales (bf16) -> a lane's share of a m16k16 operand: W 2^-7.
static __device__ __forceinline__ void decode(u32 word, u32 scales, u32 *a) {
    a[0] = times<0>(word & 0x81C081C0u, scales);
    a[1] = times<1>(word << 3 & 0x81C081C0u, scales);
    a[2] = times<0>(word << 6 & 0x81C081C0u, scales);
    a[3] = times<1>((word << 1 & 0x80008000u) | (word >> 3 & 0x01800180u) | (word >> 7 & 0x00400040u), scales);
}

// 64 inputs of a strip: a lane's words and its rows' scales.
static __device__ __forceinline__ void decode(const u32 *words, const u32 *scales, u32 *a) {
#pragma unroll
    for (int q = 0; q < 4; q++)
        decode(words[q], __byte_perm(scales[q / 2], 0, q & 1 ? 0x4342 : 0x4140) * 16 + 0x70007000u, a + 4 * q);
}
