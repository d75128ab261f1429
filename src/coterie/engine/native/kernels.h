// Layers of one client's model on a CPU, forward and backward.
//
// An activation is an array of V: one V is the same place of the activation in N samples of a batch, so every loop
// below is full of independent arithmetic whatever the layer's shape. Shapes are template arguments: the compiler
// unrolls the small loops and keeps a tile of sums in registers. Nothing depends on other clients.
//
// The text that includes this file defines T (the number), I (an integer of its size) and N (samples in a V).

#include <cmath>
#include <cstdint>
#include <cstring>

typedef T V __attribute__((vector_size(N * sizeof(T))));
typedef I VI __attribute__((vector_size(N * sizeof(T))));
typedef T VU __attribute__((vector_size(N * sizeof(T)), aligned(sizeof(T))));  // V at any address of a T

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

#if defined(__AVX512F__)
constexpr int REGISTER_BYTES = sizeof(V) > 32 ? 64 : 32, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int REGISTER_BYTES = 32, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int REGISTER_BYTES = 16, REGISTERS = 32;
#else
constexpr int REGISTER_BYTES = 16, REGISTERS = 16;
#endif
constexpr int PER_V = sizeof(V) > REGISTER_BYTES ? sizeof(V) / REGISTER_BYTES : 1;
constexpr int SUMS = REGISTERS / PER_V * 3 / 4 > 4 ? REGISTERS / PER_V * 3 / 4 : 4;  // V kept as running sums

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

INLINE T sum_of(V v) {
  T s = 0;
  UNROLL for (int b = 0; b < N; b++) s += v[b];
  return s;
}

// ---------------------------------------------------------------- convolution, stride 1

// OT outputs x WT places of one row: y[o][t] = bias[o] + sum of x[c][i][t + j] * w[o][c][i][j].
template <class X, int KH, int KW, int OT, int WT>
INLINE void convolve_tile(const V* x, const T* w, const T* bias, V* y, int plane) {
  V sum[OT][WT];
  UNROLL for (int o = 0; o < OT; o++) UNROLL for (int t = 0; t < WT; t++) sum[o][t] = V{} + (bias ? bias[o] : T(0));
  for (int c = 0; c < X::C; c++)
    for (int i = 0; i < KH; i++) {
      const V* row = x + c * X::PLANE + i * X::ROW;
      const T* weights = w + (c * KH + i) * KW;
      UNROLL for (int j = 0; j < KW; j++) UNROLL for (int o = 0; o < OT; o++) {
        T s = weights[o * X::C * KH * KW + j];
        UNROLL for (int t = 0; t < WT; t++) sum[o][t] += row[t + j] * s;
      }
    }
  UNROLL for (int o = 0; o < OT; o++) UNROLL for (int t = 0; t < WT; t++) y[o * plane + t] = sum[o][t];
}

// One row of W places of OT outputs.
template <class X, int KH, int KW, int OT, int W>
INLINE void convolve_row(const V* x, const T* w, const T* bias, V* y, int plane) {
  constexpr int WT = tile(W, SUMS / OT);
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

// gx[c][h][w] = sum of g[o][h + PADH - i][w + PADW - j] * w[o][c][i][j]. Places of g left and right of a row are
// zeros; rows above and below are skipped.
template <class GX, class G, int KH, int KW, int PADH, int PADW, int CT, int WT>
INLINE void convolve_back_tile(const V* g, const T* w, V* gx, int h) {
  V sum[CT][WT];
  UNROLL for (int c = 0; c < CT; c++) UNROLL for (int t = 0; t < WT; t++) sum[c][t] = V{};
  const int first = h + PADH - G::H + 1 > 0 ? h + PADH - G::H + 1 : 0, last = h + PADH < KH - 1 ? h + PADH : KH - 1;
  for (int o = 0; o < G::C; o++)
    for (int i = first; i <= last; i++) {
      const V* row = g + o * G::PLANE + (h + PADH - i) * G::ROW + PADW;
      const T* weights = w + (o * GX::C * KH + i) * KW;
      UNROLL for (int j = 0; j < KW; j++) UNROLL for (int c = 0; c < CT; c++) {
        T s = weights[c * KH * KW + j];
        UNROLL for (int t = 0; t < WT; t++) sum[c][t] += row[t - j] * s;
      }
    }
  UNROLL for (int c = 0; c < CT; c++) UNROLL for (int t = 0; t < WT; t++) gx[c * GX::PLANE + t] = sum[c][t];
}

template <class GX, class G, int KH, int KW, int PADH, int PADW, int CT>
INLINE void convolve_back_planes(const V* g, const T* w, V* gx) {
  constexpr int W = GX::W, WT = tile(W, SUMS / CT);
  for (int h = 0; h < GX::H; h++) {
    V* row = gx + h * GX::ROW;
    int t = 0;
    for (; t + WT <= W; t += WT) convolve_back_tile<GX, G, KH, KW, PADH, PADW, CT, WT>(g + t, w, row + t, h);
    if constexpr (W % WT != 0) convolve_back_tile<GX, G, KH, KW, PADH, PADW, CT, W % WT>(g + t, w, row + t, h);
  }
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

// gw[o][c][i][j] = sum of g[o][h][w] * x[c][h + i][w + j], for one (c, i) and OT outputs.
template <class X, class G, int KH, int KW, int OT>
INLINE void convolve_weights_tile(const V* x, const V* g, T* gw) {
  V sum[OT][KW];
  UNROLL for (int o = 0; o < OT; o++) UNROLL for (int j = 0; j < KW; j++) sum[o][j] = V{};
  for (int h = 0; h < G::H; h++)
    for (int t = 0; t < G::W; t++) {
      const V* row = x + h * X::ROW + t;
      V part[OT];
      UNROLL for (int o = 0; o < OT; o++) part[o] = g[o * G::PLANE + h * G::ROW + t];
      UNROLL for (int j = 0; j < KW; j++) UNROLL for (int o = 0; o < OT; o++) sum[o][j] += part[o] * row[j];
    }
  UNROLL for (int o = 0; o < OT; o++) UNROLL for (int j = 0; j < KW; j++) gw[o * X::C * KH * KW + j] = sum_of(sum[o][j]);
}

template <class X, class G, int KH, int KW, int OT>
INLINE void convolve_weights_outputs(const V* x, const V* g, T* gw) {
  for (int c = 0; c < X::C; c++)
    for (int i = 0; i < KH; i++)
      convolve_weights_tile<X, G, KH, KW, OT>(x + c * X::PLANE + i * X::ROW, g, gw + (c * KH + i) * KW);
}

template <class X, class G, int KH, int KW, class Step>
static void convolve_weights(const V* x, const V* g, const Step& step, int weight, int bias) {
  constexpr int OT = tile(G::C, SUMS / KW < 8 ? SUMS / KW : 8), SIZE = X::C * KH * KW;
  static thread_local T gw[G::C * SIZE];
  int o = 0;
  for (; o + OT <= G::C; o += OT) convolve_weights_outputs<X, G, KH, KW, OT>(x, g + o * G::PLANE, gw + o * SIZE);
  if constexpr (G::C % OT != 0)
    convolve_weights_outputs<X, G, KH, KW, G::C % OT>(x, g + o * G::PLANE, gw + o * SIZE);
  step.put(weight, gw, G::C * SIZE);
  if (bias < 0) return;
  T gb[G::C];
  for (int c = 0; c < G::C; c++) {
    V sum = V{};
    for (int h = 0; h < G::H; h++)
      for (int t = 0; t < G::W; t++) sum += g[c * G::PLANE + h * G::ROW + t];
    gb[c] = sum_of(sum);
  }
  step.put(bias, gb, G::C);
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

// The gradient goes to the place that was largest; places that fill no window get none.
template <class GX, class GY, int PH, int PW>
static void pool_back(const V* gy, const VI* at, V* gx) {
  if constexpr (GX::H != GY::H * PH || GX::W != GY::W * PW) memset(gx, 0, GX::C * GX::PLANE * sizeof(V));
  for (int c = 0; c < GY::C; c++)
    for (int h = 0; h < GY::H; h++)
      for (int t = 0; t < GY::W; t++) {
        V part = gy[c * GY::PLANE + h * GY::ROW + t];
        VI place = at[(c * GY::H + h) * GY::W + t];
        V* to = gx + c * GX::PLANE + h * PH * GX::ROW + t * PW;
        UNROLL for (int k = 0; k < PH * PW; k++) to[k / PW * GX::ROW + k % PW] = place == k ? part : V{};
      }
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

INLINE uint64_t scrambled(uint64_t z) {  // SplitMix64, as in coterie.models
  z *= 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
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

template <int IN, int OT>
INLINE void linear_tile(const V* x, const T* w, const T* bias, V* y) {
  V sum[OT];
  UNROLL for (int o = 0; o < OT; o++) sum[o] = V{} + (bias ? bias[o] : T(0));
  for (int i = 0; i < IN; i++) UNROLL for (int o = 0; o < OT; o++) sum[o] += x[i] * w[o * IN + i];
  UNROLL for (int o = 0; o < OT; o++) y[o] = sum[o];
}

template <int IN, int OUT>
static void linear(const V* x, const T* w, const T* bias, V* y) {
  constexpr int OT = tile(OUT, SUMS / 2);
  int o = 0;
  for (; o + OT <= OUT; o += OT) linear_tile<IN, OT>(x, w + o * IN, bias ? bias + o : bias, y + o);
  if constexpr (OUT % OT != 0) linear_tile<IN, OUT % OT>(x, w + o * IN, bias ? bias + o : bias, y + o);
}

template <int IN, int OUT, int IT>
INLINE void linear_back_tile(const V* g, const T* w, V* gx) {
  V sum[IT];
  UNROLL for (int i = 0; i < IT; i++) sum[i] = V{};
  for (int o = 0; o < OUT; o++) UNROLL for (int i = 0; i < IT; i++) sum[i] += g[o] * w[o * IN + i];
  UNROLL for (int i = 0; i < IT; i++) gx[i] = sum[i];
}

template <int IN, int OUT>
static void linear_back(const V* g, const T* w, V* gx) {
  constexpr int IT = tile(IN, SUMS * 2 / 3);
  int i = 0;
  for (; i + IT <= IN; i += IT) linear_back_tile<IN, OUT, IT>(g, w + i, gx + i);
  if constexpr (IN % IT != 0) linear_back_tile<IN, OUT, IN % IT>(g, w + i, gx + i);
}

// gw[o][i] = sum over samples of g[o] * x[i], from x with each sample's entries side by side. A piece of OT rows is
// handed to the optimizer as soon as it is known, so the gradient of a large layer is never stored.
template <int IN, int WIDTH, int OT, int IT, class Step>
INLINE void linear_weights_tile(const T* xt, const V* g, const Step& step, int at, int count) {
  V sum[OT][IT];
  UNROLL for (int o = 0; o < OT; o++) UNROLL for (int i = 0; i < IT; i++) sum[o][i] = V{};
  UNROLL for (int b = 0; b < N; b++) UNROLL for (int o = 0; o < OT; o++) {
    T s = ((const T*)(g + o))[b];
    UNROLL for (int i = 0; i < IT; i++) sum[o][i] += *(const VU*)(xt + b * WIDTH + i * N) * s;
  }
  for (int o = 0; o < OT; o++) step.put(at + o * IN, (T*)sum[o], count);
}

template <int IN, int WIDTH, int OT, class Step>
INLINE void linear_weights_rows(const T* xt, const V* g, const Step& step, int at) {
  constexpr int IT = SUMS / OT < 4 ? (SUMS / OT < 1 ? 1 : SUMS / OT) : 4;
  int i = 0;
  for (; i + IT * N <= IN; i += IT * N) linear_weights_tile<IN, WIDTH, OT, IT>(xt + i, g, step, at + i, IT * N);
  for (; i < IN; i += N) linear_weights_tile<IN, WIDTH, OT, 1>(xt + i, g, step, at + i, IN - i < N ? IN - i : N);
}

template <int IN, int OUT, class Step>
static void linear_weights(const V* x, const V* g, const Step& step, int weight, int bias) {
  constexpr int WIDTH = (IN + N - 1) / N * N, OT = 4;
  alignas(64) static thread_local T xt[N * WIDTH];
  for (int i = 0; i < IN; i++)
    for (int b = 0; b < N; b++) xt[b * WIDTH + i] = ((const T*)(x + i))[b];
  int o = 0;
  for (; o + OT <= OUT; o += OT) linear_weights_rows<IN, WIDTH, OT>(xt, g + o, step, weight + o * IN);
  if constexpr (OUT % OT != 0) linear_weights_rows<IN, WIDTH, OUT % OT>(xt, g + o, step, weight + o * IN);
  if (bias < 0) return;
  T gb[OUT];
  for (int k = 0; k < OUT; k++) gb[k] = sum_of(g[k]);
  step.put(bias, gb, OUT);
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

  inline __attribute__((always_inline)) void put(int at, T* piece, int count) const {
    const bool bias = at < weight || at >= weight + OUT * IN;
    if (bias && shared_bias) return step.put(at, piece, count);
    T part[OUT > 4 * N ? OUT : 4 * N];
    for (int m = 0; m < M; m++) {
      for (int i = 0; i < count; i++) part[i] = gain * alpha[m] * piece[i];
      step.put(at + m * (bias ? OUT : OUT * IN), part, count);
    }
  }
};
