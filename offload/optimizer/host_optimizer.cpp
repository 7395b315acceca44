// The host optimizer: each update is one pass over memory, which reads the gradient and updates weights and states.
//
// The arithmetic is that of update.py, operation by operation and without fused multiply-adds, so the results of the two
// are equal to the bit. The interface is plain C: it compiles in two seconds, and PyTorch's headers would take half a
// minute.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// How the fp32 value of a parameter is stored.

struct Whole {  // the weights are fp32 themselves
  float* weight;
  float load(ptrdiff_t i) const { return weight[i]; }
  void store(ptrdiff_t i, float value) const { weight[i] = value; }
};

struct Split {  // weight: bfloat16, the upper half rounded half up; low: the lower half of the fp32 value
  uint16_t* weight;
  uint16_t* low;
  float load(ptrdiff_t i) const {
    const uint32_t lower = low[i];
    const uint32_t upper = uint32_t(weight[i]) - (lower >> 15);
    return from_bits(upper << 16 | lower);
  }
  void store(ptrdiff_t i, float value) const {
    const uint32_t bits = to_bits(value);
    weight[i] = uint16_t((bits + 0x8000u) >> 16);
    low[i] = uint16_t(bits);
  }
};

struct SeparateFloat16 {  // weight: float16, master: fp32
  _Float16* weight;
  float* master;
  float load(ptrdiff_t i) const { return master[i]; }
  void store(ptrdiff_t i, float value) const {
    master[i] = value;
    weight[i] = _Float16(value);
  }
};

struct BFloat16 {
  uint16_t bits;
  operator float() const { return from_bits(uint32_t(bits) << 16); }
};

// Without masters: rounded up with the probability of the distance to the lower neighbour. See master_weights.py.

inline uint32_t noise(uint32_t bits, uint32_t step) {
  uint32_t mixed = bits ^ step * 0x9E3779B9u;
  mixed = (mixed ^ mixed >> 16) * 0x7FEB352Du;
  mixed = (mixed ^ mixed >> 15) * 0x846CA68Bu;
  return mixed ^ mixed >> 16;
}

inline void round_at_random(float value, uint32_t step, BFloat16* to) {
  const uint32_t bits = to_bits(value);
  to->bits = uint16_t((bits + (noise(bits, step) & 0xFFFFu)) >> 16);
}

inline void round_at_random(float value, uint32_t step, _Float16* to) {
  const uint32_t bits = to_bits(value), added = noise(bits, step) & 0x1FFFu;
  const float normal = from_bits((bits + added) & ~0x1FFFu);
  const float small = std::floor(std::fabs(value) * 0x1p24f + float(added) * 0x1p-13f) * 0x1p-24f;
  *to = _Float16(std::fabs(value) < 0x1p-14f ? std::copysign(small, value) : normal);
}

template <class Half>
struct Rounded {
  Half* weight;
  uint32_t step;
  float load(ptrdiff_t i) const { return float(weight[i]); }
  void store(ptrdiff_t i, float value) const { round_at_random(value, step, weight + i); }
};

template <class Half>
void round_all(ptrdiff_t count, const float* values, Half* weight, uint32_t step) {
  for (ptrdiff_t i = 0; i < count; ++i) round_at_random(values[i], step, weight + i);
}

struct AdamW {
  float *mean, *square;
  float coefficient, keep, beta1, one_minus_beta1, beta2, one_minus_beta2, inverse_root, epsilon, step_size;
  template <class Master, class Gradient>
  void run(ptrdiff_t count, Master master, const Gradient* __restrict gradient) const {
    float* __restrict mean = this->mean;
    float* __restrict square = this->square;
    for (ptrdiff_t i = 0; i < count; ++i) {
      const float g = float(gradient[i]) * coefficient;
      const float m = mean[i] * beta1 + g * one_minus_beta1;
      const float v = square[i] * beta2 + (g * g) * one_minus_beta2;
      mean[i] = m;
      square[i] = v;
      const float denominator = std::sqrt(v) * inverse_root + epsilon;
      master.store(i, master.load(i) * keep - (m / denominator) * step_size);
    }
  }
};

struct Sgd {
  float* momentum_buffer;  // null without momentum
  float coefficient, keep, momentum, rate;
  template <class Master, class Gradient>
  void run(ptrdiff_t count, Master master, const Gradient* __restrict gradient) const {
    for (ptrdiff_t i = 0; i < count; ++i) {
      float step = float(gradient[i]) * coefficient;
      if (momentum_buffer) momentum_buffer[i] = step = momentum_buffer[i] * momentum + step;
      master.store(i, master.load(i) * keep - step * rate);
    }
  }
};

enum { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

template <class Update, class Master>
void with_gradient(const Update& update, ptrdiff_t count, Master master, const void* gradient, int dtype) {
  if (dtype == kFloat32) update.run(count, master, static_cast<const float*>(gradient));
  if (dtype == kBFloat16) update.run(count, master, static_cast<const BFloat16*>(gradient));
  if (dtype == kFloat16) update.run(count, master, static_cast<const _Float16*>(gradient));
}

template <class Update>
void with_master(const Update& update, ptrdiff_t count, int weight_dtype, void* weight, void* remainder,
                 const void* gradient, int gradient_dtype, uint32_t step) {
  const auto run = [&](auto master) { with_gradient(update, count, master, gradient, gradient_dtype); };
  if (weight_dtype == kFloat32) run(Whole{static_cast<float*>(weight)});
  if (weight_dtype == kBFloat16 && remainder)
    run(Split{static_cast<uint16_t*>(weight), static_cast<uint16_t*>(remainder)});
  if (weight_dtype == kBFloat16 && !remainder) run(Rounded<BFloat16>{static_cast<BFloat16*>(weight), step});
  if (weight_dtype == kFloat16 && remainder)
    run(SeparateFloat16{static_cast<_Float16*>(weight), static_cast<float*>(remainder)});
  if (weight_dtype == kFloat16 && !remainder) run(Rounded<_Float16>{static_cast<_Float16*>(weight), step});
}

// Sixteen running sums in double, so that the result does not depend on how wide the machine's vectors are.
template <class Value>
double sum_of_squares_of(ptrdiff_t count, const Value* values) {
  double sums[16] = {};
  const ptrdiff_t whole = count / 16 * 16;
  for (ptrdiff_t i = 0; i < whole; i += 16)
    for (int lane = 0; lane < 16; ++lane) {
      const double value = float(values[i + lane]);
      sums[lane] += value * value;
    }
  for (ptrdiff_t i = whole; i < count; ++i) {
    const double value = float(values[i]);
    sums[i - whole] += value * value;
  }
  double total = 0;
  for (double sum : sums) total += sum;
  return total;
}

}  // namespace

extern "C" {

void adamw(ptrdiff_t count, int weight_dtype, void* weight, void* remainder, const void* gradient, int gradient_dtype,
           uint32_t step, float* mean, float* square, float coefficient, float keep, float beta1, float one_minus_beta1, float beta2,
           float one_minus_beta2, float inverse_root, float epsilon, float step_size) {
  const AdamW update{mean,  square, coefficient,     keep,    beta1,    one_minus_beta1,
                     beta2, one_minus_beta2,  inverse_root, epsilon, step_size};
  with_master(update, count, weight_dtype, weight, remainder, gradient, gradient_dtype, step);
}

void sgd(ptrdiff_t count, int weight_dtype, void* weight, void* remainder, const void* gradient, int gradient_dtype,
         uint32_t step, float* momentum_buffer, float coefficient, float keep, float momentum, float rate) {
  with_master(Sgd{momentum_buffer, coefficient, keep, momentum, rate}, count, weight_dtype, weight, remainder, gradient,
              gradient_dtype, step);
}

void round_at_random(ptrdiff_t count, const float* values, void* weight, int weight_dtype, uint32_t step) {
  if (weight_dtype == kBFloat16) round_all(count, values, static_cast<BFloat16*>(weight), step);
  if (weight_dtype == kFloat16) round_all(count, values, static_cast<_Float16*>(weight), step);
}

double sum_of_squares(ptrdiff_t count, const void* values, int dtype) {
  if (dtype == kBFloat16) return sum_of_squares_of(count, static_cast<const BFloat16*>(values));
  if (dtype == kFloat16) return sum_of_squares_of(count, static_cast<const _Float16*>(values));
  return sum_of_squares_of(count, static_cast<const float*>(values));
}

}  // extern "C"
