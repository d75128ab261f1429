// Training and measuring clients with the generated functions `train_batch` and `judge_batch`: gather of the batch,
// gradient, optimizer, step after step. Structures are those of coterie.engine.native.traced.

// Where buffers lie in an arena.
struct Memory {
  const int64_t* at;
  int64_t bytes, samples;  // of the arena; the most samples of a call
};

struct Training {
  Store store;
  CropFlip augment;
  Noise noise;
  Memory memory;
  T* rows;
  const T* frozen;  // weights of all clients alike
  const T* anchor;
  const T* const* inputs;  // values of the input buffers in each step of each client
  const int64_t *places, *length, *keys;
  const int64_t* where;  // of each of places: where its inputs lie; none where they lie at the places themselves
  T* losses;
  T* moments;            // of each client's optimizer, to go on from; none for fresh ones
  const int64_t* taken;  // steps before, with moments
  Rule rule;
  int64_t row, anchor_row, steps, width, trained;
  double prox;
  int64_t first, last;  // the steps that are taken now: all, or some whose inputs are in memory
};

struct Measuring {
  Store store;
  Noise noise;
  Memory memory;
  const T *table, *frozen;
  const T* const* inputs;  // values of the input buffers of each model
  const int64_t *places, *count, *models, *sets;
  const int64_t* where;  // as in Training
  double *loss, *score;
  int64_t row, width;
  int64_t first, last;  // the samples of each set that are measured now, after those before the first
};

struct Free {
  void operator()(void* p) const { free(p); }
};
template <class U>
using Owned = std::unique_ptr<U[], Free>;
// Of a multiple of 64 bytes, the longest vector; zero, where it is not `written` before it is read.
template <class U>
static Owned<U> aligned(int64_t count, bool written = false) {
  const size_t bytes = (count * sizeof(U) + 127) / 64 * 64;
  void* p = aligned_alloc(64, bytes);
  if (!written) memset(p, 0, bytes);
  return Owned<U>((U*)p);
}

// Where number i of sample b of a call lies: samples one after another, or TOGETHER samples side by side.
INLINE int64_t spot(int64_t b, int64_t i) { return TOGETHER ? i * TOGETHER + b : b * ENTRIES + i; }

// The places of the samples of a call: where TOGETHER are computed, the first one stands for what a batch lacks.
static const int64_t* completed(const int64_t* places, int64_t n, int64_t* room) {
  if (!TOGETHER || n == TOGETHER) return places;
  for (int64_t b = 0; b < TOGETHER; b++) room[b] = places[b < n ? b : 0];
  return room;
}

// Put samples into x.
static void gather(const Store& store, const int64_t* places, int64_t n, T* x) {
  if constexpr (TOGETHER) {
    const uint8_t* bytes[TOGETHER];
    const T *numbers[TOGETHER], *values = store.values;
    for (int64_t b = 0; b < TOGETHER; b++) {
      bytes[b] = (const uint8_t*)store.x + places[b] * ENTRIES;
      numbers[b] = (const T*)store.x + places[b] * ENTRIES;
    }
    if (store.bytes)
      for (int c = 0; c < CHANNELS; c++, values += 256)
        for (int i = c * PLANE; i < (c + 1) * PLANE; i++)
          UNROLL for (int b = 0; b < TOGETHER; b++) x[i * TOGETHER + b] = values[bytes[b][i]];
    else
      for (int i = 0; i < ENTRIES; i++) UNROLL for (int b = 0; b < TOGETHER; b++) x[i * TOGETHER + b] = numbers[b][i];
    return;
  }
  for (int64_t b = 0; b < n; b++, x += ENTRIES) {
    if (!store.bytes) {
      memcpy(x, (const T*)store.x + places[b] * ENTRIES, ENTRIES * sizeof(T));
      continue;
    }
    const uint8_t* from = (const uint8_t*)store.x + places[b] * ENTRIES;
    for (int c = 0; c < CHANNELS; c++)
      for (int i = 0; i < PLANE; i++) x[c * PLANE + i] = store.values[c * 256 + from[c * PLANE + i]];
  }
}

// The same with a piece cut at a random place of each padded image, and every second one mirrored.
static void gather_augmented(const Store& store, const CropFlip& augment, uint64_t key, int64_t step, int64_t sample,
                             const int64_t* places, int64_t n, T* x) {
  constexpr int W = WIDTH, H = PLANE / WIDTH;
  const uint64_t start = scrambled(key + step);
  const int64_t span = 2 * augment.padding + 1;
  for (int64_t b = 0; b < n; b++) {
    const uint64_t bits = scrambled(start + sample + b), more = scrambled(bits);
    const int64_t down = remainder_of(bits, span) - augment.padding, right = remainder_of(more, span) - augment.padding;
    const bool mirror = scrambled(more) & 1;
    for (int c = 0; c < CHANNELS; c++)
      for (int h = 0; h < H; h++)
        for (int t = 0; t < W; t++) {
          const int64_t row = h + down, column = (mirror ? W - 1 - t : t) + right;
          const bool inside = row >= 0 && row < H && column >= 0 && column < W;
          const int64_t from = places[b] * ENTRIES + (c * H + row) * W + column;
          T value = augment.fill[c];
          if (inside)
            value = store.bytes ? store.values[c * 256 + ((const uint8_t*)store.x)[from]] : ((const T*)store.x)[from];
          x[spot(b, (c * H + h) * W + t)] = value;
        }
  }
}

// Add noise to samples.
static void disturb(const Noise& noise, int64_t of, int64_t step, const int64_t* places, int64_t n, T* x) {
  constexpr int HALF = (ENTRIES + 1) / 2;
  const double sigma = noise.sigma[of];
  if (sigma == 0) return;
  const uint64_t start = scrambled(uint64_t(noise.keys[of]) + step);
  for (int64_t b = 0; b < n; b++) {
    const uint64_t sample = scrambled(start + places[b] % noise.width);
    for (int i = 0; i < HALF; i++) {
      const uint64_t bits = scrambled(sample + i);
      const double radius = std::sqrt(-2 * std::log((double(bits & 0xFFFFFFFFu) + 1) * 0x1p-32));
      const double angle = 6.283185307179586 * 0x1p-32 * double(bits >> 32);
      x[spot(b, i)] += T(sigma * (radius * std::cos(angle)));
      if (i + HALF < ENTRIES) x[spot(b, i + HALF)] += T(sigma * (radius * std::sin(angle)));
    }
  }
}

static void targets_of(const Store& store, const int64_t* places, int64_t n, Target* y) {
  const Target* from = sizeof(Target) == 8 && store.classes ? (const Target*)store.classes : (const Target*)store.targets;
  for (int64_t b = 0; b < n; b++) memcpy(y + b * TARGETS, from + places[b] * TARGETS, TARGETS * sizeof(Target));
}

// One step of an optimizer after `before` others; decay1 and decay2 are Adam's betas to the power of all steps.
static void update(const Training& job, T* w, T* g, T* first, T* second, T* third, const T* anchor, double rate,
                   double decay1, double decay2, int64_t before) {
  const Rule& rule = job.rule;
  const int64_t count = job.trained;
  const T prox = job.prox, decay = rule.decay, momentum = rule.momentum, lr = rate;
  if (anchor)
    VECTORIZE for (int64_t i = 0; i < count; i++) g[i] += prox * (w[i] - anchor[i]);
  if (decay != 0 && rule.kind == ADAMW) {
    const T shrink = 1 - rate * rule.decay;
    VECTORIZE for (int64_t i = 0; i < count; i++) w[i] *= shrink;
  } else if (decay != 0)
    VECTORIZE for (int64_t i = 0; i < count; i++) g[i] += decay * w[i];
  if (rule.kind == ADAM || rule.kind == ADAMW) {
    const T beta2 = rule.beta2, new1 = T(1 - rule.beta1), new2 = T(1 - rule.beta2);
    const T corrected = rate / (1 - decay1), scale = std::sqrt(1 - decay2);
    const T by = corrected * scale, eps = T(rule.eps) * scale;  // lr * m / (sqrt(v) / scale + eps), with one division
    VECTORIZE for (int64_t i = 0; i < count; i++) {
      first[i] += new1 * (g[i] - first[i]);
      second[i] = beta2 * second[i] + new2 * (g[i] * g[i]);
      w[i] -= by * first[i] / (std::sqrt(second[i]) + eps);
    }
  } else if (rule.kind == SGD && momentum != 0 && (rule.nesterov || rule.dampening != 0)) {
    const T share = before ? 1 - rule.dampening : 1, ahead = rule.nesterov ? momentum : 1, own = rule.nesterov;
    VECTORIZE for (int64_t i = 0; i < count; i++) {
      first[i] = momentum * first[i] + share * g[i];
      w[i] -= lr * (own * g[i] + ahead * first[i]);
    }
  } else if (rule.kind == SGD && momentum != 0) {
    VECTORIZE for (int64_t i = 0; i < count; i++) w[i] -= lr * (first[i] = momentum * first[i] + g[i]);
  } else if (rule.kind == SGD) {
    VECTORIZE for (int64_t i = 0; i < count; i++) w[i] -= lr * g[i];
  } else {
    const T kept = rule.kind == ADAGRAD ? 1 : rule.alpha, fresh = rule.kind == ADAGRAD ? 1 : 1 - rule.alpha;
    const T eps = rule.eps, now = rule.kind == ADAGRAD ? rate / (1 + before * rule.lr_decay) : rate;
    VECTORIZE for (int64_t i = 0; i < count; i++) first[i] = kept * first[i] + fresh * (g[i] * g[i]);
    if (rule.centered)
      VECTORIZE for (int64_t i = 0; i < count; i++) {
        third[i] += fresh * (g[i] - third[i]);
        g[i] /= std::sqrt(first[i] - third[i] * third[i]) + eps;
      }
    else
      VECTORIZE for (int64_t i = 0; i < count; i++) g[i] /= std::sqrt(first[i]) + eps;
    if (momentum != 0)
      VECTORIZE for (int64_t i = 0; i < count; i++) g[i] = second[i] = momentum * second[i] + g[i];
    VECTORIZE for (int64_t i = 0; i < count; i++) w[i] -= now * g[i];
  }
}

struct Batch {
  char* arena;
  const int64_t* at;
  T *x, *losses, *scores;
  Target* y;
  const T* const* inputs;
  const T* frozen;
};

static void train_one(const Training& job, int64_t client, Batch& batch, T* g, T* moments, const T** inputs) {
  const Rule& rule = job.rule;
  T *w = job.rows + client * job.row, *first = moments, *second = moments + PARAMS, *third = moments + 2 * PARAMS;
  if (job.moments) {
    first = job.moments + client * rule.moments * job.trained, second = first + job.trained;
    third = first + (rule.moments - 1) * job.trained;
  } else {
    std::fill_n(moments, (rule.centered ? 3 : 2) * PARAMS, T(rule.initial));
  }
  const T* anchor = job.anchor ? job.anchor + client * job.anchor_row : nullptr;
  double decay1 = job.moments ? std::pow(rule.beta1, job.taken[client]) : 1;
  double decay2 = job.moments ? std::pow(rule.beta2, job.taken[client]) : 1;
  for (int64_t s = 0; s < job.last; s++) {
    const int64_t size = job.length[client * job.steps + s], start = (client * job.steps + s) * job.width;
    const int64_t *places = job.places + start, *where = (job.where ? job.where : job.places) + start;
    // Powers are rounded step by step, so steps that were taken in an earlier call multiply too.
    decay1 *= rule.beta1, decay2 *= rule.beta2;
    if (!size || s < job.first) continue;
    for (int j = 0; j < INPUTS; j++) inputs[j] = job.inputs[j] + (client * job.steps + s) * INPUT_SIZES[j];
    const int64_t key = job.keys ? job.keys[client] + int64_t(uint64_t(s) * 0x1F123BB5159A55E5u) : 0;
    const int64_t parts = (size + job.memory.samples - 1) / job.memory.samples, part = (size + parts - 1) / parts;
    double loss = 0;
    for (int64_t from = 0; from < size; from += part) {
      const int64_t n = least(part, size - from), all = TOGETHER ? TOGETHER : n;
      int64_t room[TOGETHER + 1], room_of_inputs[TOGETHER + 1];
      const int64_t* chosen = completed(places + from, n, room);
      const int64_t* lying = completed(where + from, n, room_of_inputs);
      if (job.augment.keys)
        gather_augmented(job.store, job.augment, job.augment.keys[client], s, from, lying, all, batch.x);
      else
        gather(job.store, lying, all, batch.x);
      if (job.noise.keys) disturb(job.noise, client, s, chosen, n, batch.x);
      targets_of(job.store, chosen, all, batch.y);
      T weight[TOGETHER + 1];  // of each loss, or of all
      for (int64_t b = 0; b <= TOGETHER; b++) weight[b] = b < n ? T(1) / T(size) : T(0);
      train_batch(batch, w, g, key, weight, n, from, from > 0);
      for (int64_t b = 0; b < n; b++) loss += batch.losses[b];
    }
    const double rate = rule.rates ? rule.rates[client * job.steps + s] : rule.lr;
    const int64_t before = s + (job.moments ? job.taken[client] : 0);
    update(job, w, g, first, second, third, anchor, rate, decay1, decay2, before);
    job.losses[client * job.steps + s] = T(loss / size);
  }
}

extern "C" void train(const Training* job, int64_t first, int64_t last) {
  const SubnormalsAreZero mode;
  const auto arena = aligned<char>(job->memory.bytes);
  const auto x = aligned<T>(job->memory.samples * ENTRIES), losses = aligned<T>(job->memory.samples);
  const auto y = aligned<Target>(job->memory.samples * TARGETS);
  // The moments are as large as three models, so zeros would take as long as a part of a step: each client begins with
  // its own. The gradient of a parameter that no loss depends on is never written, and stays zero.
  const auto g = aligned<T>(PARAMS), moments = aligned<T>(job->moments ? 0 : 3 * PARAMS, true);
  const T* inputs[INPUTS + 1];
  Batch batch{arena.get(), job->memory.at, x.get(), losses.get(), nullptr, y.get(), inputs, job->frozen};
  for (int64_t client = first; client < last; client++) train_one(*job, client, batch, g.get(), moments.get(), inputs);
}

extern "C" void measure(const Measuring* job, int64_t first, int64_t last) {
  const SubnormalsAreZero mode;
  const auto arena = aligned<char>(job->memory.bytes);
  const auto x = aligned<T>(job->memory.samples * ENTRIES), losses = aligned<T>(job->memory.samples);
  const auto scores = aligned<T>(job->memory.samples);
  const auto y = aligned<Target>(job->memory.samples * TARGETS);
  const T* inputs[INPUTS + 1];
  Batch batch{arena.get(), job->memory.at, x.get(), losses.get(), scores.get(), y.get(), inputs, job->frozen};
  for (int64_t pair = first; pair < last; pair++) {
    const int64_t set = job->sets[pair], size = job->count[set], *places = job->places + set * job->width;
    const int64_t *where = job->where ? job->where + set * job->width : places, last = least(size, job->last);
    for (int j = 0; j < INPUTS; j++) inputs[j] = job->inputs[j] + job->models[pair] * INPUT_SIZES[j];
    double loss = job->first ? job->loss[pair] : 0, score = job->first ? job->score[pair] : 0;
    for (int64_t from = job->first; from < last; from += job->memory.samples) {
      const int64_t n = least(job->memory.samples, last - from), all = TOGETHER ? TOGETHER : n;
      int64_t room[TOGETHER + 1], room_of_inputs[TOGETHER + 1];
      const int64_t* chosen = completed(places + from, n, room);
      gather(job->store, completed(where + from, n, room_of_inputs), all, batch.x);
      if (job->noise.keys) disturb(job->noise, set, 0, chosen, n, batch.x);
      targets_of(job->store, chosen, all, batch.y);
      judge_batch(batch, job->table + job->models[pair] * job->row, n);
      for (int64_t b = 0; b < n; b++) loss += batch.losses[b], score += batch.scores[b];
    }
    // Sums, until the last samples of the set are measured.
    const double parts = last == size ? size : 1;
    job->loss[pair] = loss / parts, job->score[pair] = score / parts;
  }
}
