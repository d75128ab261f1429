// What a program is given of samples and of the optimizer, how draws are made of keys, and what becomes
// of tiny numbers. The structures are those of coterie.engine.native.library.

#include <cstdint>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

// Samples as they are stored: bytes that are looked up in `values` (256 for each channel), or numbers.
struct Store {
  const void* x;
  const T* values;
  const int64_t* classes;
  const T* targets;
  int64_t bytes;
};

// Random crops and flips of training images, as in coterie.engine._augment.
struct CropFlip {
  const int64_t* keys;  // of each client; none for no augmentation
  const T* fill;        // of each channel
  int64_t padding;
};

// Noise that is drawn anew at every access, as in coterie.engine.noise.
struct Noise {
  const int64_t* keys;  // of each client or set; none for no noise
  const double* sigma;
  int64_t width;
};

enum Kind : int64_t { SGD, ADAM, ADAMW, RMSPROP, ADAGRAD };

// The optimizer, as in coterie.engine.optim.
struct Rule {
  const double* rates;  // of each step of each client; none for lr
  int64_t kind, moments, nesterov, centered;
  double lr, momentum, decay, dampening, beta1, beta2, eps, alpha, lr_decay, initial;
};

static inline uint64_t scrambled(uint64_t z) {  // SplitMix64, as in coterie.models
  z *= 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

static inline int64_t remainder_of(uint64_t bits, int64_t span) {
  const int64_t rest = int64_t(bits) % span;
  return rest < 0 ? rest + span : rest;
}

// While one lives, subnormal numbers (below 1.2e-38 in float32) count as zero in its thread. Processors take many times
// as long for them, and gradients of samples that a model fits are full of them. It ends with the call: no other code of
// the process computes so.
class SubnormalsAreZero {
#if defined(__SSE2__)
  const unsigned before = _mm_getcsr();

 public:
  SubnormalsAreZero() { _mm_setcsr(before | 0x8040); }  // results (flush to zero), and what is read (denormals are zero)
  ~SubnormalsAreZero() { _mm_setcsr(before); }
#elif defined(__aarch64__)
  uint64_t before;

 public:
  SubnormalsAreZero() {
    asm volatile("mrs %0, fpcr" : "=r"(before));
    asm volatile("msr fpcr, %0" : : "r"(before | uint64_t(1) << 24));
  }
  ~SubnormalsAreZero() { asm volatile("msr fpcr, %0" : : "r"(before)); }
#else
 public:
  SubnormalsAreZero() {}
#endif
};
