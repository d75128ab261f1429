// Products, convolutions and pooling of one client's batch on a CPU.
//
// A V is a full vector of numbers. It holds either neighboring channels of one pixel (arrays whose channels lie side by
// side) or neighboring pixels of one row (arrays whose pixels do). Shapes are template arguments, so that a tile of sums
// stays in registers; the number of samples n is not. Nothing depends on other clients.
//
// The text that includes this file defines T (the number), I (an integer of its size) and VECTOR (bytes of a V: those of
// a register of the processor).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#if defined(__AVX__)
#include <immintrin.h>
#endif

constexpr int LANES = VECTOR / sizeof(T);
typedef T V __attribute__((vector_size(VECTOR)));
typedef T VU __attribute__((vector_size(VECTOR), aligned(sizeof(T))));  // V at any address of a T

#define INLINE static inline __attribute__((always_inline))
#define KERNEL static __attribute__((noinline))
#define UNROLL _Pragma("GCC unroll 64")
#define VECTORIZE _Pragma("omp simd")  // this loop: GCC 12 makes wrong code where it chooses an outer loop itself

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;  // that a V fits into
#else
constexpr int REGISTERS = 16;
#endif

INLINE long least(long a, long b) { return a < b ? a : b; }
constexpr int blocks(int count) { return (count + LANES - 1) / LANES; }
constexpr int divisor(int count, int most) {  // the largest divisor of count that is at most `most`
  int best = 1;
  for (int d = 1; d <= most; d++) best = count % d == 0 ? d : best;
  return best;
}
constexpr int even(int count, int most) {  // the size of equal tiles that cover count with as few as possible
  most = most < 1 ? 1 : most;
  int tiles = (count + most - 1) / most;
  return (count + tiles - 1) / tiles;
}

// The first numbers of a V, from 1 to all of them.
#if VECTOR == 64
typedef uint16_t Some;
INLINE Some first(int count) { return count >= LANES ? Some(~0) : Some((1u << count) - 1); }
INLINE V load(const T* p, Some some) {
  if constexpr (sizeof(T) == 4) return (V)_mm512_maskz_loadu_ps(some, p);
  else return (V)_mm512_maskz_loadu_pd((__mmask8)some, p);
}
INLINE void store(T* p, V v, Some some) {
  if constexpr (sizeof(T) == 4) _mm512_mask_storeu_ps(p, some, (__m512)v);
  else _mm512_mask_storeu_pd(p, (__mmask8)some, (__m512d)v);
}
#elif VECTOR == 32
alignas(64) static const int32_t FIRST[] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
struct Some {
  int count;
  __m256i mask;
};
INLINE Some first(int count) {
  if (count >= LANES) return {LANES, _mm256_set1_epi32(-1)};
  return {count, _mm256_loadu_si256((const __m256i*)(FIRST + 8 - count * int(sizeof(T) / 4)))};
}
INLINE V load(const T* p, const Some& some) {
  if (some.count >= LANES) return *(const VU*)p;
  if constexpr (sizeof(T) == 4) return (V)_mm256_maskload_ps((const float*)p, some.mask);
  else return (V)_mm256_maskload_pd((const double*)p, some.mask);
}
INLINE void store(T* p, V v, const Some& some) {
  if (some.count >= LANES) *(VU*)p = v;
  else if constexpr (sizeof(T) == 4) _mm256_maskstore_ps((float*)p, some.mask, (__m256)v);
  else _mm256_maskstore_pd((double*)p, some.mask, (__m256d)v);
}
#else
typedef int Some;
INLINE Some first(int count) { return count; }
INLINE V load(const T* p, Some some) {
  if (some >= LANES) return *(const VU*)p;
  V v{};
  for (int i = 0; i < some; i++) v[i] = p[i];
  return v;
}
INLINE void store(T* p, V v, Some some) {
  if (some >= LANES) {
    *(VU*)p = v;
    return;
  }
  for (int i = 0; i < some; i++) p[i] = v[i];
}
#endif
constexpr int ALL = LANES;

// The same vector, loaded once: by itself the compiler reads memory again for every product with it, and loads then take
// longer than the products.
INLINE V in_register(V v) {
#if defined(__AVX__)
  asm("" : "+v"(v));
#endif
  return v;
}

// Blocks of H lanes of a and b by turns: of each pair of blocks the first (or, with SECOND, the second).
template <int H, bool SECOND, class A, int... LANE>
INLINE A mixed(A a, A b, std::integer_sequence<int, LANE...>) {
#if defined(__clang__) || __GNUC__ >= 12
  constexpr int COUNT = sizeof...(LANE);
  return __builtin_shufflevector(a, b, (LANE / H % 2 * COUNT + LANE / (2 * H) * 2 * H + LANE % H + SECOND * H)...);
#else
  constexpr int COUNT = sizeof...(LANE);
  typedef I Index __attribute__((vector_size(sizeof(A))));
  return __builtin_shuffle(a, b, Index{(LANE / H % 2 * COUNT + LANE / (2 * H) * 2 * H + LANE % H + SECOND * H)...});
#endif
}

template <int H, bool SECOND, class A>
INLINE A mixed(A a, A b) {
  return mixed<H, SECOND>(a, b, std::make_integer_sequence<int, sizeof(A) / sizeof(T)>{});
}

// Sums over the lanes of COUNT vectors, all at once; COUNT is at most the number of lanes. Pairs of vectors are folded
// into one that holds half of each, until one vector holds a sum of each.
template <int COUNT, int H, class A>
INLINE void fold(A* v) {
  UNROLL for (int k = 0; k < H && k < COUNT; k++) {
    A other = k + H < COUNT ? v[k + H] : A{};
    v[k] = mixed<H, false>(v[k], other) + mixed<H, true>(v[k], other);
  }
  if constexpr (H > 1) fold<(COUNT < H ? COUNT : H), H / 2>(v);
}

// f(k, sum over the lanes of v[k]) for COUNT vectors.
template <int COUNT, int FROM = 0, class A, class F>
INLINE void each_sum(A* v, F f) {
  constexpr int LANE = sizeof(A) / sizeof(T), NOW = COUNT - FROM < LANE ? COUNT - FROM : LANE;
  fold<NOW, LANE / 2>(v + FROM);
  UNROLL for (int k = 0; k < NOW; k++) f(FROM + k, v[FROM][k]);
  if constexpr (FROM + NOW < COUNT) each_sum<COUNT, FROM + NOW>(v, f);
}

// The same for whole registers. Where they have 64 bytes, a sum over one takes less time than its share of a fold.
template <int COUNT, class F>
INLINE void each_register_sum(V* v, F f) {
#if VECTOR == 64
  UNROLL for (int k = 0; k < COUNT; k++) {
    if constexpr (sizeof(T) == 4) f(k, _mm512_reduce_add_ps((__m512)v[k]));
    else f(k, _mm512_reduce_add_pd((__m512d)v[k]));
  }
#else
  each_sum<COUNT>(v, f);
#endif
}

// ---------------------------------------------------------------- functions that compilers turn into vector code

INLINE T chosen(bool c, T a, T b) { return c ? a : b; }
INLINE T exponential(T x) {
  const T low = sizeof(T) == 4 ? T(-87.3) : T(-708.3), high = sizeof(T) == 4 ? T(88.7) : T(709.7);
  const T y = x < low ? low : (x > high ? high : x);
  const T k = std::nearbyint(y * T(1.4426950408889634));
  const T r = (y - k * T(0.693145751953125)) - k * T(1.4286068203094172e-06);
  T p = 1;
  if constexpr (sizeof(T) == 4) {
    UNROLL for (int d = 7; d > 0; d--) p = p * r * (T(1) / d) + 1;
    union { int32_t i; float f; } two;
    two.i = (int32_t(k) + 127) << 23;
    p *= two.f;
  } else {
    UNROLL for (int d = 14; d > 0; d--) p = p * r * (T(1) / d) + 1;
    union { int64_t i; double f; } two;
    two.i = (int64_t(k) + 1023) << 52;
    p *= two.f;
  }
  p = x < low ? T(0) : p;
  p = x > high ? T(INFINITY) : p;
  return x != x ? x : p;
}
INLINE T sigmoid(T x) { return 1 / (1 + exponential(-x)); }
INLINE T hyperbolic(T x) { return 1 - 2 / (exponential(2 * x) + 1); }
INLINE T error_function(T x, T power) {  // power = exp(-x * x)
  if constexpr (sizeof(T) == 8) return std::erf(x);
  const T a = std::fabs(x), t = 1 / (1 + T(0.3275911) * a);  // Abramowitz & Stegun 7.1.26, within 1.5e-7
  const T p = ((((T(1.061405429) * t - T(1.453152027)) * t + T(1.421413741)) * t - T(0.284496736)) * t + T(0.254829592)) * t;
  const T e = 1 - p * power;
  return x < 0 ? -e : e;
}
INLINE T error_function(T x) { return error_function(x, exponential(-x * x)); }
INLINE T softened(T x, T beta, T threshold) {  // log(1 + exp(beta x)) / beta
  return x * beta > threshold ? x : std::log1p(exponential(x * beta)) / beta;
}
INLINE T silu_slope(T x) {
  const T s = sigmoid(x);
  return s * (1 + x * (1 - s));
}
INLINE T mish_slope(T x) {
  const T s = sigmoid(x), t = hyperbolic(softened(x, 1, 20));
  return t + x * s * (1 - t * t);
}
INLINE T gelu_slope(T x) {
  const T power = exponential(T(-0.5) * x * x);
  return T(0.5) * (1 + error_function(x * T(0.7071067811865476), power)) + x * power * T(0.3989422804014327);
}
INLINE T gelu_slope_tanh(T x) {
  const T t = hyperbolic(T(0.7978845608028654) * (x + T(0.044715) * x * x * x));
  return T(0.5) * (1 + t) + T(0.5) * x * (1 - t * t) * T(0.7978845608028654) * (1 + T(0.134145) * x * x);
}
INLINE long inside(long place, long size) {  // no index reaches beyond an array
  place = place < 0 ? place + size : place;
  return place < 0 ? 0 : place >= size ? size - 1 : place;
}

// ---------------------------------------------------------------- products

// c[m][0..columns) (+)= sum over k of a[m * SM + k * SK] * b[k * ldb + ...], a tile of MT rows and OB vectors, of which
// the last may be filled in part.
template <int MT, int OB, long SM, long SK>
INLINE void product_tile(long K, const T* __restrict a, const T* __restrict b, long ldb, T* __restrict c, long ldc,
                         int columns, bool add) {
  const Some all = first(ALL), rest = first(columns - (OB - 1) * LANES);
  V sum[MT][OB];
  UNROLL for (int i = 0; i < MT; i++) UNROLL for (int o = 0; o < OB; o++) sum[i][o] = V{};
  for (long k = 0; k < K; k++) {
    V row[OB];
    UNROLL for (int o = 0; o < OB; o++) row[o] = load(b + k * ldb + o * LANES, o + 1 < OB ? all : rest);
    UNROLL for (int i = 0; i < MT; i++) {
      const T s = a[i * SM + k * SK];
      UNROLL for (int o = 0; o < OB; o++) sum[i][o] += row[o] * s;
    }
  }
  UNROLL for (int i = 0; i < MT; i++) UNROLL for (int o = 0; o < OB; o++) {
    T* to = c + i * ldc + o * LANES;
    const Some some = o + 1 < OB ? all : rest;
    store(to, add ? load(to, some) + sum[i][o] : sum[i][o], some);
  }
}

template <int OB, long SM, long SK>
KERNEL void product_columns(long M, long K, const T* a, const T* b, long ldb, T* c, long ldc, int columns, bool add) {
  constexpr int ROOM = (REGISTERS - OB - 1) / OB, MT = ROOM >= 8 ? 8 : ROOM >= 6 ? 6 : ROOM >= 4 ? 4 : ROOM >= 2 ? 2 : 1;
  long m = 0;
  for (; m + MT <= M; m += MT) product_tile<MT, OB, SM, SK>(K, a + m * SM, b, ldb, c + m * ldc, ldc, columns, add);
  if constexpr (MT > 4)
    if (M - m >= 4) product_tile<4, OB, SM, SK>(K, a + m * SM, b, ldb, c + m * ldc, ldc, columns, add), m += 4;
  if constexpr (MT > 2)
    if (M - m >= 2) product_tile<2, OB, SM, SK>(K, a + m * SM, b, ldb, c + m * ldc, ldc, columns, add), m += 2;
  if (M - m >= 1) product_tile<1, OB, SM, SK>(K, a + m * SM, b, ldb, c + m * ldc, ldc, columns, add);
}

template <int N, long SM, long SK>
INLINE void product_strips(long M, long K, const T* a, const T* b, long ldb, T* c, bool add) {
  constexpr int W = blocks(N), OB = W % 3 == 0 ? 3 : W % 2 == 0 ? 2 : W == 1 ? 1 : W % 3 == 1 ? 2 : 3;
  int o = 0;
  for (; o + OB <= W; o += OB)
    product_columns<OB, SM, SK>(M, K, a, b + o * LANES, ldb, c + o * LANES, N, N - o * LANES, add);
  if constexpr (W % OB != 0)
    product_columns<W % OB, SM, SK>(M, K, a, b + o * LANES, ldb, c + o * LANES, N, N - o * LANES, add);
}

// c = a b, M x K times K x N; the columns of b lie side by side. Where each row of b and c is a page of memory of its
// own, or more, a part of the rows at a time: what knows where pages are holds few of them.
template <int N, long SM, long SK>
INLINE void product(long M, long K, const T* a, const T* b, long ldb, T* c, bool add) {
  constexpr long PAGE = 4096, ROWS = 48, DEPTH = 128;
  if constexpr (N * sizeof(T) < PAGE) {
    product_strips<N, SM, SK>(M, K, a, b, ldb, c, add);
  } else {
    for (long m = 0; m < M; m += ROWS)
      for (long k = 0; k < K || k == 0; k += DEPTH)
        product_strips<N, SM, SK>(least(ROWS, M - m), least(DEPTH, K - k), a + m * SM + k * SK, b + k * ldb, ldb, c + m * N,
                                  add || k > 0);
  }
}

// c[m][o] = sum over k of a[m * lda + k] * b[o * ldb + k]: both lie along k. MT x OT dot products at once.
template <int MT, int OT>
INLINE void dots_tile(long K, const T* __restrict a, long lda, const T* __restrict b, long ldb, T* c, long ldc, bool add) {
  V sum[MT][OT];
  UNROLL for (int i = 0; i < MT; i++) UNROLL for (int o = 0; o < OT; o++) sum[i][o] = V{};
  const auto step = [&](long k, const Some& some) __attribute__((always_inline)) {
    V part[OT];
    UNROLL for (int o = 0; o < OT; o++) part[o] = load(b + o * ldb + k, some);
    UNROLL for (int i = 0; i < MT; i++) {
      const V row = in_register(load(a + i * lda + k, some));
      UNROLL for (int o = 0; o < OT; o++) sum[i][o] += row * part[o];
    }
  };
  long k = 0;
  for (; k + LANES <= K; k += LANES) step(k, first(ALL));
  if (k < K) step(k, first(K - k));
  each_register_sum<MT * OT>(&sum[0][0], [=](int k, T total) {
    T* to = c + k / OT * ldc + k % OT;
    *to = (add ? *to : T(0)) + total;
  });
}

template <int MT, int N>
INLINE void dots_rows(long K, const T* a, long lda, const T* b, long ldb, T* c, long ldc, bool add) {
  constexpr int OT = even(N, MT >= (REGISTERS < 32 ? 4 : 5) ? 3 : 4);
  int o = 0;
  for (; o + OT <= N; o += OT) dots_tile<MT, OT>(K, a, lda, b + o * ldb, ldb, c + o, ldc, add);
  if constexpr (N % OT != 0) dots_tile<MT, N % OT>(K, a, lda, b + o * ldb, ldb, c + o, ldc, add);
}

template <int N>
KERNEL void dots_columns(long M, long K, const T* a, long lda, const T* b, long ldb, T* c, long ldc, bool add) {
  constexpr int MT = REGISTERS < 32 ? 4 : 8;
  long m = 0;
  for (; m + MT <= M; m += MT) dots_rows<MT, N>(K, a + m * lda, lda, b, ldb, c + m * ldc, ldc, add);
  if constexpr (MT > 4)
    if (M - m >= 4) dots_rows<4, N>(K, a + m * lda, lda, b, ldb, c + m * ldc, ldc, add), m += 4;
  if (M - m >= 2) dots_rows<2, N>(K, a + m * lda, lda, b, ldb, c + m * ldc, ldc, add), m += 2;
  if (M - m >= 1) dots_rows<1, N>(K, a + m * lda, lda, b, ldb, c + m * ldc, ldc, add);
}

// c = a b for few rows, M x K times K x N; the rows of a and the columns of b each lie side by side. So many columns at
// a time that they stay in the cache for all rows.
template <int N>
INLINE void dots(long M, long K, const T* a, long lda, const T* b, long ldb, T* c, bool add) {
  constexpr int EACH = N < 24 ? N : 12, REST = N % EACH;
  int o = 0;
  for (; o + EACH <= N; o += EACH) dots_columns<EACH>(M, K, a, lda, b + o * ldb, ldb, c + o, N, add);
  if constexpr (REST) dots_columns<REST>(M, K, a, lda, b + o * ldb, ldb, c + o, N, add);
}

// p[k][0..LD) from b[k * SK + n * SN], filled up with zeros.
template <int N, int LD>
KERNEL void pack_columns(long K, const T* b, long sk, long sn, T* p) {
  constexpr int STEP = 8;
  for (long k0 = 0; k0 < K; k0 += STEP) {
    const long k1 = least(k0 + STEP, K);
    for (int c = 0; c < N; c++)
      for (long k = k0; k < k1; k++) p[k * LD + c] = b[k * sk + c * sn];
  }
  if constexpr (N < LD)
    for (long k = 0; k < K; k++)
      for (int c = N; c < LD; c++) p[k * LD + c] = 0;
}

// Zeros around arrays of some rows of some width: so many rows at the top and bottom, numbers at the left and right.
KERNEL void frame(long many, long rows, long width, long top, long left, long bottom, long right, T* p) {
  for (long b = 0; b < many; b++, p += rows * width) {
    memset(p, 0, sizeof(T) * top * width);
    for (long h = top; h < rows - bottom; h++) {
      for (long i = 0; i < left; i++) p[h * width + i] = 0;
      for (long i = width - right; i < width; i++) p[h * width + i] = 0;
    }
    memset(p + (rows - bottom) * width, 0, sizeof(T) * bottom * width);
  }
}

// ---------------------------------------------------------------- convolution, channels side by side

// Shape of a convolution: C channels of X (L in a pixel of memory), O outputs (LO in a pixel of memory), padded input of
// HP x WP pixels, output of HO x WO pixels, kernel KH x KW, stride SH x SW, dilation DH x DW.
template <int C_, int L_, int O_, int LO_, int HP_, int WP_, int HO_, int WO_, int KH_, int KW_, int SH_, int SW_,
          int DH_, int DW_>
struct Shape {
  static constexpr int C = C_, L = L_, O = O_, LO = LO_, HP = HP_, WP = WP_, HO = HO_, WO = WO_, KH = KH_, KW = KW_,
                       SH = SH_, SW = SW_, DH = DH_, DW = DW_, TAPS = KH_ * KW_;
};

// p[O / LANES][TAPS][C][LANES] from weights w[o * so + c * sc + tap].
template <int O, int C, int TAPS>
KERNEL void pack_outputs(const T* w, long so, long sc, T* p) {
  for (int v = 0; v < blocks(O); v++)
    for (int tap = 0; tap < TAPS; tap++)
      for (int c = 0; c < C; c++)
        for (int l = 0; l < LANES; l++) {
          const int o = v * LANES + l;
          p[((v * TAPS + tap) * C + c) * LANES + l] = o < O ? w[o * so + c * sc + tap] : T(0);
        }
}

// OB vectors of outputs at WT neighboring pixels: taps (i, j) of x at pixel t * STEP + place(i, j).
template <class S, int C, int L, int OB, int WT, int STEP, bool BACK, int PA, int PB>
INLINE void channels_tile(const T* __restrict x, const T* __restrict w, const T* bias, T* __restrict y, long pitch,
                          int columns, int row) {
  const Some all = first(ALL), rest = first(columns - (OB - 1) * LANES);
  V sum[OB][WT];
  UNROLL for (int o = 0; o < OB; o++) UNROLL for (int t = 0; t < WT; t++)
      sum[o][t] = bias ? load(bias + o * LANES, o + 1 < OB ? all : rest) : V{};
  for (int i = 0; i < S::KH; i++) {
    if (BACK && (PA - i * S::DH) % S::SH != 0) continue;
    UNROLL for (int j = 0; j < S::KW; j++) {
      if (BACK && (PB - j * S::DW) % S::SW != 0) continue;
      const T* from = BACK ? x + ((PA - i * S::DH) / S::SH * row + (PB - j * S::DW) / S::SW) * L
                           : x + (i * S::DH * row + j * S::DW) * L;
      const T* weights = w + (i * S::KW + j) * C * LANES;
      _Pragma("GCC unroll 4") for (int c = 0; c < C; c++) {
        V v[OB];
        UNROLL for (int o = 0; o < OB; o++) v[o] = *(const VU*)(weights + (o * S::TAPS * C + c) * LANES);
        UNROLL for (int t = 0; t < WT; t++) {
          const T s = from[t * STEP * L + c];
          UNROLL for (int o = 0; o < OB; o++) sum[o][t] += v[o] * s;
        }
      }
    }
  }
  UNROLL for (int t = 0; t < WT; t++) UNROLL for (int o = 0; o < OB; o++)
      store(y + t * pitch + o * LANES, sum[o][t], o + 1 < OB ? all : rest);
}

constexpr int together(int vectors) { return vectors % 3 == 0 ? 3 : vectors % 2 == 0 ? 2 : 1; }
constexpr int pixels(int width, int vectors) { return even(width, (REGISTERS - vectors - 1) / vectors); }

template <class S>
KERNEL void convolve(long n, const T* x, const T* w, const T* bias, T* y) {
  constexpr int W = blocks(S::O), OB = together(W), WT = pixels(S::WO, OB), REST = S::WO % WT;
  for (long b = 0; b < n; b++)
    for (int v = 0; v < W; v += OB)
      for (int h = 0; h < S::HO; h++) {
        const T* row = x + (b * S::HP + h * S::SH) * S::WP * S::L;
        const T* weights = w + v * S::TAPS * S::C * LANES;
        const T* own = bias ? bias + v * LANES : nullptr;
        T* to = y + (b * S::HO + h) * S::WO * S::LO + v * LANES;
        int t = 0;
        for (; t + WT <= S::WO; t += WT)
          channels_tile<S, S::C, S::L, OB, WT, S::SW, false, 0, 0>(row + t * S::SW * S::L, weights, own, to + t * S::LO,
                                                                  S::LO, S::O - v * LANES, S::WP);
        if constexpr (REST)
          channels_tile<S, S::C, S::L, OB, REST, S::SW, false, 0, 0>(row + t * S::SW * S::L, weights, own,
                                                                    to + t * S::LO, S::LO, S::O - v * LANES, S::WP);
      }
}

// The gradient of the input, H x W pixels with padding PH, PW: the pixels (FH, FW) of each stride, from a gradient that
// has QH and QW zeros before it. Weights are packed with inputs as outputs.
template <class S, int H, int W, int PH, int PW, int HG, int WG, int QH, int QW, int FH, int FW>
INLINE void back_phase(long n, const T* g, const T* w, T* gx) {
  constexpr int V_ = blocks(S::C), OB = together(V_), HN = (H - FH + S::SH - 1) / S::SH, WN = (W - FW + S::SW - 1) / S::SW;
  if constexpr (HN > 0 && WN > 0) {
    constexpr int WT = pixels(WN, OB), REST = WN % WT;
    for (long b = 0; b < n; b++)
      for (int v = 0; v < V_; v += OB)
        for (int h = 0; h < HN; h++) {
          const T* row = g + ((b * HG + h + QH) * WG + QW) * S::LO;
          const T* weights = w + v * S::TAPS * S::O * LANES;
          T* to = gx + ((b * H + h * S::SH + FH) * W + FW) * S::L + v * LANES;
          int t = 0;
          for (; t + WT <= WN; t += WT)
            channels_tile<S, S::O, S::LO, OB, WT, 1, true, FH + PH, FW + PW>(
                row + t * S::LO, weights, nullptr, to + t * S::SW * S::L, S::SW * S::L, S::C - v * LANES, WG);
          if constexpr (REST)
            channels_tile<S, S::O, S::LO, OB, REST, 1, true, FH + PH, FW + PW>(
                row + t * S::LO, weights, nullptr, to + t * S::SW * S::L, S::SW * S::L, S::C - v * LANES, WG);
        }
  }
}

template <class S, int H, int W, int PH, int PW, int HG, int WG, int QH, int QW, int F>
INLINE void back_phases(long n, const T* g, const T* w, T* gx) {
  if constexpr (F < S::SH * S::SW) {
    back_phase<S, H, W, PH, PW, HG, WG, QH, QW, F / S::SW, F % S::SW>(n, g, w, gx);
    back_phases<S, H, W, PH, PW, HG, WG, QH, QW, F + 1>(n, g, w, gx);
  }
}

template <class S, int H, int W, int PH, int PW, int HG, int WG, int QH, int QW>
KERNEL void convolve_back(long n, const T* g, const T* w, T* gx) {
  back_phases<S, H, W, PH, PW, HG, WG, QH, QW, 0>(n, g, w, gx);
}

// The gradient of the weights: sums of OB vectors of outputs x CT channels over some rows.
template <class S, int CT, int OB>
INLINE void weights_tile(const T* x, const T* g, T* q, int rows, int columns) {
  V sum[OB][CT];
  UNROLL for (int o = 0; o < OB; o++) UNROLL for (int c = 0; c < CT; c++)
      sum[o][c] = *(const VU*)(q + (o * S::TAPS * S::C + c) * LANES);
  const Some all = first(ALL), rest = first(columns - (OB - 1) * LANES);
  for (int h = 0; h < rows; h++) {
    const T *xr = x + h * S::SH * S::WP * S::L, *gr = g + h * S::WO * S::LO;
    _Pragma("GCC unroll 2") for (int t = 0; t < S::WO; t++) {
      V v[OB];
      UNROLL for (int o = 0; o < OB; o++) v[o] = load(gr + t * S::LO + o * LANES, o + 1 < OB ? all : rest);
      UNROLL for (int c = 0; c < CT; c++) {
        const T s = xr[t * S::SW * S::L + c];
        UNROLL for (int o = 0; o < OB; o++) sum[o][c] += v[o] * s;
      }
    }
  }
  UNROLL for (int o = 0; o < OB; o++) UNROLL for (int c = 0; c < CT; c++)
      *(VU*)(q + (o * S::TAPS * S::C + c) * LANES) = sum[o][c];
}

template <class S>
KERNEL void convolve_weights(long n, const T* x, const T* g, T* q, long so, long sc, T* gw, bool add) {
  constexpr int W = blocks(S::O), OB = together(W), MOST = (REGISTERS - OB - 1) / OB, CT = S::C < MOST ? S::C : even(S::C, MOST),
                REST = S::C % CT, ROWS = S::WO >= 64 ? 1 : (64 / S::WO < S::HO ? 64 / S::WO : S::HO);
  memset(q, 0, sizeof(T) * W * S::TAPS * S::C * LANES);
  for (long b = 0; b < n; b++)
    for (int h = 0; h < S::HO; h += ROWS) {
      const int rows = least(ROWS, S::HO - h);
      for (int v = 0; v < W; v += OB)
        for (int tap = 0; tap < S::TAPS; tap++) {
          const int i = tap / S::KW * S::DH, j = tap % S::KW * S::DW;
          const T* from = x + ((b * S::HP + h * S::SH + i) * S::WP + j) * S::L;
          const T* back = g + (b * S::HO + h) * S::WO * S::LO + v * LANES;
          T* to = q + (v * S::TAPS + tap) * S::C * LANES;
          int c = 0;
          for (; c + CT <= S::C; c += CT) weights_tile<S, CT, OB>(from + c, back, to + c * LANES, rows, S::O - v * LANES);
          if constexpr (REST) weights_tile<S, REST, OB>(from + c, back, to + c * LANES, rows, S::O - v * LANES);
        }
    }
  for (int o = 0; o < S::O; o++)
    for (int c = 0; c < S::C; c++)
      for (int tap = 0; tap < S::TAPS; tap++) {
        T* to = gw + o * so + c * sc + tap;
        *to = (add ? *to : T(0)) + q[((o / LANES * S::TAPS + tap) * S::C + c) * LANES + o % LANES];
      }
}

// ---------------------------------------------------------------- convolution of each channel with its own kernel

template <class S>  // weights w[tap][channels], both in whole vectors
KERNEL void depthwise(long n, const T* x, const T* w, T* y) {
  constexpr int CP = blocks(S::C) * LANES;
  for (long b = 0; b < n; b++)
    for (int h = 0; h < S::HO; h++)
      for (int v = 0; v < CP; v += LANES) {
        V k[S::TAPS];
        UNROLL for (int tap = 0; tap < S::TAPS; tap++) k[tap] = *(const VU*)(w + tap * CP + v);
        for (int t = 0; t < S::WO; t++) {
          const T* from = x + ((b * S::HP + h * S::SH) * S::WP + t * S::SW) * CP + v;
          V sum[2] = {};
          UNROLL for (int tap = 0; tap < S::TAPS; tap++)
              sum[tap & 1] += *(const VU*)(from + (tap / S::KW * S::DH * S::WP + tap % S::KW * S::DW) * CP) * k[tap];
          store(y + ((b * S::HO + h) * S::WO + t) * S::C + v, sum[0] + sum[1], first(S::C - v));
        }
      }
}

template <class S, int H, int W, int PH, int PW, int HG, int WG, int QH, int QW, int F>
INLINE void depthwise_phases(long n, const T* g, const T* w, T* gx) {
  if constexpr (F < S::SH * S::SW) {
    constexpr int CP = blocks(S::C) * LANES, FH = F / S::SW, FW = F % S::SW, PA = FH + PH, PB = FW + PW;
    for (long b = 0; b < n; b++)
      for (int h = FH; h < H; h += S::SH)
        for (int v = 0; v < CP; v += LANES) {
          V k[S::TAPS];
          UNROLL for (int tap = 0; tap < S::TAPS; tap++) k[tap] = *(const VU*)(w + tap * CP + v);
          for (int t = FW; t < W; t += S::SW) {
            const T* from = g + ((b * HG + h / S::SH + QH) * WG + t / S::SW + QW) * CP + v;
            V sum[2] = {};
            UNROLL for (int tap = 0; tap < S::TAPS; tap++) {
              constexpr int KW = S::KW;
              const int i = tap / KW * S::DH, j = tap % KW * S::DW;
              if ((PA - i) % S::SH != 0 || (PB - j) % S::SW != 0) continue;
              sum[tap & 1] += *(const VU*)(from + ((PA - i) / S::SH * WG + (PB - j) / S::SW) * CP) * k[tap];
            }
            store(gx + ((b * H + h) * W + t) * S::C + v, sum[0] + sum[1], first(S::C - v));
          }
        }
    depthwise_phases<S, H, W, PH, PW, HG, WG, QH, QW, F + 1>(n, g, w, gx);
  }
}

template <class S, int H, int W, int PH, int PW, int HG, int WG, int QH, int QW>
KERNEL void depthwise_back(long n, const T* g, const T* w, T* gx) {
  depthwise_phases<S, H, W, PH, PW, HG, WG, QH, QW, 0>(n, g, w, gx);
}

template <class S, int HG, int WG, int QH, int QW>
KERNEL void depthwise_weights(long n, const T* x, const T* g, T* gw, bool add) {
  constexpr int CP = blocks(S::C) * LANES;
  for (int v = 0; v < CP; v += LANES) {
    V total[S::TAPS];
    UNROLL for (int tap = 0; tap < S::TAPS; tap++) total[tap] = V{};
    for (long b = 0; b < n; b++)
      for (int h = 0; h < S::HO; h++)
        for (int t = 0; t < S::WO; t++) {
          const V s = *(const VU*)(g + ((b * HG + h + QH) * WG + t + QW) * CP + v);
          const T* from = x + ((b * S::HP + h * S::SH) * S::WP + t * S::SW) * CP + v;
          UNROLL for (int tap = 0; tap < S::TAPS; tap++)
              total[tap] += *(const VU*)(from + (tap / S::KW * S::DH * S::WP + tap % S::KW * S::DW) * CP) * s;
        }
    for (int c = 0; c < LANES && v + c < S::C; c++)
      for (int tap = 0; tap < S::TAPS; tap++) {
        T* to = gw + (v + c) * S::TAPS + tap;
        *to = (add ? *to : T(0)) + total[tap][c];
      }
  }
}

template <int C, int TAPS>
KERNEL void pack_depthwise(const T* w, T* p) {
  constexpr int CP = blocks(C) * LANES;
  memset(p, 0, sizeof(T) * TAPS * CP);
  for (int c = 0; c < C; c++)
    for (int tap = 0; tap < TAPS; tap++) p[tap * CP + c] = w[c * TAPS + tap];
}

// ---------------------------------------------------------------- convolution, pixels side by side, stride 1

// OT outputs x HT rows x WV vectors of pixels. Weight (o, c, i, j) is w[o * so + c * sc + i * si + j * sj].
template <class S, int OT, int HT, int WV>
INLINE void pixels_tile(const T* __restrict x, const T* __restrict w, long so, long sc, long si, long sj, const T* bias,
                        T* __restrict y, int columns) {
  V sum[OT][HT][WV];
  UNROLL for (int o = 0; o < OT; o++) UNROLL for (int h = 0; h < HT; h++) UNROLL for (int v = 0; v < WV; v++)
      sum[o][h][v] = V{} + (bias ? bias[o] : T(0));
  for (int c = 0; c < S::C; c++)
    for (int i = 0; i < S::KH; i++)
      UNROLL for (int j = 0; j < S::KW; j++) {
        V p[HT][WV];
        UNROLL for (int h = 0; h < HT; h++) UNROLL for (int v = 0; v < WV; v++)
            p[h][v] = *(const VU*)(x + (c * S::HP + h + i * S::DH) * S::WP + j * S::DW + v * LANES);
        UNROLL for (int o = 0; o < OT; o++) {
          const T s = w[o * so + c * sc + i * si + j * sj];
          UNROLL for (int h = 0; h < HT; h++) UNROLL for (int v = 0; v < WV; v++) sum[o][h][v] += p[h][v] * s;
        }
      }
  UNROLL for (int o = 0; o < OT; o++) UNROLL for (int h = 0; h < HT; h++) UNROLL for (int v = 0; v < WV; v++)
      store(y + (o * S::HO + h) * S::WO + v * LANES, sum[o][h][v], first(columns - v * LANES));
}

template <class S, int OT>
INLINE void pixels_outputs(const T* x, const T* w, long so, long sc, long si, long sj, const T* bias, T* y) {
  constexpr int W = blocks(S::WO), WV = even(W, 2), REST = W % WV;
  constexpr int HT = S::HO % 2 == 0 && 2 * OT * WV <= REGISTERS * 3 / 4 ? 2 : 1;
  for (int h = 0; h < S::HO; h += HT) {
    const T* from = x + h * S::WP;
    T* to = y + h * S::WO;
    int v = 0;
    for (; v + WV <= W; v += WV)
      pixels_tile<S, OT, HT, WV>(from + v * LANES, w, so, sc, si, sj, bias, to + v * LANES, S::WO - v * LANES);
    if constexpr (REST)
      pixels_tile<S, OT, HT, REST>(from + v * LANES, w, so, sc, si, sj, bias, to + v * LANES, S::WO - v * LANES);
  }
}

template <class S>
KERNEL void pixels_convolve(long n, const T* x, const T* w, long so, long sc, long si, long sj, const T* bias, T* y) {
  constexpr int WV = even(blocks(S::WO), 2), MOST = REGISTERS * 3 / 4 / WV;
  constexpr int OT = even(S::O, MOST > 8 ? 8 : MOST < 1 ? 1 : MOST), REST = S::O % OT;
  for (long b = 0; b < n; b++) {
    const T* from = x + b * S::C * S::HP * S::WP;
    T* to = y + b * S::O * S::HO * S::WO;
    int o = 0;
    for (; o + OT <= S::O; o += OT)
      pixels_outputs<S, OT>(from, w + o * so, so, sc, si, sj, bias ? bias + o : nullptr, to + o * S::HO * S::WO);
    if constexpr (REST)
      pixels_outputs<S, REST>(from, w + o * so, so, sc, si, sj, bias ? bias + o : nullptr, to + o * S::HO * S::WO);
  }
}

// The gradient of the weights of OT outputs for one channel and one row of the kernel.
template <class S, int OT>
INLINE void pixels_weights_tile(long n, const T* x, const T* g, long so, T* gw, bool add) {
  V sum[OT][S::KW];
  UNROLL for (int o = 0; o < OT; o++) UNROLL for (int j = 0; j < S::KW; j++) sum[o][j] = V{};
  for (long b = 0; b < n; b++)
    for (int h = 0; h < S::HO; h++)
      UNROLL for (int v = 0; v < blocks(S::WO); v++) {
        const Some count = first(S::WO - v * LANES);
        V part[OT];
        UNROLL for (int o = 0; o < OT; o++) part[o] = load(g + ((b * S::O + o) * S::HO + h) * S::WO + v * LANES, count);
        UNROLL for (int j = 0; j < S::KW; j++) {
          const V p = load(x + (b * S::C * S::HP + h) * S::WP + j * S::DW + v * LANES, count);
          UNROLL for (int o = 0; o < OT; o++) sum[o][j] += part[o] * p;
        }
      }
  each_register_sum<OT * S::KW>(&sum[0][0], [=](int k, T total) {
    T* to = gw + k / S::KW * so + k % S::KW;
    *to = (add ? *to : T(0)) + total;
  });
}

template <class S>
KERNEL void pixels_weights(long n, const T* x, const T* g, T* gw, bool add) {
  constexpr int MOST = (REGISTERS - 2) / (S::KW + 1), OT = even(S::O, MOST < 1 ? 1 : MOST), REST = S::O % OT;
  constexpr long SO = S::C * S::TAPS;
  for (int c = 0; c < S::C; c++)
    for (int i = 0; i < S::KH; i++) {
      const T* from = x + (c * S::HP + i * S::DH) * S::WP;
      T* to = gw + c * S::TAPS + i * S::KW;
      int o = 0;
      for (; o + OT <= S::O; o += OT)
        pixels_weights_tile<S, OT>(n, from, g + o * S::HO * S::WO, SO, to + o * SO, add);
      if constexpr (REST) pixels_weights_tile<S, REST>(n, from, g + o * S::HO * S::WO, SO, to + o * SO, add);
    }
}

// ---------------------------------------------------------------- pooling

// Windows KH x KW over C planes of H x W, with stride, padding and dilation; channels (LAST) or pixels lie side by side.
template <int C_, int H_, int W_, int HO_, int WO_, int KH_, int KW_, int SH_, int SW_, int PH_, int PW_, int DH_, int DW_,
          bool LAST_>
struct Windows {
  static constexpr int C = C_, H = H_, W = W_, HO = HO_, WO = WO_, KH = KH_, KW = KW_, SH = SH_, SW = SW_, PH = PH_,
                       PW = PW_, DH = DH_, DW = DW_;
  static constexpr bool LAST = LAST_;
  static constexpr long IN = LAST ? C : 1, IN_PLANE = LAST ? 1 : H * W, OUT_PLANE = LAST ? 1 : HO * WO;
  // f(pixel of the input, pixel of the output, tap) for each place of each window that lies inside.
  template <class F>
  static inline __attribute__((always_inline)) void each(F f) {
    for (int h = 0; h < HO; h++)
      for (int i = 0; i < KH; i++) {
        const int row = h * SH - PH + i * DH;
        if (row < 0 || row >= H) continue;
        for (int t = 0; t < WO; t++)
          for (int j = 0; j < KW; j++) {
            const int column = t * SW - PW + j * DW;
            if (column >= 0 && column < W) f(row * W + column, h * WO + t, i * KW + j);
          }
      }
  }
};

// The largest of each window and which it was: the first of equal ones, and a NaN over every number.
template <class P>
KERNEL void largest(long n, const T* x, T* y, I* at) {
  constexpr int CI = P::LAST ? P::C : 1, CO = P::LAST ? 1 : P::C;
  for (long b = 0; b < n * CO; b++) {
    const T* from = x + b * CI * P::H * P::W;
    T* to = y + b * CI * P::HO * P::WO;
    I* which = at + b * CI * P::HO * P::WO;
    for (int h = 0; h < P::HO; h++)
      for (int t = 0; t < P::WO; t++) {
        T* best = to + (h * P::WO + t) * CI;
        I* place = which + (h * P::WO + t) * CI;
        bool first = true;
        UNROLL for (int k = 0; k < P::KH * P::KW; k++) {
          const int row = h * P::SH - P::PH + k / P::KW * P::DH, column = t * P::SW - P::PW + k % P::KW * P::DW;
          if (row < 0 || row >= P::H || column < 0 || column >= P::W) continue;
          const T* p = from + (row * P::W + column) * CI;
          if (first) {
            VECTORIZE for (int c = 0; c < CI; c++) best[c] = p[c], place[c] = k;
          } else {
            VECTORIZE for (int c = 0; c < CI; c++) {
              const T v = p[c], old = best[c];
              const bool larger = v > old || v != v;
              place[c] = larger ? I(k) : place[c];
              best[c] = larger ? v : old;
            }
          }
          first = false;
        }
      }
  }
}

// The same for pairs of neighboring pixels that are looked at once: even and odd places of a row, in vectors.
template <class P>
constexpr bool PAIRS = !P::LAST && P::KW == 2 && P::SW == 2 && P::PW == 0 && P::DW == 1 && P::KH == P::SH && P::PH == 0 && P::DH == 1;

template <class P>
KERNEL void largest_back_pairs(long n, const T* __restrict g, const I* __restrict at, T* __restrict gx) {
  if (P::HO * P::KH != P::H || P::WO * 2 != P::W) memset(gx, 0, sizeof(T) * n * P::C * P::H * P::W);
  for (long b = 0; b < n * P::C; b++)
    for (int h = 0; h < P::HO; h++) {
      const T* part = g + (b * P::HO + h) * P::WO;
      const I* place = at + (b * P::HO + h) * P::WO;
      for (int i = 0; i < P::KH; i++) {
        T* to = gx + (b * P::H + h * P::KH + i) * P::W;
        VECTORIZE for (int t = 0; t < P::WO; t++) {
          to[2 * t] = place[t] == 2 * i ? part[t] : T(0);
          to[2 * t + 1] = place[t] == 2 * i + 1 ? part[t] : T(0);
        }
      }
    }
}

template <class P>
KERNEL void largest_back(long n, const T* __restrict g, const I* __restrict at, T* __restrict gx) {
  if constexpr (PAIRS<P>) return largest_back_pairs<P>(n, g, at, gx);
  constexpr int CI = P::LAST ? P::C : 1, CO = P::LAST ? 1 : P::C;
  constexpr bool APART = P::KH == P::SH && P::KW == P::SW && P::PH == 0 && P::PW == 0 && P::DH == 1 && P::DW == 1;
  if (!APART || P::HO * P::KH != P::H || P::WO * P::KW != P::W) memset(gx, 0, sizeof(T) * n * P::C * P::H * P::W);
  for (long b = 0; b < n * CO; b++) {
    const T* from = g + b * CI * P::HO * P::WO;
    const I* which = at + b * CI * P::HO * P::WO;
    T* to = gx + b * CI * P::H * P::W;
    for (int h = 0; h < P::HO; h++)
      for (int t = 0; t < P::WO; t++) {
        const T* part = from + (h * P::WO + t) * CI;
        const I* place = which + (h * P::WO + t) * CI;
        UNROLL for (int k = 0; k < P::KH * P::KW; k++) {
          const int row = h * P::SH - P::PH + k / P::KW * P::DH, column = t * P::SW - P::PW + k % P::KW * P::DW;
          if (row < 0 || row >= P::H || column < 0 || column >= P::W) continue;
          T* p = to + (row * P::W + column) * CI;
          VECTORIZE for (int c = 0; c < CI; c++) p[c] = (APART ? T(0) : p[c]) + (place[c] == k ? part[c] : T(0));
        }
      }
  }
}

// Means of windows; `whole` divides by the size of a window also where it reaches beyond the edge.
template <class P>
INLINE T window_share(int h, int t, bool whole, long divisor) {
  if (divisor) return T(1) / divisor;
  const int top = h * P::SH - P::PH, left = t * P::SW - P::PW;
  const int bottom = std::min(top + P::KH, P::H + P::PH), right = std::min(left + P::KW, P::W + P::PW);
  if (whole) return T(1) / ((bottom - top) * (right - left));
  return T(1) / ((std::min(bottom, P::H) - std::max(top, 0)) * (std::min(right, P::W) - std::max(left, 0)));
}

template <class P>
KERNEL void average(long n, const T* x, T* y, bool whole, long divisor) {
  constexpr int CI = P::LAST ? P::C : 1, CO = P::LAST ? 1 : P::C;
  memset(y, 0, sizeof(T) * n * P::C * P::HO * P::WO);
  for (long b = 0; b < n * CO; b++) {
    const T* from = x + b * CI * P::H * P::W;
    T* to = y + b * CI * P::HO * P::WO;
    P::each([&](int in, int out, int) { VECTORIZE for (int c = 0; c < CI; c++) to[out * CI + c] += from[in * CI + c]; });
    for (int out = 0; out < P::HO * P::WO; out++) {
      const T share = window_share<P>(out / P::WO, out % P::WO, whole, divisor);
      VECTORIZE for (int c = 0; c < CI; c++) to[out * CI + c] *= share;
    }
  }
}

template <class P>
KERNEL void average_back(long n, const T* g, T* gx, bool whole, long divisor) {
  constexpr int CI = P::LAST ? P::C : 1, CO = P::LAST ? 1 : P::C;
  memset(gx, 0, sizeof(T) * n * P::C * P::H * P::W);
  for (long b = 0; b < n * CO; b++) {
    const T* from = g + b * CI * P::HO * P::WO;
    T* to = gx + b * CI * P::H * P::W;
    P::each([&](int in, int out, int) {
      const T share = window_share<P>(out / P::WO, out % P::WO, whole, divisor);
      VECTORIZE for (int c = 0; c < CI; c++) to[in * CI + c] += from[out * CI + c] * share;
    });
  }
}

// Means over HO x WO areas that cover the plane.
template <class P, bool BACK>
KERNEL void areas(long n, const T* from, T* to) {
  constexpr int CI = P::LAST ? P::C : 1, CO = P::LAST ? 1 : P::C;
  memset(to, 0, sizeof(T) * n * P::C * (BACK ? P::H * P::W : P::HO * P::WO));
  for (long b = 0; b < n * CO; b++)
    for (int h = 0; h < P::HO; h++)
      for (int t = 0; t < P::WO; t++) {
        const int top = h * P::H / P::HO, bottom = ((h + 1) * P::H + P::HO - 1) / P::HO;
        const int left = t * P::W / P::WO, right = ((t + 1) * P::W + P::WO - 1) / P::WO;
        const T share = T(1) / ((bottom - top) * (right - left));
        for (int row = top; row < bottom; row++)
          for (int column = left; column < right; column++) {
            const long in = (b * P::H * P::W + row * P::W + column) * CI, out = (b * P::HO * P::WO + h * P::WO + t) * CI;
            VECTORIZE for (int c = 0; c < CI; c++) to[(BACK ? in : out) + c] += share * from[(BACK ? out : in) + c];
          }
      }
}
