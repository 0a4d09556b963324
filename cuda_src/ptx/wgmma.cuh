// sm_90a: matrix products of a warpgroup (128 threads), d += A * B with A [64, 16], B [16, N], d in float32 registers.
// B, and A in the ss form, are read from shared memory through a descriptor; trans = 1 means that the operand is stored
// with its M or N index contiguous. Thread 32w + l holds in d[i] row 16w + l/4 + 8*((i/2)%2) and column
// 8*(i/4) + 2*(l%4) + i%2. A in registers: rows l/4, l/4+8, l/4, l/4+8 of the 16 of warp w, at k 2*(l%4), the same,
// +8, +8; two values each, lower k in the low half.
// Descriptor: bits 0-13 address, 16-29 leading and 32-45 stride byte offset, all divided by 16; bits 62-63 swizzle
// (0 none, 1 128 bytes, 2 64 bytes, 3 32 bytes).
#pragma once
#include "ptx/element_types.cuh"

namespace cuflash::ptx {

// Before the first wgmma, and whenever other instructions touched its registers.
CUFLASH_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
CUFLASH_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// At most Groups committed groups are still in flight; only then may d be read and the operands be overwritten.
template <int Groups>
CUFLASH_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Groups) : "memory");
}

// Ties registers to this point: reads of d may not move above the wait before it.
template <int Count>
CUFLASH_DEVICE void wgmma_touch(float (&d)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The instruction names its N and lists N / 2 registers, so each N is its own text: the list grows by four a line.
// CUFLASH_D<n> is the text of the first 4n operands, CUFLASH_F<n> their constraints.
#define CUFLASH_QUAD(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CUFLASH_D1 "%0,%1,%2,%3"
#define CUFLASH_F1(d) CUFLASH_QUAD(d, 0)
#define CUFLASH_D2 CUFLASH_D1 ",%4,%5,%6,%7"
#define CUFLASH_F2(d) CUFLASH_F1(d), CUFLASH_QUAD(d, 4)
#define CUFLASH_D3 CUFLASH_D2 ",%8,%9,%10,%11"
#define CUFLASH_F3(d) CUFLASH_F2(d), CUFLASH_QUAD(d, 8)
#define CUFLASH_D4 CUFLASH_D3 ",%12,%13,%14,%15"
#define CUFLASH_F4(d) CUFLASH_F3(d), CUFLASH_QUAD(d, 12)
#define CUFLASH_D5 CUFLASH_D4 ",%16,%17,%18,%19"
#define CUFLASH_F5(d) CUFLASH_F4(d), CUFLASH_QUAD(d, 16)
#define CUFLASH_D6 CUFLASH_D5 ",%20,%21,%22,%23"
#define CUFLASH_F6(d) CUFLASH_F5(d), CUFLASH_QUAD(d, 20)
#define CUFLASH_D7 CUFLASH_D6 ",%24,%25,%26,%27"
#define CUFLASH_F7(d) CUFLASH_F6(d), CUFLASH_QUAD(d, 24)
#define CUFLASH_D8 CUFLASH_D7 ",%28,%29,%30,%31"
#define CUFLASH_F8(d) CUFLASH_F7(d), CUFLASH_QUAD(d, 28)
#define CUFLASH_D9 CUFLASH_D8 ",%32,%33,%34,%35"
#define CUFLASH_F9(d) CUFLASH_F8(d), CUFLASH_QUAD(d, 32)
#define CUFLASH_D10 CUFLASH_D9 ",%36,%37,%38,%39"
#define CUFLASH_F10(d) CUFLASH_F9(d), CUFLASH_QUAD(d, 36)
#define CUFLASH_D11 CUFLASH_D10 ",%40,%41,%42,%43"
#define CUFLASH_F11(d) CUFLASH_F10(d), CUFLASH_QUAD(d, 40)
#define CUFLASH_D12 CUFLASH_D11 ",%44,%45,%46,%47"
#define CUFLASH_F12(d) CUFLASH_F11(d), CUFLASH_QUAD(d, 44)
#define CUFLASH_D13 CUFLASH_D12 ",%48,%49,%50,%51"
#define CUFLASH_F13(d) CUFLASH_F12(d), CUFLASH_QUAD(d, 48)
#define CUFLASH_D14 CUFLASH_D13 ",%52,%53,%54,%55"
#define CUFLASH_F14(d) CUFLASH_F13(d), CUFLASH_QUAD(d, 52)
#define CUFLASH_D15 CUFLASH_D14 ",%56,%57,%58,%59"
#define CUFLASH_F15(d) CUFLASH_F14(d), CUFLASH_QUAD(d, 56)
#define CUFLASH_D16 CUFLASH_D15 ",%60,%61,%62,%63"
#define CUFLASH_F16(d) CUFLASH_F15(d), CUFLASH_QUAD(d, 60)
#define CUFLASH_D17 CUFLASH_D16 ",%64,%65,%66,%67"
#define CUFLASH_F17(d) CUFLASH_F16(d), CUFLASH_QUAD(d, 64)
#define CUFLASH_D18 CUFLASH_D17 ",%68,%69,%70,%71"
#define CUFLASH_F18(d) CUFLASH_F17(d), CUFLASH_QUAD(d, 68)
#define CUFLASH_D19 CUFLASH_D18 ",%72,%73,%74,%75"
#define CUFLASH_F19(d) CUFLASH_F18(d), CUFLASH_QUAD(d, 72)
#define CUFLASH_D20 CUFLASH_D19 ",%76,%77,%78,%79"
#define CUFLASH_F20(d) CUFLASH_F19(d), CUFLASH_QUAD(d, 76)
#define CUFLASH_D21 CUFLASH_D20 ",%80,%81,%82,%83"
#define CUFLASH_F21(d) CUFLASH_F20(d), CUFLASH_QUAD(d, 80)
#define CUFLASH_D22 CUFLASH_D21 ",%84,%85,%86,%87"
#define CUFLASH_F22(d) CUFLASH_F21(d), CUFLASH_QUAD(d, 84)
#define CUFLASH_D23 CUFLASH_D22 ",%88,%89,%90,%91"
#define CUFLASH_F23(d) CUFLASH_F22(d), CUFLASH_QUAD(d, 88)
#define CUFLASH_D24 CUFLASH_D23 ",%92,%93,%94,%95"
#define CUFLASH_F24(d) CUFLASH_F23(d), CUFLASH_QUAD(d, 92)
#define CUFLASH_D25 CUFLASH_D24 ",%96,%97,%98,%99"
#define CUFLASH_F25(d) CUFLASH_F24(d), CUFLASH_QUAD(d, 96)
#define CUFLASH_D26 CUFLASH_D25 ",%100,%101,%102,%103"
#define CUFLASH_F26(d) CUFLASH_F25(d), CUFLASH_QUAD(d, 100)
#define CUFLASH_D27 CUFLASH_D26 ",%104,%105,%106,%107"
#define CUFLASH_F27(d) CUFLASH_F26(d), CUFLASH_QUAD(d, 104)
#define CUFLASH_D28 CUFLASH_D27 ",%108,%109,%110,%111"
#define CUFLASH_F28(d) CUFLASH_F27(d), CUFLASH_QUAD(d, 108)
#define CUFLASH_D29 CUFLASH_D28 ",%112,%113,%114,%115"
#define CUFLASH_F29(d) CUFLASH_F28(d), CUFLASH_QUAD(d, 112)
#define CUFLASH_D30 CUFLASH_D29 ",%116,%117,%118,%119"
#define CUFLASH_F30(d) CUFLASH_F29(d), CUFLASH_QUAD(d, 116)
#define CUFLASH_D31 CUFLASH_D30 ",%120,%121,%122,%123"
#define CUFLASH_F31(d) CUFLASH_F30(d), CUFLASH_QUAD(d, 120)
#define CUFLASH_D32 CUFLASH_D31 ",%124,%125,%126,%127"
#define CUFLASH_F32(d) CUFLASH_F31(d), CUFLASH_QUAD(d, 124)

template <int N>
struct WgmmaShape;

#define CUFLASH_WGMMA_SS(N, TYPE, D, F, i0, i1, i2, i3, i4)                                                        \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #i2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE  \
               "." TYPE " {" D "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4 "; }"                             \
               : F(d) : "l"(a), "l"(b), "r"(keep), "n"(TransA), "n"(TransB))
#define CUFLASH_WGMMA_RS(N, TYPE, D, F, i0, i1, i2, i3, i4, i5, i6)                                                \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #i5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE  \
               "." TYPE " {" D "}, {%" #i0 ",%" #i1 ",%" #i2 ",%" #i3 "}, %" #i4 ", p, 1, 1, %" #i6 "; }"          \
               : F(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(TransB))
// i0 to i6 number the operands after the N / 2 registers of d.
#define CUFLASH_WGMMA(N, D, F, i0, i1, i2, i3, i4, i5, i6)                                                         \
  template <>                                                                                                      \
  struct WgmmaShape<N> {                                                                                           \
    template <class T, int TransA, int TransB>                                                                     \
    CUFLASH_DEVICE static void ss(float (&d)[N / 2], uint64_t a, uint64_t b, int keep) {                           \
      if constexpr (is_bfloat16<T>) CUFLASH_WGMMA_SS(N, "bf16", D, F, i0, i1, i2, i3, i4);                  \
      else CUFLASH_WGMMA_SS(N, "f16", D, F, i0, i1, i2, i3, i4);                                                   \
    }                                                                                                              \
    template <class T, int TransB>                                                                                 \
    CUFLASH_DEVICE static void rs(float (&d)[N / 2], const uint32_t* a, uint64_t b, int keep) {                    \
      if constexpr (is_bfloat16<T>) CUFLASH_WGMMA_RS(N, "bf16", D, F, i0, i1, i2, i3, i4, i5, i6);          \
      else CUFLASH_WGMMA_RS(N, "f16", D, F, i0, i1, i2, i3, i4, i5, i6);                                           \
    }                                                                                                              \
  };

CUFLASH_WGMMA(8, CUFLASH_D1, CUFLASH_F1, 4, 5, 6, 7, 8, 9, 10)
CUFLASH_WGMMA(16, CUFLASH_D2, CUFLASH_F2, 8, 9, 10, 11, 12, 13, 14)
CUFLASH_WGMMA(24, CUFLASH_D3, CUFLASH_F3, 12, 13, 14, 15, 16, 17, 18)
CUFLASH_WGMMA(32, CUFLASH_D4, CUFLASH_F4, 16, 17, 18, 19, 20, 21, 22)
CUFLASH_WGMMA(40, CUFLASH_D5, CUFLASH_F5, 20, 21, 22, 23, 24, 25, 26)
CUFLASH_WGMMA(48, CUFLASH_D6, CUFLASH_F6, 24, 25, 26, 27, 28, 29, 30)
CUFLASH_WGMMA(56, CUFLASH_D7, CUFLASH_F7, 28, 29, 30, 31, 32, 33, 34)
CUFLASH_WGMMA(64, CUFLASH_D8, CUFLASH_F8, 32, 33, 34, 35, 36, 37, 38)
CUFLASH_WGMMA(72, CUFLASH_D9, CUFLASH_F9, 36, 37, 38, 39, 40, 41, 42)
CUFLASH_WGMMA(80, CUFLASH_D10, CUFLASH_F10, 40, 41, 42, 43, 44, 45, 46)
CUFLASH_WGMMA(88, CUFLASH_D11, CUFLASH_F11, 44, 45, 46, 47, 48, 49, 50)
CUFLASH_WGMMA(96, CUFLASH_D12, CUFLASH_F12, 48, 49, 50, 51, 52, 53, 54)
CUFLASH_WGMMA(104, CUFLASH_D13, CUFLASH_F13, 52, 53, 54, 55, 56, 57, 58)
CUFLASH_WGMMA(112, CUFLASH_D14, CUFLASH_F14, 56, 57, 58, 59, 60, 61, 62)
CUFLASH_WGMMA(120, CUFLASH_D15, CUFLASH_F15, 60, 61, 62, 63, 64, 65, 66)
CUFLASH_WGMMA(128, CUFLASH_D16, CUFLASH_F16, 64, 65, 66, 67, 68, 69, 70)
CUFLASH_WGMMA(136, CUFLASH_D17, CUFLASH_F17, 68, 69, 70, 71, 72, 73, 74)
CUFLASH_WGMMA(144, CUFLASH_D18, CUFLASH_F18, 72, 73, 74, 75, 76, 77, 78)
CUFLASH_WGMMA(152, CUFLASH_D19, CUFLASH_F19, 76, 77, 78, 79, 80, 81, 82)
CUFLASH_WGMMA(160, CUFLASH_D20, CUFLASH_F20, 80, 81, 82, 83, 84, 85, 86)
CUFLASH_WGMMA(168, CUFLASH_D21, CUFLASH_F21, 84, 85, 86, 87, 88, 89, 90)
CUFLASH_WGMMA(176, CUFLASH_D22, CUFLASH_F22, 88, 89, 90, 91, 92, 93, 94)
CUFLASH_WGMMA(184, CUFLASH_D23, CUFLASH_F23, 92, 93, 94, 95, 96, 97, 98)
CUFLASH_WGMMA(192, CUFLASH_D24, CUFLASH_F24, 96, 97, 98, 99, 100, 101, 102)
CUFLASH_WGMMA(200, CUFLASH_D25, CUFLASH_F25, 100, 101, 102, 103, 104, 105, 106)
CUFLASH_WGMMA(208, CUFLASH_D26, CUFLASH_F26, 104, 105, 106, 107, 108, 109, 110)
CUFLASH_WGMMA(216, CUFLASH_D27, CUFLASH_F27, 108, 109, 110, 111, 112, 113, 114)
CUFLASH_WGMMA(224, CUFLASH_D28, CUFLASH_F28, 112, 113, 114, 115, 116, 117, 118)
CUFLASH_WGMMA(232, CUFLASH_D29, CUFLASH_F29, 116, 117, 118, 119, 120, 121, 122)
CUFLASH_WGMMA(240, CUFLASH_D30, CUFLASH_F30, 120, 121, 122, 123, 124, 125, 126)
CUFLASH_WGMMA(248, CUFLASH_D31, CUFLASH_F31, 124, 125, 126, 127, 128, 129, 130)
CUFLASH_WGMMA(256, CUFLASH_D32, CUFLASH_F32, 128, 129, 130, 131, 132, 133, 134)

#undef CUFLASH_WGMMA
#undef CUFLASH_WGMMA_RS
#undef CUFLASH_WGMMA_SS

// d = (accumulate ? d : 0) + A * B, A [64, 16] and B [16, N] in shared memory.
template <class T, int N, int TransA, int TransB>
CUFLASH_DEVICE void wgmma_m64k16_ss(float (&d)[N / 2], uint64_t desc_a, uint64_t desc_b, bool accumulate) {
  WgmmaShape<N>::template ss<T, TransA, TransB>(d, desc_a, desc_b, accumulate);
}

// The same with A in four registers, which must stay untouched until the wait.
template <class T, int N, int TransB>
CUFLASH_DEVICE void wgmma_m64k16_rs(float (&d)[N / 2], const uint32_t* a, uint64_t desc_b, bool accumulate) {
  WgmmaShape<N>::template rs<T, TransB>(d, a, desc_b, accumulate);
}

}  // namespace cuflash::ptx
