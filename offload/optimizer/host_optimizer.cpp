// The host optimizer. AdamW and SGD are one pass over memory, which reads the gradient and updates weights and states.
//
// The arithmetic is that of update.py, operation by operation and without fused multiply-adds, so the results of the two
// are equal to the bit. The interface is plain C: it compiles in two seconds, and PyTorch's headers would take half a
// minute.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

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

// Without a branch, for which compilers would give up vectors.
inline uint32_t choose(bool first, uint32_t a, uint32_t b) {
  const uint32_t mask = -uint32_t(first);
  return (a & mask) | (b & ~mask);
}

// 16-bit numbers. Compilers convert _Float16 one by one, which is an order of magnitude slower than these few operations.

struct BFloat16 {
  uint16_t bits;
  operator float() const { return from_bits(uint32_t(bits) << 16); }
};

struct Float16 {
  uint16_t bits;
  operator float() const {
    // The exponent's bias is 112 less than in fp32.
    const uint32_t normal = (uint32_t(bits & 0x7FFFu) << 13) + (112u << 23);
    // Processors take a hundred times as long for subnormal fp32 numbers, so none is made on the way: 2^-14 is added to
    // the mantissa as an exponent, and subtracted as a number.
    const uint32_t small = to_bits(from_bits(normal + (1u << 23)) - 0x1p-14f);
    const uint32_t infinite = choose(normal >= 0x47800000u, 0x7F800000u, 0u);
    return from_bits(uint32_t(bits & 0x8000u) << 16 | choose(normal < 0x38800000u, small, normal) | infinite);
  }
};

// The bits of a float16 number, given those of its absolute value in fp32 with 13 zeros at the end, and those of its
// absolute value in units of 2^-24 if it is below the smallest normal number.
inline uint16_t to_float16(uint32_t bits, uint32_t rounded, uint32_t small) {
  const uint32_t absolute = bits & 0x7FFFFFFFu;
  const uint32_t normal = (rounded - (112u << 23)) >> 13;
  const uint32_t large = choose(absolute > 0x7F800000u, 0x7E00u, 0x7C00u);
  const uint32_t finite = choose(absolute < 0x38800000u, small, normal);
  return uint16_t((bits >> 16 & 0x8000u) | choose(rounded >= 0x47800000u, large, finite));
}

inline Float16 nearest_float16(float value) {
  const uint32_t bits = to_bits(value), absolute = bits & 0x7FFFFFFFu;
  const uint32_t rounded = absolute + 0xFFFu + (absolute >> 13 & 1u);
  // 0.5 has a last place of 2^-24, so the sum is rounded to it.
  const uint32_t small = to_bits(from_bits(absolute) + 0.5f) - to_bits(0.5f);
  return {to_float16(bits, rounded, small)};
}

// How the fp32 value of a parameter is stored. The new weight goes to the target, which may be the memory of the old
// weights or of the gradient.

struct Whole {  // the weights are fp32 themselves
  const float* weight;
  float* target;
  float load(ptrdiff_t i) const { return weight[i]; }
  void store(ptrdiff_t i, float value) const { target[i] = value; }
};

struct Split {  // weight: bfloat16, the upper half rounded half up; low: the lower half of the fp32 value
  const uint16_t* weight;
  uint16_t* target;
  uint16_t* low;
  float load(ptrdiff_t i) const {
    const uint32_t lower = low[i];
    const uint32_t upper = uint32_t(weight[i]) - (lower >> 15);
    return from_bits(upper << 16 | lower);
  }
  void store(ptrdiff_t i, float value) const {
    const uint32_t bits = to_bits(value);
    target[i] = uint16_t((bits + 0x8000u) >> 16);
    low[i] = uint16_t(bits);
  }
};

struct SeparateFloat16 {  // target: float16, master: fp32
  Float16* target;
  float* master;
  float load(ptrdiff_t i) const { return master[i]; }
  void store(ptrdiff_t i, float value) const {
    master[i] = value;
    target[i] = nearest_float16(value);
  }
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

inline void round_at_random(float value, uint32_t step, Float16* to) {
  const uint32_t bits = to_bits(value), absolute = bits & 0x7FFFFFFFu, added = noise(bits, step) & 0x1FFFu;
  // Only below the smallest normal number, where it is at most 1024, the value in units of 2^-24 is used.
  const float units = std::min(from_bits(absolute) * 0x1p24f, 1024.0f) + float(int32_t(added)) * 0x1p-13f;
  to->bits = to_float16(bits, absolute + added, uint32_t(int32_t(units)));
}

template <class Half>
struct Rounded {
  const Half* weight;
  Half* target;
  uint32_t step;
  float load(ptrdiff_t i) const { return float(weight[i]); }
  void store(ptrdiff_t i, float value) const { round_at_random(value, step, target + i); }
};

template <class Half>
void round_all(ptrdiff_t count, const float* values, Half* weight, uint32_t step) {
  for (ptrdiff_t i = 0; i < count; ++i) round_at_random(values[i], step, weight + i);
}

// Copies a block of gradients and masters before it computes, and stores the block afterwards. Inside of the loops no
// memory is then both read and written through two pointers, which would keep compilers from vectors.
template <class Master, class Gradient, class Compute>
void in_blocks(ptrdiff_t count, Master master, const Gradient* gradient, float coefficient, Compute compute) {
  constexpr ptrdiff_t kBlock = 64;
  float g[kBlock], m[kBlock];
  for (ptrdiff_t begin = 0; begin < count; begin += kBlock) {
    const ptrdiff_t size = std::min(kBlock, count - begin);
    for (ptrdiff_t i = 0; i < size; ++i) g[i] = float(gradient[begin + i]) * coefficient;
    for (ptrdiff_t i = 0; i < size; ++i) m[i] = master.load(begin + i);
    compute(begin, size, g, m);
    for (ptrdiff_t i = 0; i < size; ++i) master.store(begin + i, m[i]);
  }
}

struct AdamW {
  float *mean, *square;
  float coefficient, keep, beta1, one_minus_beta1, beta2, one_minus_beta2, inverse_root, epsilon, step_size;
  template <class Master, class Gradient>
  void run(ptrdiff_t count, Master master, const Gradient* gradient) const {
    in_blocks(count, master, gradient, coefficient, [&](ptrdiff_t begin, ptrdiff_t size, const float* g, float* m) {
      float* __restrict mean = this->mean + begin;
      float* __restrict square = this->square + begin;
      for (ptrdiff_t i = 0; i < size; ++i) {
        const float average = mean[i] * beta1 + g[i] * one_minus_beta1;
        const float v = square[i] * beta2 + (g[i] * g[i]) * one_minus_beta2;
        mean[i] = average;
        square[i] = v;
        const float denominator = std::sqrt(v) * inverse_root + epsilon;
        m[i] = m[i] * keep - (average / denominator) * step_size;
      }
    });
  }
};

struct Sgd {
  float* momentum_buffer;  // null without momentum
  float coefficient, keep, momentum, rate;
  template <class Master, class Gradient>
  void run(ptrdiff_t count, Master master, const Gradient* gradient) const {
    in_blocks(count, master, gradient, coefficient, [&](ptrdiff_t begin, ptrdiff_t size, const float* g, float* m) {
      for (ptrdiff_t i = 0; i < size; ++i) {
        float step = g[i];
        if (momentum_buffer) momentum_buffer[begin + i] = step = momentum_buffer[begin + i] * momentum + step;
        m[i] = m[i] * keep - step * rate;
      }
    });
  }
};

// Sixteen running sums in double, so that a result does not depend on how wide the machine's vectors are.
class Sum {
 public:
  template <class Term>
  void add(ptrdiff_t count, Term term) {
    const ptrdiff_t whole = count / 16 * 16;
    for (ptrdiff_t i = 0; i < whole; i += 16)
      for (int lane = 0; lane < 16; ++lane) sums_[lane] += term(i + lane);
    for (ptrdiff_t i = whole; i < count; ++i) sums_[i - whole] += term(i);
  }
  double total() const {
    double total = 0;
    for (double sum : sums_) total += sum;
    return total;
  }

 private:
  double sums_[16] = {};
};

inline double squared(float value) { return double(value) * double(value); }

struct Adafactor {  // one matrix, in three passes over the gradient and two over the weights
  ptrdiff_t rows, columns;
  float *row, *column;
  float coefficient, share, kept, keep, smallest_row, largest;
  double learning_rate, threshold, smallest_scale;
  template <class Master, class Gradient>
  void run(ptrdiff_t, Master master, const Gradient* gradient) const {
    // A row at a time in fp32: it stays in the cache, and the loops over it are the same for all types.
    std::vector<float> of_gradient(columns), of_master(columns);
    float* __restrict g = of_gradient.data();
    float* __restrict m = of_master.data();
    const auto read_gradient = [&](ptrdiff_t r) {
      for (ptrdiff_t c = 0; c < columns; ++c) g[c] = float(gradient[r * columns + c]) * coefficient;
    };
    const auto read_master = [&](ptrdiff_t r) {
      for (ptrdiff_t c = 0; c < columns; ++c) m[c] = master.load(r * columns + c);
    };
    std::vector<double> of_columns(columns);
    double weights = 0, row_sum = 0, changes = 0;
    for (ptrdiff_t r = 0; r < rows; ++r) {
      read_gradient(r);
      read_master(r);
      Sum of_row, of_weights;
      of_row.add(columns, [&](ptrdiff_t c) { return double(g[c] * g[c]); });
      of_weights.add(columns, [&](ptrdiff_t c) { return squared(m[c]); });
      for (ptrdiff_t c = 0; c < columns; ++c) of_columns[c] += double(g[c] * g[c]);
      weights += of_weights.total();
      row[r] = row[r] * kept + float(of_row.total() / double(columns)) * share;
      row_sum += row[r];
    }
    for (ptrdiff_t c = 0; c < columns; ++c)
      column[c] = column[c] * kept + float(of_columns[c] / double(rows)) * share;
    const float row_mean = std::max(float(row_sum / double(rows)), smallest_row);
    // 1 / variance = 1 / (row / row_mean) * 1 / column, so that elements need neither a division nor, here, a root.
    std::vector<float> inverse(columns);
    for (ptrdiff_t c = 0; c < columns; ++c) inverse[c] = 1.0f / column[c];
    const float* __restrict of_column = inverse.data();
    for (ptrdiff_t r = 0; r < rows; ++r) {
      read_gradient(r);
      const float of_row = 1.0f / (row[r] / row_mean);
      Sum sum;
      sum.add(columns, [&](ptrdiff_t c) { return squared(g[c]) * double(std::min(of_row * of_column[c], largest)); });
      changes += sum.total();
    }
    const double count = double(rows * columns);
    const double scale = std::max(smallest_scale, std::sqrt(weights / count));
    const double size = std::sqrt(changes / count);
    const float rate = float(scale * learning_rate / std::max(1.0, size / threshold));
    for (ptrdiff_t r = 0; r < rows; ++r) {
      read_gradient(r);
      read_master(r);
      const float of_row = 1.0f / (row[r] / row_mean);
      for (ptrdiff_t c = 0; c < columns; ++c)
        m[c] = m[c] * keep - g[c] * std::sqrt(std::min(of_row * of_column[c], largest)) * rate;
      for (ptrdiff_t c = 0; c < columns; ++c) master.store(r * columns + c, m[c]);
    }
  }
};

enum { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

template <class Update, class Master>
void with_gradient(const Update& update, ptrdiff_t count, Master master, const void* gradient, int dtype) {
  if (dtype == kFloat32) update.run(count, master, static_cast<const float*>(gradient));
  if (dtype == kBFloat16) update.run(count, master, static_cast<const BFloat16*>(gradient));
  if (dtype == kFloat16) update.run(count, master, static_cast<const Float16*>(gradient));
}

template <class Update>
void with_master(const Update& update, ptrdiff_t count, int weight_dtype, const void* weight, void* target,
                 void* remainder, const void* gradient, int gradient_dtype, uint32_t step) {
  const auto run = [&](auto master) { with_gradient(update, count, master, gradient, gradient_dtype); };
  const auto* bfloat16 = static_cast<const BFloat16*>(weight);
  const auto* float16 = static_cast<const Float16*>(weight);
  if (weight_dtype == kFloat32) run(Whole{static_cast<const float*>(weight), static_cast<float*>(target)});
  if (weight_dtype == kBFloat16 && remainder)
    run(Split{static_cast<const uint16_t*>(weight), static_cast<uint16_t*>(target), static_cast<uint16_t*>(remainder)});
  if (weight_dtype == kBFloat16 && !remainder) run(Rounded<BFloat16>{bfloat16, static_cast<BFloat16*>(target), step});
  if (weight_dtype == kFloat16 && remainder)
    run(SeparateFloat16{static_cast<Float16*>(target), static_cast<float*>(remainder)});
  if (weight_dtype == kFloat16 && !remainder) run(Rounded<Float16>{float16, static_cast<Float16*>(target), step});
}

template <class Value>
double sum_of_squares_of(ptrdiff_t count, const Value* values) {
  Sum sum;
  sum.add(count, [&](ptrdiff_t i) { return squared(float(values[i])); });
  return sum.total();
}

}  // namespace

extern "C" {

void adamw(ptrdiff_t count, int weight_dtype, const void* weight, void* target, void* remainder,
           const void* gradient, int gradient_dtype, uint32_t step, float* mean, float* square, float coefficient, float keep, float beta1, float one_minus_beta1, float beta2,
           float one_minus_beta2, float inverse_root, float epsilon, float step_size) {
  const AdamW update{mean,  square, coefficient,     keep,    beta1,    one_minus_beta1,
                     beta2, one_minus_beta2,  inverse_root, epsilon, step_size};
  with_master(update, count, weight_dtype, weight, target, remainder, gradient, gradient_dtype, step);
}

void sgd(ptrdiff_t count, int weight_dtype, const void* weight, void* target, void* remainder,
         const void* gradient, int gradient_dtype, uint32_t step, float* momentum_buffer, float coefficient, float keep, float momentum, float rate) {
  with_master(Sgd{momentum_buffer, coefficient, keep, momentum, rate}, count, weight_dtype, weight, target, remainder,
              gradient, gradient_dtype, step);
}

void adafactor(ptrdiff_t rows, int weight_dtype, const void* weight, void* target, void* remainder,
               const void* gradient, int gradient_dtype, uint32_t step, ptrdiff_t columns, float* row, float* column, float coefficient, float share, float kept,
               float keep, float smallest_row, float largest, double learning_rate, double threshold, double smallest_scale) {
  const Adafactor update{rows, columns,      row,      column,        coefficient, share,    kept,
                         keep, smallest_row, largest, learning_rate, threshold,   smallest_scale};
  with_master(update, rows * columns, weight_dtype, weight, target, remainder, gradient, gradient_dtype, step);
}

void round_at_random(ptrdiff_t count, const float* values, void* weight, int weight_dtype, uint32_t step) {
  if (weight_dtype == kBFloat16) round_all(count, values, static_cast<BFloat16*>(weight), step);
  if (weight_dtype == kFloat16) round_all(count, values, static_cast<Float16*>(weight), step);
}

double sum_of_squares(ptrdiff_t count, const void* values, int dtype) {
  if (dtype == kBFloat16) return sum_of_squares_of(count, static_cast<const BFloat16*>(values));
  if (dtype == kFloat16) return sum_of_squares_of(count, static_cast<const Float16*>(values));
  return sum_of_squares_of(count, static_cast<const float*>(values));
}

}  // extern "C"
