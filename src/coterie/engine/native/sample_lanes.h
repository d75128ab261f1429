// Convolutions with stride 1 and max-pooling of one client's batch, with samples across the vector.
//
// A V is the same place of an image in N samples, so every loop below is full of independent
// arithmetic however few channels there are. Where a register holds more than N numbers, it takes
// neighboring places of a row together. Shapes are template arguments: the compiler unrolls the
// small loops and keeps a tile of sums in registers.
//
// The text that includes this file defines N, and includes blocks.h before.

namespace across {

typedef T V __attribute__((vector_size(N * sizeof(T))));
typedef I VI __attribute__((vector_size(N * sizeof(T))));

constexpr int PER_V = sizeof(V) > VECTOR ? sizeof(V) / VECTOR : 1;  // registers that a V takes
// registers, or V, kept as sums
constexpr int SUMS = REGISTERS / PER_V * 3 / 4 > 4 ? REGISTERS / PER_V * 3 / 4 : 4;

// Neighboring places of a row follow each other in memory: where a V is smaller than a register, a register R holds
// several of them, and a loop over a row takes PLACES places at a time.
constexpr int PLACES = sizeof(V) < VECTOR ? VECTOR / sizeof(V) : 1;
typedef T R __attribute__((vector_size(PLACES * N * sizeof(T))));

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

// C planes of H x W places; rows are ROW apart and planes PLANE.
template <int C_, int H_, int W_, int ROW_, int PLANE_>
struct Grid {
  static constexpr int C = C_, H = H_, W = W_, ROW = ROW_, PLANE = PLANE_;
};

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
  constexpr int WT = PLACES * even(Cover<W>::COUNT, SUMS / OT);
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
KERNEL void convolve(const T* images, const T* w, const T* bias, T* outputs) {
  const V* x = (const V*)images;
  V* y = (V*)outputs;
  constexpr int OT = even(Y::C, 4), SIZE = X::C * KH * KW;
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
KERNEL void convolve_pool(const T* images, const T* w, const T* bias, T* outputs, I* places) {
  constexpr int OT = even(Z::C, 4), SIZE = X::C * KH * KW, PLANE = Z::H * Z::W;
  const V* x = (const V*)images;
  V* z = (V*)outputs;
  VI* at = (VI*)places;
  int o = 0;
  for (; o + OT <= Z::C; o += OT)
    convolve_pool_outputs<X, Z, KH, KW, PH, PW, OT>(x, w + o * SIZE, bias ? bias + o : bias, z + o * Z::PLANE,
                                                    at + o * PLANE);
  if constexpr (Z::C % OT != 0)
    convolve_pool_outputs<X, Z, KH, KW, PH, PW, Z::C % OT>(x, w + o * SIZE, bias ? bias + o : bias, z + o * Z::PLANE,
                                                           at + o * PLANE);
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
  constexpr int WT = PLACES * even(Cover<GX::W>::COUNT, SUMS / CT), W = FROM + WT > GX::W ? GX::W - FROM : WT;
  convolve_back_tile<GX, G, KH, KW, PADH, PADW, CT, FROM, W>(g, w, gx, h);
  if constexpr (FROM + W < GX::W) convolve_back_row<GX, G, KH, KW, PADH, PADW, CT, FROM + W>(g, w, gx, h);
}

template <class GX, class G, int KH, int KW, int PADH, int PADW, int CT>
INLINE void convolve_back_planes(const V* g, const T* w, V* gx) {
  for (int h = 0; h < GX::H; h++) convolve_back_row<GX, G, KH, KW, PADH, PADW, CT>(g, w, gx + h * GX::ROW, h);
}

template <class GX, class G, int KH, int KW, int PADH, int PADW>
KERNEL void convolve_back(const T* gradient, const T* w, T* inputs) {
  constexpr int CT = even(GX::C, 4);
  const V* g = (const V*)gradient;
  V* gx = (V*)inputs;
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

template <class GX, class GY, int PH, int PW>
KERNEL void pool_back(const T* gy, const I* at, T* gx) {
  pool_back_rows<GX, GY, PH, PW>((const V*)gy, (const VI*)at, GY::H, (V*)gx);
}

// Outputs of a tile of convolve_weights, whose sums fill the registers.
constexpr int weights_tile(int outputs, int kw) { return even(outputs, SUMS / kw < 8 ? SUMS / kw : 8); }

// Rows that are taken at once, a multiple of `step`, so that C planes of them and what one plane of X gives to them
// stay in the cache next to the core.
template <class X, int KH>
constexpr int rows_in_cache(int height, int row, int c, int step) {
  constexpr int CACHE = 36 * 1024 / int(sizeof(V));
  int rows = step;
  while (rows + step <= height && (rows + step) * row * c + (rows + step + KH - 1) * X::ROW <= CACHE) rows += step;
  return rows;
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
  each_sum<OT * KW>(sum, [=](int k, T total) { gw[k / KW * X::C * KH * KW + k % KW] += total; });
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

template <class X, class G, int KH, int KW>
KERNEL void convolve_weights(const T* images, const T* gradient, T* gw, bool add) {
  constexpr int SIZE = G::C * X::C * KH * KW, ROWS = rows_in_cache<X, KH>(G::H, G::ROW, weights_tile(G::C, KW), 1);
  const V *x = (const V*)images, *g = (const V*)gradient;
  if (!add) memset(gw, 0, SIZE * sizeof(T));
  for (int h = 0; h < G::H; h += ROWS)
    convolve_weights_rows<X, G, KH, KW>(x + h * X::ROW, g + h * G::ROW, G::H - h < ROWS ? G::H - h : ROWS, gw);
}

// The same where g is known before it goes back through max-pooling, and nobody else wants to know it after.
template <class X, class GZ, int KH, int KW, int PH, int PW, int ROWS, int OT>
INLINE void convolve_pool_weights_outputs(const V* x, const V* gz, const VI* at, int rows, T* gw) {
  using G = Grid<OT, ROWS, GZ::W * PW, GZ::W * PW, ROWS * GZ::W * PW>;
  alignas(64) V g[OT * G::PLANE];
  pool_back_rows<G, Grid<OT, GZ::H, GZ::W, GZ::ROW, GZ::PLANE>, PH, PW>(gz, at, rows / PH, g);
  convolve_weights_outputs<X, G, KH, KW, OT>(x, g, rows, gw);
}

template <class X, class GZ, int KH, int KW, int PH, int PW>
KERNEL void convolve_pool_weights(const T* images, const T* gradient, const I* places, T* gw, bool add) {
  constexpr int SIZE = X::C * KH * KW, HEIGHT = GZ::H * PH, OT = weights_tile(GZ::C, KW);
  constexpr int ROWS = rows_in_cache<X, KH>(HEIGHT, GZ::W * PW, OT, PH), PLANE = GZ::H * GZ::W;
  const V *x = (const V*)images, *gz = (const V*)gradient;
  const VI* at = (const VI*)places;
  if (!add) memset(gw, 0, GZ::C * SIZE * sizeof(T));
  for (int h = 0; h < HEIGHT; h += ROWS) {
    const int rows = HEIGHT - h < ROWS ? HEIGHT - h : ROWS;
    const V *from = x + h * X::ROW, *gz_rows = gz + h / PH * GZ::ROW;
    const VI* at_rows = at + h / PH * GZ::W;
    int o = 0;
    for (; o + OT <= GZ::C; o += OT)
      convolve_pool_weights_outputs<X, GZ, KH, KW, PH, PW, ROWS, OT>(from, gz_rows + o * GZ::PLANE,
                                                                     at_rows + o * PLANE, rows, gw + o * SIZE);
    if constexpr (GZ::C % OT != 0)
      convolve_pool_weights_outputs<X, GZ, KH, KW, PH, PW, ROWS, GZ::C % OT>(
          from, gz_rows + o * GZ::PLANE, at_rows + o * PLANE, rows, gw + o * SIZE);
  }
}

// N vectors whose lanes are places, of one sample each, become N vectors whose lanes are samples; and back. A register
// that is larger than V holds PLACES times N places, and becomes places k, k + N, ...
template <int H = N / 2>
INLINE void exchange(R* v) {
  UNROLL for (int k = 0; k < N; k++)
    if (!(k & H)) {
      R first = mixed<H, false>(v[k], v[k + H]), second = mixed<H, true>(v[k], v[k + H]);
      v[k] = first, v[k + H] = second;
    }
  if constexpr (H > 1) exchange<H / 2>(v);
}

// The SIZE numbers of each sample side by side.
template <int SIZE>
KERNEL void by_sample(const T* places, T* rows) {
  constexpr int LANE = PLACES * N;
  const V* x = (const V*)places;
  int i = 0;
  for (; i + LANE <= SIZE; i += LANE) {
    R v[N];
    UNROLL for (int k = 0; k < N; k++) UNROLL for (int p = 0; p < PLACES; p++) ((V*)(v + k))[p] = x[i + p * N + k];
    exchange(v);
    UNROLL for (int b = 0; b < N; b++) store(rows + b * SIZE + i, v[b]);
  }
  for (; i < SIZE; i++)
    for (int b = 0; b < N; b++) rows[b * SIZE + i] = x[i][b];
}

// And back: the samples of each place side by side.
template <int SIZE>
KERNEL void by_place(const T* rows, T* places) {
  constexpr int LANE = PLACES * N;
  V* x = (V*)places;
  int i = 0;
  for (; i + LANE <= SIZE; i += LANE) {
    R v[N];
    UNROLL for (int b = 0; b < N; b++) v[b] = load<R>(rows + b * SIZE + i);
    exchange(v);
    UNROLL for (int k = 0; k < N; k++) UNROLL for (int p = 0; p < PLACES; p++) x[i + p * N + k] = ((V*)(v + k))[p];
  }
  for (; i < SIZE; i++)
    for (int b = 0; b < N; b++) x[i][b] = rows[b * SIZE + i];
}

}  // namespace across
