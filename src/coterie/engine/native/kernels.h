// Layers of one client's model on a CPU, forward and backward.
//
// An activation is an array of V: one V is the same place of the activation in N samples of a batch, so every loop
// below is full of independent arithmetic whatever the layer's shape. Where a register holds more than N numbers,
// convolutions take neighboring places of a row together, and linear layers neighboring inputs of one sample. Shapes
// are template arguments: the compiler unrolls the small loops and keeps a tile of sums in registers. Nothing depends
// on other clients.
//
// The text that includes this file defines T (the number), I (an integer of its size) and N (samples in a V).

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

typedef T V __attribute__((vector_size(N * sizeof(T))));
typedef I VI __attribute__((vector_size(N * sizeof(T))));

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

#if defined(__AVX512F__)
constexpr int REGISTER_BYTES = 64, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int REGISTER_BYTES = 32, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int REGISTER_BYTES = 16, REGISTERS = 32;
#else
constexpr int REGISTER_BYTES = 16, REGISTERS = 16;
#endif
constexpr int PER_V = sizeof(V) > REGISTER_BYTES ? sizeof(V) / REGISTER_BYTES : 1;
constexpr int SUMS = REGISTERS / PER_V * 3 / 4 > 4 ? REGISTERS / PER_V * 3 / 4 : 4;  // registers, or V, kept as sums

// Neighboring places of a row follow each other in memory: where a V is smaller than a register, a register R holds
// several of them, and a loop over a row takes PLACES places at a time.
constexpr int PLACES = sizeof(V) < REGISTER_BYTES ? REGISTER_BYTES / sizeof(V) : 1, LANES = PLACES * N;
typedef T R __attribute__((vector_size(LANES * sizeof(T))));

// What holds places of a row of W places, and how many it takes to cover the row. The last one ends with the row, so
// it may overlap the one before.
template <int W>
struct Cover {
  static constexpr int EACH = W < PLACES ? 1 : PLACES, COUNT = (W + EACH - 1) / EACH;
  typedef T Type __attribute__((vector_size(EACH * sizeof(V))));
  static constexpr int at(int k) { return k * EACH + EACH > W ? W - EACH : k * EACH; }
};

template <class A>
INLINE A load(const void* from) {  // at any address
  A a;
  memcpy(&a, from, sizeof(A));
  return a;
}

// The same address, by which the compiler names all that is read near it: without this it keeps one for every load.
template <class P>
INLINE P* pinned(P* p) {
  asm("" : "+r"(p));
  return p;
}

template <class A>
INLINE void store(void* to, A a) {
  memcpy(to, &a, sizeof(A));
}

// The size of equal tiles that cover n places with as few tiles of at most `most` as possible.
constexpr int tile(int n, int most) {
  most = most < 1 ? 1 : most;
  int tiles = (n + most - 1) / most;
  return (n + tiles - 1) / tiles;
}

// C planes of H x W places; rows are ROW apart and planes PLANE.
template <int C_, int H_, int W_, int ROW_, int PLANE_>
struct Grid {
  static constexpr int C = C_, H = H_, W = W_, ROW = ROW_, PLANE = PLANE_;
};

// Blocks of H lanes of a and b by turns: of each pair of blocks the first (or, with SECOND, the second).
template <int H, bool SECOND, class A, int... LANE>
INLINE A blocks(A a, A b, std::integer_sequence<int, LANE...>) {
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
INLINE A blocks(A a, A b) {
  return blocks<H, SECOND>(a, b, std::make_integer_sequence<int, sizeof(A) / sizeof(T)>{});
}

// Sums over the lanes of COUNT vectors, all at once; COUNT is at most the number of lanes. Pairs of vectors are folded
// into one that holds half of each, until one vector holds a sum of each.
template <int COUNT, int H, class A>
INLINE void fold(A* v) {
  UNROLL for (int k = 0; k < H && k < COUNT; k++) {
    A other = k + H < COUNT ? v[k + H] : A{};
    v[k] = blocks<H, false>(v[k], other) + blocks<H, true>(v[k], other);
  }
  if constexpr (H > 1) fold<(COUNT < H ? COUNT : H), H / 2>(v);
}

template <class A>
INLINE T sum_of(A a) {
  fold<1, sizeof(A) / sizeof(T) / 2>(&a);
  return a[0];
}

// N vectors whose lanes are places, of one sample each, become N vectors whose lanes are samples; and back. A register
// that is larger than V holds PLACES times N places, and becomes places k, k + N, ...
template <int H = N / 2>
INLINE void exchange(R* v) {
  UNROLL for (int k = 0; k < N; k++)
    if (!(k & H)) {
      R first = blocks<H, false>(v[k], v[k + H]), second = blocks<H, true>(v[k], v[k + H]);
      v[k] = first, v[k + H] = second;
    }
  if constexpr (H > 1) exchange<H / 2>(v);
}

template <class A>
INLINE A root(A a) {
  if constexpr (sizeof(A) == sizeof(T)) {
    return std::sqrt(a);
  } else {
#if defined(__AVX512F__)
    if constexpr (sizeof(A) == 64 && sizeof(T) == 4) return (A)_mm512_sqrt_ps((__m512)a);
    if constexpr (sizeof(A) == 64 && sizeof(T) == 8) return (A)_mm512_sqrt_pd((__m512d)a);
#endif
    UNROLL for (int b = 0; b < int(sizeof(A) / sizeof(T)); b++) a[b] = std::sqrt(a[b]);
    return a;
  }
}

// ---------------------------------------------------------------- convolution, stride 1

// OT outputs x W places of one row: y[o][t] = bias[o] + sum of x[c][i][t + j] * w[o][c][i][j].
template <class X, int KH, int KW, int OT, int W>
INLINE void convolve_tile(const V* x, const T* w, const T* bias, V* y, int plane) {
  using Row = Cover<W>;
  using A = typename Row::Type;
  A sum[OT][Row::COUNT];
  UNROLL for (int o = 0; o < OT; o++) UNROLL for (int k = 0; k < Row::COUNT; k++)
    sum[o][k] = A{} + (bias ? bias[o] : T(0));
  for (int c = 0; c < X::C; c++)
    for (int i = 0; i < KH; i++) {
      const V* row = pinned(x + c * X::PLANE + i * X::ROW);
      const T* weights = pinned(w + (c * KH + i) * KW);
      UNROLL for (int j = 0; j < KW; j++) {
        A part[Row::COUNT];
        UNROLL for (int k = 0; k < Row::COUNT; k++) part[k] = load<A>(row + Row::at(k) + j);
        UNROLL for (int o = 0; o < OT; o++) {
          T s = weights[o * X::C * KH * KW + j];
          UNROLL for (int k = 0; k < Row::COUNT; k++) sum[o][k] += part[k] * s;
        }
      }
    }
  UNROLL for (int o = 0; o < OT; o++) UNROLL for (int k = 0; k < Row::COUNT; k++)
    store(y + o * plane + Row::at(k), sum[o][k]);
}

// One row of W places of OT outputs.
template <class X, int KH, int KW, int OT, int W>
INLINE void convolve_row(const V* x, const T* w, const T* bias, V* y, int plane) {
  constexpr int WT = PLACES * tile(Cover<W>::COUNT, SUMS / OT);
  int t = 0;
  for (; t + WT <= W; t += WT) convolve_tile<X, KH, KW, OT, WT>(x + t, w, bias, y + t, plane);
  if constexpr (W % WT != 0) convolve_tile<X, KH, KW, OT, W % WT>(x + t, w, bias, y + t, plane);
}

template <class X, class Y, int KH, int KW, int OT>
INLINE void convolve_outputs(const V* x, const T* w, const T* bias, V* y) {
  for (int h = 0; h < Y::H; h++)
    convolve_row<X, KH, KW, OT, Y::W>(x + h * X::ROW, w, bias, y + h * Y::ROW, Y::PLANE);
}

template <class X, class Y, int KH, int KW>
static void convolve(const V* x, const T* w, const T* bias, V* y) {
  constexpr int OT = tile(Y::C, 4), SIZE = X::C * KH * KW;
  int o = 0;
  for (; o + OT <= Y::C; o += OT)
    convolve_outputs<X, Y, KH, KW, OT>(x, w + o * SIZE, bias ? bias + o : bias, y + o * Y::PLANE);
  if constexpr (Y::C % OT != 0)
    convolve_outputs<X, Y, KH, KW, Y::C % OT>(x, w + o * SIZE, bias ? bias + o : bias, y + o * Y::PLANE);
}

// The largest of PH x PW places and which it was: the first of equal ones, and a NaN over every number.
template <int PH, int PW>
INLINE void largest(const V* x, int row, V* y, VI* at) {
  V best = x[0];
  VI place = VI{};
  UNROLL for (int k = 1; k < PH * PW; k++) {
    V other = x[k / PW * row + k % PW];
    VI larger = (other > best) | (other != other);
    best = larger ? other : best;
    place = larger ? VI{} + k : place;
  }
  *y = best;
  *at = place;
}

// Convolution and max-pooling over PH x PW: rows that are being pooled stay in the cache.
template <class X, class Z, int KH, int KW, int PH, int PW, int OT>
INLINE void convolve_pool_outputs(const V* x, const T* w, const T* bias, V* z, VI* at) {
  constexpr int W = Z::W * PW;
  V rows[OT][PH][W];
  for (int h = 0; h < Z::H; h++) {
    for (int i = 0; i < PH; i++)
      convolve_row<X, KH, KW, OT, W>(x + (h * PH + i) * X::ROW, w, bias, &rows[0][i][0], PH * W);
    for (int o = 0; o < OT; o++)
      for (int t = 0; t < Z::W; t++)
        largest<PH, PW>(&rows[o][0][t * PW], W, z + o * Z::PLANE + h * Z::ROW + t, at + (o * Z::H + h) * Z::W + t);
  }
}

template <class X, class Z, int KH, int KW, int PH, int PW>
static void convolve_pool(const V* x, const T* w, const T* bias, V* z, VI* at) {
  constexpr int OT = tile(Z::C, 4), SIZE = X::C * KH * KW, PLACES = Z::H * Z::W;
  int o = 0;
  for (; o + OT <= Z::C; o += OT)
    convolve_pool_outputs<X, Z, KH, KW, PH, PW, OT>(x, w + o * SIZE, bias ? bias + o : bias, z + o * Z::PLANE,
                                                    at + o * PLACES);
  if constexpr (Z::C % OT != 0)
    convolve_pool_outputs<X, Z, KH, KW, PH, PW, Z::C % OT>(x, w + o * SIZE, bias ? bias + o : bias, z + o * Z::PLANE,
                                                           at + o * PLACES);
}

// gx[c][h][w] = sum of g[o][h + PADH - i][w + PADW - j] * w[o][c][i][j], for W places of one row from FROM on. Places
// of g left and right of a row are zeros; a register that would hold only such zeros is skipped, as are rows above and
// below.
template <class GX, class G, int KH, int KW, int PADH, int PADW, int CT, int FROM, int W>
INLINE void convolve_back_tile(const V* g, const T* w, V* gx, int h) {
  using Row = Cover<W>;
  using A = typename Row::Type;
  A sum[CT][Row::COUNT];
  UNROLL for (int c = 0; c < CT; c++) UNROLL for (int k = 0; k < Row::COUNT; k++) sum[c][k] = A{};
  const int first = h + PADH - G::H + 1 > 0 ? h + PADH - G::H + 1 : 0, last = h + PADH < KH - 1 ? h + PADH : KH - 1;
  for (int o = 0; o < G::C; o++)
    for (int i = first; i <= last; i++) {
      const V* row = pinned(g + o * G::PLANE + (h + PADH - i) * G::ROW);
      const T* weights = pinned(w + (o * GX::C * KH + i) * KW);
      UNROLL for (int j = 0; j < KW; j++) UNROLL for (int c = 0; c < CT; c++) {
        T s = weights[c * KH * KW + j];
        UNROLL for (int k = 0; k < Row::COUNT; k++) {
          const int t = FROM + Row::at(k) + PADW - j;
          if (t > -Row::EACH && t < G::W) sum[c][k] += load<A>(row + t) * s;
        }
      }
    }
  UNROLL for (int c = 0; c < CT; c++) UNROLL for (int k = 0; k < Row::COUNT; k++)
    store(gx + c * GX::PLANE + FROM + Row::at(k), sum[c][k]);
}

template <class GX, class G, int KH, int KW, int PADH, int PADW, int CT, int FROM = 0>
INLINE void convolve_back_row(const V* g, const T* w, V* gx, int h) {
  constexpr int WT = PLACES * tile(Cover<GX::W>::COUNT, SUMS / CT), W = FROM + WT > GX::W ? GX::W - FROM : WT;
  convolve_back_tile<GX, G, KH, KW, PADH, PADW, CT, FROM, W>(g, w, gx, h);
  if constexpr (FROM + W < GX::W) convolve_back_row<GX, G, KH, KW, PADH, PADW, CT, FROM + W>(g, w, gx, h);
}

template <class GX, class G, int KH, int KW, int PADH, int PADW, int CT>
INLINE void convolve_back_planes(const V* g, const T* w, V* gx) {
  for (int h = 0; h < GX::H; h++) convolve_back_row<GX, G, KH, KW, PADH, PADW, CT>(g, w, gx + h * GX::ROW, h);
}

template <class GX, class G, int KH, int KW, int PADH, int PADW>
static void convolve_back(const V* g, const T* w, V* gx) {
  constexpr int CT = tile(GX::C, 4);
  int c = 0;
  for (; c + CT <= GX::C; c += CT)
    convolve_back_planes<GX, G, KH, KW, PADH, PADW, CT>(g, w + c * KH * KW, gx + c * GX::PLANE);
  if constexpr (GX::C % CT != 0)
    convolve_back_planes<GX, G, KH, KW, PADH, PADW, GX::C % CT>(g, w + c * KH * KW, gx + c * GX::PLANE);
}

// The gradient goes to the place that was largest; places that fill no window get none.
template <class GX, class GY, int PH, int PW>
INLINE void pool_back_rows(const V* gy, const VI* at, int rows, V* gx) {
  for (int c = 0; c < GY::C; c++)
    for (int h = 0; h < rows; h++)
      for (int t = 0; t < GY::W; t++) {
        V part = gy[c * GY::PLANE + h * GY::ROW + t];
        VI place = at[(c * GY::H + h) * GY::W + t];
        V* to = gx + c * GX::PLANE + h * PH * GX::ROW + t * PW;
        UNROLL for (int k = 0; k < PH * PW; k++) to[k / PW * GX::ROW + k % PW] = place == k ? part : V{};
      }
}

// Outputs of a tile of convolve_weights, whose sums fill the registers.
constexpr int weights_tile(int outputs, int kw) { return tile(outputs, SUMS / kw < 8 ? SUMS / kw : 8); }

// Rows that are taken at once, a multiple of `step`, so that C planes of them and what one plane of X gives to them
// stay in the cache next to the core.
template <class X, int KH>
constexpr int rows_in_cache(int height, int row, int c, int step) {
  constexpr int CACHE = 36 * 1024 / int(sizeof(V));
  int rows = step;
  while (rows + step <= height && (rows + step) * row * c + (rows + step + KH - 1) * X::ROW <= CACHE) rows += step;
  return rows;
}

// Add the sums over lanes of sum[o][j] to to[o * STRIDE + j].
template <class A, int O, int J, int STRIDE, int FROM = 0>
INLINE void add_sums(A* sum, T* to) {
  constexpr int LANE = sizeof(A) / sizeof(T), COUNT = O * J - FROM < LANE ? O * J - FROM : LANE;
  fold<COUNT, LANE / 2>(sum + FROM);
  UNROLL for (int k = 0; k < COUNT; k++) to[(FROM + k) / J * STRIDE + (FROM + k) % J] += sum[FROM][k];
  if constexpr (FROM + COUNT < O * J) add_sums<A, O, J, STRIDE, FROM + COUNT>(sum, to);
}

// gw[o][c][i][j] += sum of g[o][h][w] * x[c][h + i][w + j], for one (c, i), OT outputs and places FROM to TO of rows.
template <class A, class X, class G, int KH, int KW, int OT, int FROM, int TO>
INLINE void convolve_weights_tile(const V* x, const V* g, int rows, T* gw) {
  A sum[OT * KW];
  UNROLL for (int k = 0; k < OT * KW; k++) sum[k] = A{};
  for (int h = 0; h < rows; h++)
    _Pragma("GCC unroll 2") for (int t = FROM; t < TO; t += sizeof(A) / sizeof(V)) {
      const V *row = pinned(x + h * X::ROW + t), *from = pinned(g + h * G::ROW + t);
      A part[OT];
      UNROLL for (int o = 0; o < OT; o++) part[o] = load<A>(from + o * G::PLANE);
      UNROLL for (int j = 0; j < KW; j++) UNROLL for (int o = 0; o < OT; o++)
        sum[o * KW + j] += part[o] * load<A>(row + j);
    }
  add_sums<A, OT, KW, X::C * KH * KW>(sum, gw);
}

template <class X, class G, int KH, int KW, int OT>
INLINE void convolve_weights_outputs(const V* x, const V* g, int rows, T* gw) {
  for (int c = 0; c < X::C; c++)
    for (int i = 0; i < KH; i++) {
      constexpr int EVEN = G::W / PLACES * PLACES;  // what is left of a row is taken place by place
      const V* from = x + c * X::PLANE + i * X::ROW;
      T* to = gw + (c * KH + i) * KW;
      if constexpr (EVEN > 0) convolve_weights_tile<R, X, G, KH, KW, OT, 0, EVEN>(from, g, rows, to);
      if constexpr (EVEN < G::W) convolve_weights_tile<V, X, G, KH, KW, OT, EVEN, G::W>(from, g, rows, to);
    }
}

// The share of `rows` rows of g in the gradient of the weights.
template <class X, class G, int KH, int KW>
INLINE void convolve_weights_rows(const V* x, const V* g, int rows, T* gw) {
  constexpr int OT = weights_tile(G::C, KW), SIZE = X::C * KH * KW;
  int o = 0;
  for (; o + OT <= G::C; o += OT)
    convolve_weights_outputs<X, G, KH, KW, OT>(x, g + o * G::PLANE, rows, gw + o * SIZE);
  if constexpr (G::C % OT != 0)
    convolve_weights_outputs<X, G, KH, KW, G::C % OT>(x, g + o * G::PLANE, rows, gw + o * SIZE);
}

template <class X, class G, int KH, int KW, class Step>
static void convolve_weights(const V* x, const V* g, const Step& step, int weight) {
  constexpr int SIZE = G::C * X::C * KH * KW, ROWS = rows_in_cache<X, KH>(G::H, G::ROW, weights_tile(G::C, KW), 1);
  static thread_local T gw[SIZE];
  memset(gw, 0, sizeof gw);
  for (int h = 0; h < G::H; h += ROWS)
    convolve_weights_rows<X, G, KH, KW>(x + h * X::ROW, g + h * G::ROW, G::H - h < ROWS ? G::H - h : ROWS, gw);
  step.put(weight, gw, SIZE);
}

// The same where g is known before it goes back through max-pooling, and nobody else wants to know it after.
template <class X, class GZ, int KH, int KW, int PH, int PW, int ROWS, int OT>
INLINE void convolve_pool_weights_outputs(const V* x, const V* gz, const VI* at, int rows, T* gw) {
  using G = Grid<OT, ROWS, GZ::W * PW, GZ::W * PW, ROWS * GZ::W * PW>;
  alignas(64) V g[OT * G::PLANE];
  pool_back_rows<G, Grid<OT, GZ::H, GZ::W, GZ::ROW, GZ::PLANE>, PH, PW>(gz, at, rows / PH, g);
  convolve_weights_outputs<X, G, KH, KW, OT>(x, g, rows, gw);
}

template <class X, class GZ, int KH, int KW, int PH, int PW, class Step>
static void convolve_pool_weights(const V* x, const V* gz, const VI* at, const Step& step, int weight) {
  constexpr int SIZE = X::C * KH * KW, HEIGHT = GZ::H * PH, OT = weights_tile(GZ::C, KW);
  constexpr int ROWS = rows_in_cache<X, KH>(HEIGHT, GZ::W * PW, OT, PH), PLACES_OF_Z = GZ::H * GZ::W;
  static thread_local T gw[GZ::C * SIZE];
  memset(gw, 0, sizeof gw);
  for (int h = 0; h < HEIGHT; h += ROWS) {
    const int rows = HEIGHT - h < ROWS ? HEIGHT - h : ROWS;
    const V *from = x + h * X::ROW, *gz_rows = gz + h / PH * GZ::ROW;
    const VI* at_rows = at + h / PH * GZ::W;
    int o = 0;
    for (; o + OT <= GZ::C; o += OT)
      convolve_pool_weights_outputs<X, GZ, KH, KW, PH, PW, ROWS, OT>(from, gz_rows + o * GZ::PLANE,
                                                                     at_rows + o * PLACES_OF_Z, rows, gw + o * SIZE);
    if constexpr (GZ::C % OT != 0)
      convolve_pool_weights_outputs<X, GZ, KH, KW, PH, PW, ROWS, GZ::C % OT>(
          from, gz_rows + o * GZ::PLANE, at_rows + o * PLACES_OF_Z, rows, gw + o * SIZE);
  }
  step.put(weight, gw, GZ::C * SIZE);
}

// The gradient of one bias for each of C planes of SIZE places, side by side.
template <int C, int SIZE, class Step>
static void bias_gradient(const V* g, const Step& step, int bias) {
  constexpr int EVEN = SIZE / (4 * PLACES) * 4 * PLACES;
  T gb[C];
  for (int c = 0; c < C; c++, g += SIZE) {
    R sum[4] = {};
    V rest = {};
    for (int t = 0; t < EVEN; t += 4 * PLACES) UNROLL for (int k = 0; k < 4; k++) sum[k] += load<R>(g + t + k * PLACES);
    UNROLL for (int t = EVEN; t < SIZE; t++) rest += g[t];
    gb[c] = sum_of((sum[0] + sum[1]) + (sum[2] + sum[3])) + sum_of(rest);
  }
  step.put(bias, gb, C);
}

// ---------------------------------------------------------------- pooling and elementwise layers

template <class X, class Y>
static void copy(const V* x, V* y) {
  for (int c = 0; c < X::C; c++)
    for (int h = 0; h < X::H; h++)
      for (int t = 0; t < X::W; t++) y[c * Y::PLANE + h * Y::ROW + t] = x[c * X::PLANE + h * X::ROW + t];
}

template <class X, class Y, int PH, int PW>
static void pool(const V* x, V* y, VI* at) {
  for (int c = 0; c < Y::C; c++)
    for (int h = 0; h < Y::H; h++)
      for (int t = 0; t < Y::W; t++)
        largest<PH, PW>(x + c * X::PLANE + h * PH * X::ROW + t * PW, X::ROW, y + c * Y::PLANE + h * Y::ROW + t,
                        at + (c * Y::H + h) * Y::W + t);
}

template <class GX, class GY, int PH, int PW>
static void pool_back(const V* gy, const VI* at, V* gx) {
  if constexpr (GX::H != GY::H * PH || GX::W != GY::W * PW) memset(gx, 0, GX::C * GX::PLANE * sizeof(V));
  pool_back_rows<GX, GY, PH, PW>(gy, at, GY::H, gx);
}

template <class X, class F>
INLINE void each(F f) {
  for (int c = 0; c < X::C; c++)
    for (int h = 0; h < X::H; h++)
      for (int t = 0; t < X::W; t++) f(c, h, t, c * X::PLANE + h * X::ROW + t);
}

template <class X>
static void relu(V* x) {
  each<X>([=](int, int, int, int p) { x[p] = x[p] < T(0) ? V{} : x[p]; });
}

template <class Y, class G>
static void relu_back(const V* y, V* g) {
  each<G>([=](int c, int h, int t, int p) { g[p] = y[c * Y::PLANE + h * Y::ROW + t] <= T(0) ? V{} : g[p]; });
}

template <class X>
static void leaky(V* x, T slope) {
  each<X>([=](int, int, int, int p) { x[p] = x[p] < T(0) ? x[p] * slope : x[p]; });
}

template <class Y, class G>
static void leaky_back(const V* y, V* g, T slope) {
  each<G>([=](int c, int h, int t, int p) { g[p] = y[c * Y::PLANE + h * Y::ROW + t] <= T(0) ? g[p] * slope : g[p]; });
}

template <class X>
static void hyperbolic(V* x) {
  each<X>([=](int, int, int, int p) { for (int b = 0; b < N; b++) ((T*)(x + p))[b] = std::tanh(((T*)(x + p))[b]); });
}

template <class Y, class G>
static void hyperbolic_back(const V* y, V* g) {
  each<G>([=](int c, int h, int t, int p) { V v = y[c * Y::PLANE + h * Y::ROW + t]; g[p] *= T(1) - v * v; });
}

// Zero entries by a mask that is a function of the key, the layer, the sample's place in the batch and the entry.
template <class X, bool CHANNELS>
static void dropout(V* x, VI* kept, uint64_t key, uint64_t layer, uint64_t threshold, T scale, int sample) {
  const uint64_t start = scrambled(key + layer), entries = CHANNELS ? X::C : X::C * X::H * X::W;
  each<X>([=](int c, int h, int t, int p) {
    int entry = (c * X::H + h) * X::W + t;
    VI keep = VI{};
    for (int b = 0; b < N; b++) {
      uint64_t place = (sample + b) * entries + (CHANNELS ? c : entry);
      keep[b] = (scrambled(start + place) & ((uint64_t(1) << 53) - 1)) >= threshold ? I(-1) : I(0);
    }
    kept[entry] = keep;
    x[p] = x[p] * (keep ? V{} + T(1) : V{}) / scale;
  });
}

template <class G>
static void dropout_back(const VI* kept, V* g, T scale) {
  each<G>([=](int c, int h, int t, int p) {
    g[p] = g[p] / scale * (kept[(c * G::H + h) * G::W + t] ? V{} + T(1) : V{});
  });
}

// ---------------------------------------------------------------- linear layer

// Hand a piece of a gradient to the optimizer, a register at a time.
template <class Step>
INLINE void put_all(const Step& step, int at, const T* piece, int count) {
  int i = 0;
  for (; i + LANES <= count; i += LANES) step.put(at + i, load<R>(piece + i));
  for (; i < count; i++) step.put(at + i, piece[i]);
}


// A linear layer has no neighboring places that share a weight, so registers hold neighboring inputs of one sample,
// as the weights lie in memory. WHOLE inputs fill registers; the rest is taken with samples as lanes.
template <int IN>
struct Inputs {
  static constexpr int WHOLE = IN / LANES * LANES, ROW = (IN + LANES - 1) / LANES * LANES;
};

// Each sample's inputs side by side.
template <int IN>
static void by_sample(const V* x, T* xs) {
  using In = Inputs<IN>;
  for (int i = 0; i < In::WHOLE; i += LANES) {
    R v[N];
    UNROLL for (int k = 0; k < N; k++) UNROLL for (int p = 0; p < PLACES; p++) ((V*)(v + k))[p] = x[i + p * N + k];
    exchange(v);
    UNROLL for (int b = 0; b < N; b++) store(xs + b * In::ROW + i, v[b]);
  }
  for (int i = In::WHOLE; i < IN; i++)
    for (int b = 0; b < N; b++) xs[b * In::ROW + i] = x[i][b];
}

// y[o] = bias[o] + sum of x[i] * w[o][i] over the inputs FROM to IN.
template <int IN, int FROM, int OT>
INLINE void linear_rest(const V* x, const T* w, const T* bias, V* y) {
  V sum[OT];
  UNROLL for (int o = 0; o < OT; o++) sum[o] = V{} + (bias ? bias[o] : T(0));
  for (int i = FROM; i < IN; i++) UNROLL for (int o = 0; o < OT; o++) sum[o] += x[i] * w[o * IN + i];
  UNROLL for (int o = 0; o < OT; o++) y[o] = sum[o];
}

// y[o] += sum of x[i] * w[o][i] over the inputs that fill registers, for as many outputs as A has V.
template <class A, int IN>
INLINE void linear_tile(const T* xs, const T* w, V* y) {
  constexpr int LANE = sizeof(A) / sizeof(T), OT = LANE / N;
  A sum[OT * N];
  UNROLL for (int k = 0; k < OT * N; k++) sum[k] = A{};
  for (int i = 0; i < Inputs<IN>::WHOLE; i += LANE)
    UNROLL for (int o = 0; o < OT; o++) {
      A weights = load<A>(w + o * IN + i);
      UNROLL for (int b = 0; b < N; b++) sum[o * N + b] += load<A>(xs + b * Inputs<IN>::ROW + i) * weights;
    }
  fold<OT * N, LANE / 2>(sum);
  store(y, load<A>(y) + sum[0]);
}

template <int IN, int OUT>
static void linear(const V* x, const T* xs, const T* w, const T* bias, V* y) {
  constexpr int WHOLE = Inputs<IN>::WHOLE, OT = tile(OUT, SUMS / 2);
  int o = 0;
  for (; o + OT <= OUT; o += OT) linear_rest<IN, WHOLE, OT>(x, w + o * IN, bias ? bias + o : bias, y + o);
  if constexpr (OUT % OT != 0) linear_rest<IN, WHOLE, OUT % OT>(x, w + o * IN, bias ? bias + o : bias, y + o);
  if constexpr (WHOLE > 0) {
    for (o = 0; o + PLACES <= OUT; o += PLACES) linear_tile<R, IN>(xs, w + o * IN, y + o);
    for (; o < OUT; o++) linear_tile<V, IN>(xs, w + o * IN, y + o);
  }
}

// gx[i] = sum of g[o] * w[o][i], for IT inputs.
template <int IN, int OUT, int IT>
INLINE void linear_back_rest(const V* g, const T* w, V* gx) {
  V sum[IT];
  UNROLL for (int i = 0; i < IT; i++) sum[i] = V{};
  for (int o = 0; o < OUT; o++) UNROLL for (int i = 0; i < IT; i++) sum[i] += g[o] * w[o * IN + i];
  UNROLL for (int i = 0; i < IT; i++) gx[i] = sum[i];
}

// The same for IT registers of inputs.
template <int IN, int OUT, int IT>
INLINE void linear_back_tile(const V* g, const T* w, V* gx) {
  R sum[IT][N];
  UNROLL for (int i = 0; i < IT; i++) UNROLL for (int b = 0; b < N; b++) sum[i][b] = R{};
  for (int o = 0; o < OUT; o++) {
    R weights[IT];
    UNROLL for (int i = 0; i < IT; i++) weights[i] = load<R>(w + o * IN + i * LANES);
    UNROLL for (int b = 0; b < N; b++) {
      T s = ((const T*)(g + o))[b];
      UNROLL for (int i = 0; i < IT; i++) sum[i][b] += weights[i] * s;
    }
  }
  UNROLL for (int i = 0; i < IT; i++) {
    exchange(sum[i]);
    UNROLL for (int k = 0; k < N; k++) UNROLL for (int p = 0; p < PLACES; p++)
      gx[i * LANES + p * N + k] = ((V*)(sum[i] + k))[p];
  }
}

template <int IN, int OUT>
static void linear_back(const V* g, const T* w, V* gx) {
  constexpr int WHOLE = Inputs<IN>::WHOLE, IT = SUMS / N > 1 ? SUMS / N : 1;
  int i = 0;
  for (; i + IT * LANES <= WHOLE; i += IT * LANES) linear_back_tile<IN, OUT, IT>(g, w + i, gx + i);
  for (; i < WHOLE; i += LANES) linear_back_tile<IN, OUT, 1>(g, w + i, gx + i);
  if constexpr (WHOLE < IN) linear_back_rest<IN, OUT, IN - WHOLE>(g, w + WHOLE, gx + WHOLE);
}

// gw[o][i] = sum over samples of g[o] * x[i]. A piece of OT rows is handed to the optimizer as soon as it is known, so
// the gradient of a large layer is never stored.
template <int IN, int OT, int IT, class Step>
INLINE void linear_weights_tile(const T* xs, const V* g, const Step& step, int at, int count) {
  R sum[OT][IT];
  UNROLL for (int o = 0; o < OT; o++) UNROLL for (int i = 0; i < IT; i++) sum[o][i] = R{};
  UNROLL for (int b = 0; b < N; b++) {
    R x[IT];
    UNROLL for (int i = 0; i < IT; i++) x[i] = load<R>(xs + b * Inputs<IN>::ROW + i * LANES);
    UNROLL for (int o = 0; o < OT; o++) {
      T s = ((const T*)(g + o))[b];
      UNROLL for (int i = 0; i < IT; i++) sum[o][i] += x[i] * s;
    }
  }
  for (int o = 0; o < OT; o++)
    if (count == IT * LANES)
      UNROLL for (int i = 0; i < IT; i++) step.put(at + o * IN + i * LANES, sum[o][i]);
    else
      step.put(at + o * IN, (T*)sum[o], count);
}

template <int IN, int OT, class Step>
INLINE void linear_weights_rows(const T* xs, const V* g, const Step& step, int at) {
  constexpr int IT = tile(4, SUMS / OT), WHOLE = Inputs<IN>::WHOLE;
  int i = 0;
  for (; i + IT * LANES <= WHOLE; i += IT * LANES)
    linear_weights_tile<IN, OT, IT>(xs + i, g, step, at + i, IT * LANES);
  for (; i < WHOLE; i += LANES) linear_weights_tile<IN, OT, 1>(xs + i, g, step, at + i, LANES);
  if constexpr (WHOLE < IN) linear_weights_tile<IN, OT, 1>(xs + i, g, step, at + i, IN - WHOLE);
}

template <int IN, int OUT, class Step>
static void linear_weights(const T* xs, const V* g, const Step& step, int weight) {
  constexpr int OT = 4;
  int o = 0;
  for (; o + OT <= OUT; o += OT) linear_weights_rows<IN, OT>(xs, g + o, step, weight + o * IN);
  if constexpr (OUT % OT != 0) linear_weights_rows<IN, OUT % OT>(xs, g + o, step, weight + o * IN);
}

// ---------------------------------------------------------------- linear layer that is a mixture of M endpoints

// mixed = gain * sum of alpha[m] * w[m], an endpoint after the other.
template <int M, int SIZE>
static void mix_endpoints(const T* w, const T* alpha, T gain, T* mixed) {
  memset(mixed, 0, SIZE * sizeof(T));
  for (int m = 0; m < M; m++)
    for (int i = 0; i < SIZE; i++) mixed[i] += gain * alpha[m] * w[m * SIZE + i];
}

// Takes the gradient of the mixed layer and hands each endpoint its share.
template <int M, int IN, int OUT, class Step>
struct Endpoints {
  const Step& step;
  const T* alpha;
  T gain;
  int weight;
  bool shared_bias;

  template <class A>
  INLINE_MEMBER void put(int at, A piece) const {
    const bool bias = at < weight || at >= weight + OUT * IN;
    if (bias && shared_bias) return step.put(at, piece);
    for (int m = 0; m < M; m++) step.put(at + m * (bias ? OUT : OUT * IN), piece * (gain * alpha[m]));
  }

  INLINE_MEMBER void put(int at, const T* piece, int count) const { put_all(*this, at, piece, count); }
};
