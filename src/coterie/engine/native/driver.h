// Training and measuring clients with the generated Net: gather of the batch, gradient, optimizer, step after step.

#include <algorithm>
#include <memory>

struct Optimizer {
  T *w, *first, *second, *third, *g;  // parameters, moments, gradient of the earlier groups of a batch
  const T* anchor;
  T lr, epsilon, momentum, decay, prox;       // lr and epsilon with Adam's bias corrections of this step
  T kept, fresh1, fresh2, share, shrink;      // shares of moments, of an SGD gradient, and of parameters
  int64_t kind, adam, nesterov, centered, trained;  // entries from `trained` on are frozen
  bool begins, ends;                          // the first and the last group of a batch

  // Take the gradient of an entry or of a register of entries: keep it until the batch is complete, then update the
  // parameters.
  template <class A>
  INLINE_MEMBER void put(int at, A piece) const {
    if (!begins) piece += load<A>(g + at);
    if (!ends) return store(g + at, piece);
    if (at >= trained) return;
    A weight = load<A>(w + at);
    if (anchor) piece += prox * (weight - load<A>(anchor + at));
    if (decay != 0) piece += decay * weight;
#ifdef ANY_OPTIMIZER
    piece = moved(at, piece);
    weight *= shrink;
#else
    if (adam) {
      A m = load<A>(first + at), v = load<A>(second + at);
      m += T(1 - 0.9) * (piece - m);
      v = T(0.999) * v + T(1 - 0.999) * (piece * piece);
      store(first + at, m), store(second + at, v);
      piece = m / (root(v) + epsilon);
    } else if (momentum != 0) {
      piece += momentum * load<A>(first + at);
      store(first + at, piece);
    }
#endif
    store(w + at, weight - lr * piece);
  }

#ifdef ANY_OPTIMIZER
  // What the rate multiplies.
  template <class A>
  A moved(int at, A piece) const {
    if (kind == SGD) {
      if (momentum == 0) return piece;
      A m = momentum * load<A>(first + at) + share * piece;
      store(first + at, m);
      return nesterov ? piece + momentum * m : m;
    }
    T* const squares = adam ? second : first;
    A v = kept * load<A>(squares + at) + fresh2 * (piece * piece);
    store(squares + at, v);
    if (adam || centered) {
      T* const means = adam ? first : third;
      A m = load<A>(means + at);
      m += fresh1 * (piece - m);
      store(means + at, m);
      if (adam) return m / (root(v) + epsilon);
      v -= m * m;
    }
    piece = piece / (root(v) + epsilon);
    if (momentum == 0) return piece;
    piece += momentum * load<A>(second + at);
    store(second + at, piece);
    return piece;
  }
#endif

  INLINE_MEMBER void put(int at, const T* piece, int count) const { put_all(*this, at, piece, count); }
};

struct Training {
  Store store;
  CropFlip augment;
  Noise noise;
  T* rows;
  const T* anchor;
  const T* alpha;  // mixture of endpoints in each step of each client; none without a simplex layer
  const int64_t *places, *length, *keys;
  T* losses;
  T* moments;            // of each client's optimizer, to go on from; none for fresh ones
  const int64_t* taken;  // steps before, with moments
  Rule rule;
  int64_t row, anchor_row, steps, width, trained;
  double prox;
};

struct Measuring {
  Store store;
  Noise noise;
  const T *table, *alpha;  // mixture of endpoints of each model
  const int64_t *places, *count, *models, *sets;
  double *loss, *score;
  int64_t row, width;
};

// Put up to N samples into the input of the net; what is left of a V repeats the first of them.
static void gather(const Store& store, const int64_t* places, int n, V* x) {
  int64_t at[N];
  for (int b = 0; b < N; b++) at[b] = places[b < n ? b : 0] * Input::C * Input::H * Input::W;
  for (int c = 0; c < Input::C; c++)
    for (int h = 0; h < Input::H; h++)
      for (int t = 0; t < Input::W; t++) {
        const int from = (c * Input::H + h) * Input::W + t;
        T* to = (T*)(x + c * Input::PLANE + h * Input::ROW + t);
        if (store.bytes)
          UNROLL for (int b = 0; b < N; b++) to[b] = store.values[c * 256 + ((const uint8_t*)store.x)[at[b] + from]];
        else
          UNROLL for (int b = 0; b < N; b++) to[b] = ((const T*)store.x)[at[b] + from];
      }
}

// The same with a piece cut at a random place of each padded image, and every second one mirrored.
static void gather_augmented(const Store& store, const CropFlip& augment, uint64_t key, int64_t step, int sample,
                             const int64_t* places, int n, V* x) {
  constexpr int H = Input::H, W = Input::W;
  const uint64_t start = scrambled(key + step);
  const int64_t span = 2 * augment.padding + 1;
  for (int b = 0; b < N; b++) {
    const int used = b < n ? b : 0;
    const uint64_t bits = scrambled(start + sample + used), more = scrambled(bits);
    const int64_t down = remainder_of(bits, span) - augment.padding, right = remainder_of(more, span) - augment.padding;
    const bool mirror = scrambled(more) & 1;
    const int64_t at = places[used] * Input::C * H * W;
    for (int c = 0; c < Input::C; c++)
      for (int h = 0; h < H; h++)
        for (int t = 0; t < W; t++) {
          const int64_t row = h + down, column = (mirror ? W - 1 - t : t) + right;
          const bool inside = row >= 0 && row < H && column >= 0 && column < W;
          const int64_t from = at + (c * H + row) * W + column;
          T value = augment.fill[c];
          if (inside)
            value = store.bytes ? store.values[c * 256 + ((const uint8_t*)store.x)[from]] : ((const T*)store.x)[from];
          ((T*)(x + c * Input::PLANE + h * Input::ROW + t))[b] = value;
        }
  }
}

// Add noise to up to N samples in the input of the net.
static void disturb(const Noise& noise, int64_t of, int64_t step, const int64_t* places, int n, V* x) {
  constexpr int PLANE = Input::H * Input::W, SIZE = Input::C * PLANE, HALF = (SIZE + 1) / 2;
  const double sigma = noise.sigma[of];
  if (sigma == 0) return;
  const uint64_t start = scrambled(uint64_t(noise.keys[of]) + step);
  for (int b = 0; b < n; b++) {
    const uint64_t sample = scrambled(start + places[b] % noise.width);
    const auto add = [=](int entry, double value) {
      const int c = entry / PLANE, h = entry % PLANE / Input::W, t = entry % Input::W;
      ((T*)(x + c * Input::PLANE + h * Input::ROW + t))[b] += T(sigma * value);
    };
    for (int i = 0; i < HALF; i++) {
      const uint64_t bits = scrambled(sample + i);
      const double radius = std::sqrt(-2 * std::log((double(bits & 0xFFFFFFFFu) + 1) * 0x1p-32));
      const double angle = 6.283185307179586 * 0x1p-32 * double(bits >> 32);
      add(i, radius * std::cos(angle));
      if (i + HALF < SIZE) add(i + HALF, radius * std::sin(angle));
    }
  }
}

// The loss of sample b, its accuracy or squared error, and (when g) the gradient of loss / size.
static T judge(const Store& store, int64_t place, int b, const V* outputs, V* g, int size, double* score) {
  const T* z = (const T*)outputs + b;
  T* to = g ? (T*)g + b : nullptr;
  if (store.classes) {
    const int64_t label = store.classes[place];
    int best = 0;
    for (int k = 1; k < OUTPUTS; k++)
      if (z[k * N] > z[best * N] || (z[k * N] != z[k * N] && z[best * N] == z[best * N])) best = k;
    *score = best == label;
    T e[OUTPUTS], total = 0;
    for (int k = 0; k < OUTPUTS; k++) total += e[k] = std::exp(z[k * N] - z[best * N]);
    if (to)
      for (int k = 0; k < OUTPUTS; k++) to[k * N] = (e[k] / total - T(k == label)) / size;
    return std::log(total) + z[best * N] - z[label * N];
  }
  T loss = 0;
  for (int k = 0; k < OUTPUTS; k++) {
    T error = z[k * N] - store.targets[place * OUTPUTS + k];
    loss += error * error;
    if (to) to[k * N] = 2 * error / OUTPUTS / size;
  }
  *score = loss / OUTPUTS;
  return loss / OUTPUTS;
}

static void train_one(const Training& job, int64_t client, Net& net, T* moments) {
  const Rule& rule = job.rule;
  std::fill_n(moments, (rule.centered ? 3 : 2) * PARAMS, T(rule.initial));
  Optimizer step{};
  step.w = job.rows + client * job.row;
  step.first = moments, step.second = moments + PARAMS, step.third = moments + 2 * PARAMS;
  step.g = moments + 3 * PARAMS;
  if (job.moments) {
    step.first = job.moments + client * rule.moments * job.trained, step.second = step.first + job.trained;
    step.third = step.first + (rule.moments - 1) * job.trained;
  }
  step.anchor = job.anchor ? job.anchor + client * job.anchor_row : nullptr;
  step.kind = rule.kind, step.adam = rule.kind == ADAM || rule.kind == ADAMW, step.trained = job.trained;
  step.momentum = rule.momentum, step.nesterov = rule.nesterov, step.centered = rule.centered;
  step.decay = rule.kind == ADAMW ? 0 : rule.decay, step.prox = job.prox;
  step.kept = step.adam ? rule.beta2 : rule.kind == RMSPROP ? rule.alpha : 1;
  step.fresh1 = T(1 - (step.adam ? rule.beta1 : rule.alpha));
  step.fresh2 = rule.kind == ADAGRAD ? 1 : T(1 - (step.adam ? rule.beta2 : rule.alpha));
  double decay1 = job.moments ? std::pow(rule.beta1, job.taken[client]) : 1;
  double decay2 = job.moments ? std::pow(rule.beta2, job.taken[client]) : 1;
  for (int64_t s = 0; s < job.steps; s++) {
    const int size = job.length[client * job.steps + s];
    const int64_t* places = job.places + (client * job.steps + s) * job.width;
    const int64_t before = s + (job.moments ? job.taken[client] : 0);
    const double lr = rule.rates ? rule.rates[client * job.steps + s] : rule.lr;
    decay1 *= rule.beta1, decay2 *= rule.beta2;
    const double scale = std::sqrt(1 - decay2);
    step.lr = step.adam ? lr * scale / (1 - decay1) : rule.kind == ADAGRAD ? lr / (1 + before * rule.lr_decay) : lr;
    step.epsilon = step.adam ? rule.eps * scale : rule.eps;
    step.shrink = rule.kind == ADAMW ? 1 - lr * rule.decay : 1;
    step.share = before ? 1 - rule.dampening : 1;
    if (!size) continue;
    const uint64_t key = job.keys ? job.keys[client] + uint64_t(s) * 0x1F123BB5159A55E5u : 0;
    if (job.alpha) net.mix(step.w, job.alpha + (client * job.steps + s) * ENDPOINTS);
    T loss = 0;
    for (int from = 0; from < size; from += N) {
      const int n = size - from < N ? size - from : N;
      double score;
      if (job.augment.keys)
        gather_augmented(job.store, job.augment, job.augment.keys[client], s, from, places + from, n, net.input());
      else
        gather(job.store, places + from, n, net.input());
      if (job.noise.keys) disturb(job.noise, client, s, places + from, n, net.input());
      net.forward<true>(step.w, key, from);
      memset(net.output_gradient(), 0, OUTPUTS * sizeof(V));
      for (int b = 0; b < n; b++)
        loss += judge(job.store, places[from + b], b, net.output(), net.output_gradient(), size, &score);
      step.begins = from == 0, step.ends = from + N >= size;
      net.backward(step.w, step);
    }
    job.losses[client * job.steps + s] = loss / size;
  }
}

extern "C" void train(const Training* job, int64_t first, int64_t last) {
  const SubnormalsAreZero mode;
  auto net = std::make_unique<Net>();
  std::unique_ptr<T[]> moments(new T[4 * PARAMS]);
  for (int64_t client = first; client < last; client++) train_one(*job, client, *net, moments.get());
}

extern "C" void measure(const Measuring* job, int64_t first, int64_t last) {
  const SubnormalsAreZero mode;
  auto net = std::make_unique<Net>();
  for (int64_t pair = first; pair < last; pair++) {
    const int64_t set = job->sets[pair], size = job->count[set], *places = job->places + set * job->width;
    const T* model = job->table + job->models[pair] * job->row;
    if (job->alpha) net->mix(model, job->alpha + job->models[pair] * ENDPOINTS);
    double loss = 0, total = 0, score;
    for (int64_t from = 0; from < size; from += N) {
      const int n = size - from < N ? size - from : N;
      gather(job->store, places + from, n, net->input());
      if (job->noise.keys) disturb(job->noise, set, 0, places + from, n, net->input());
      net->forward<false>(model, 0, 0);
      for (int b = 0; b < n; b++) {
        loss += judge(job->store, places[from + b], b, net->output(), nullptr, 1, &score);
        total += score;
      }
    }
    job->loss[pair] = loss / size, job->score[pair] = total / size;
  }
}
