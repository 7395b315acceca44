// The experts' matrix products in float32 on CPUs, in blocks that fit the caches, as in Goto and van de Geijn,
// "Anatomy of High-Performance Matrix Multiplication" (ACM TOMS 34(3), 2008). compiled.py calls it.
//
// An element is summed over k in one of two orders: that of few_rows for experts with up to FEW_ROWS rows, and that of
// product for others. Within each order, no bit of an element depends on other rows, on other experts, or on the number
// of threads.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int WIDTH = 16;  // floats in an AVX-512 register
constexpr int TILE_ROWS = 14, TILE_COLUMNS = 2 * WIDTH;  // 28 sums and two vectors of b: 30 of 32 registers
constexpr int64_t DEPTH = 384;             // terms that are summed before c is read and written again
constexpr int64_t PANEL_FLOATS = 1 << 17;  // of a packed panel of b: half of a level 2 cache
constexpr int64_t STRIPE = 8 * TILE_ROWS;  // rows of a that are packed together
constexpr int64_t LARGEST_PIECE = 512, SMALLEST_PIECE = 64;  // height and width of the piece of c that one thread computes
constexpr int64_t FEW_ROWS = 32;  // with more rows, packing b pays off
constexpr int64_t ROWS_AHEAD = 8, FLOATS_AHEAD = 32;  // how far ahead b is prefetched

typedef float Vector __attribute__((vector_size(WIDTH * sizeof(float)), aligned(sizeof(float))));
typedef int32_t Lanes __attribute__((vector_size(WIDTH * sizeof(int32_t))));

// at(i, j) = data[i * row + j * column]
struct Matrix {
    const float* data;
    int64_t row, column;
    Matrix from(int64_t i, int64_t j) const { return {data + i * row + j * column, row, column}; }
};

// c (+)= a b for ROWS rows; a is packed as [depth][TILE_ROWS], b has rows of TILE_COLUMNS.
template <int ROWS>
void tile(int64_t depth, const float* a, const float* b, int64_t b_row, float* c, int64_t c_row, bool add) {
    Vector sums[ROWS][2] = {};
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
        __builtin_prefetch(c + i * c_row, 1);
        __builtin_prefetch(c + i * c_row + WIDTH, 1);
    }
    for (int64_t k = 0; k < depth; k++, a += TILE_ROWS, b += b_row) {
        __builtin_prefetch(b + ROWS_AHEAD * b_row);
        __builtin_prefetch(b + ROWS_AHEAD * b_row + WIDTH);
        const Vector left = *(const Vector*)b, right = *(const Vector*)(b + WIDTH);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            sums[i][0] += a[i] * left;
            sums[i][1] += a[i] * right;
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
        Vector* out = (Vector*)(c + i * c_row);
        out[0] = add ? out[0] + sums[i][0] : sums[i][0];
        out[1] = add ? out[1] + sums[i][1] : sums[i][1];
    }
}

using Tile = decltype(&tile<1>);
constexpr Tile TILES[] = {nullptr, tile<1>, tile<2>,  tile<3>,  tile<4>,  tile<5>,  tile<6>, tile<7>,
                          tile<8>, tile<9>, tile<10>, tile<11>, tile<12>, tile<13>, tile<14>};

// One step of a transposition in registers: exchanges S columns of a row with those of the row S below it.
template <int S>
inline void exchange(Vector (&rows)[WIDTH]) {
    Lanes upper, lower;
    for (int i = 0; i < WIDTH; i++) {
        upper[i] = i & S ? WIDTH + i - S : i;
        lower[i] = i & S ? WIDTH + i : i + S;
    }
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; i++) {
        if (i & S) continue;
        const Vector first = rows[i], second = rows[i + S];
        rows[i] = __builtin_shuffle(first, second, upper);
        rows[i + S] = __builtin_shuffle(first, second, lower);
    }
}

// out[k][i] = from[i][k] for k < WIDTH and i < kept. Only the first count rows exist; the others count as zero.
inline void transpose(const float* from, int64_t stride, int64_t count, float* out, int64_t out_row, int64_t kept) {
    Vector rows[WIDTH];
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; i++) __builtin_prefetch(from + i * stride + FLOATS_AHEAD);
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; i++) rows[i] = i < count ? *(const Vector*)(from + i * stride) : Vector{};
    exchange<8>(rows);
    exchange<4>(rows);
    exchange<2>(rows);
    exchange<1>(rows);
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; i++) std::memcpy(out + i * out_row, &rows[i], kept * sizeof(float));
}

// Packs count rows of from as the columns of out, [depth][PANEL]; its other columns become zero.
template <int PANEL>
void pack_rows(const Matrix& from, int64_t count, int64_t depth, float* out) {
    const int64_t whole = from.column == 1 ? depth / WIDTH * WIDTH : 0;
    for (int64_t k = 0; k < whole; k += WIDTH) {
        for (int64_t i = 0; i < PANEL; i += WIDTH) {
            const int64_t left = std::min<int64_t>(WIDTH, count - i), kept = std::min<int64_t>(WIDTH, PANEL - i);
            const float* block = from.from(i, k).data;
            float* to = out + k * PANEL + i;
            if (kept == WIDTH) transpose(block, from.row, left, to, PANEL, WIDTH);  // with a size that the compiler knows
            else transpose(block, from.row, left, to, PANEL, kept);
        }
    }
    for (int64_t k = whole; k < depth; k++)
        for (int64_t i = 0; i < PANEL; i++) out[k * PANEL + i] = i < count ? *from.from(i, k).data : 0;
}

int64_t parts(int64_t total, int64_t most) { return (total + most - 1) / most; }

// Up to STRIPE rows of a as tiles of nearly equal height, each packed as [depth][TILE_ROWS].
struct Stripe {
    int64_t rows, depth, tiles;
    float* packed;

    Stripe(const Matrix& a, int64_t high, int64_t deep, float* memory)
        : rows(high), depth(deep), tiles(parts(high, TILE_ROWS)), packed(memory) {
        if (a.row == 1) {  // a is stored by columns: read along them
            for (int64_t k = 0; k < depth; k++)
                for (int64_t t = 0; t < tiles; t++)
                    std::copy_n(a.from(first(t), k).data, height(t), tile_at(t) + k * TILE_ROWS);
        } else {
            for (int64_t t = 0; t < tiles; t++) pack_rows<TILE_ROWS>(a.from(first(t), 0), height(t), depth, tile_at(t));
        }
    }
    int64_t first(int64_t t) const { return rows * t / tiles; }
    int64_t height(int64_t t) const { return first(t + 1) - first(t); }
    float* tile_at(int64_t t) const { return packed + t * depth * TILE_ROWS; }
};

// A tile at the right edge, of fewer than TILE_COLUMNS columns; b is packed.
void narrow_tile(int64_t rows, int64_t columns, int64_t depth, const float* a, const float* b, float* c, int64_t c_row,
                 bool add) {
    float whole[TILE_ROWS * TILE_COLUMNS];
    TILES[rows](depth, a, b, TILE_COLUMNS, whole, TILE_COLUMNS, false);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) {
            float& to = c[i * c_row + j];
            to = add ? to + whole[i * TILE_COLUMNS + j] : whole[i * TILE_COLUMNS + j];
        }
}

// c (+)= a b for a depth and columns for which b fits PANEL_FLOATS.
void block(int64_t rows, int64_t columns, int64_t depth, const Matrix& a, const Matrix& b, float* c, int64_t c_row,
           bool add) {
    alignas(64) static thread_local float b_memory[PANEL_FLOATS], a_memory[STRIPE * DEPTH];
    // If the rows of b are contiguous, packing would only copy them.
    const int64_t in_place = b.column == 1 ? columns / TILE_COLUMNS * TILE_COLUMNS : 0;
    for (int64_t j = in_place; j < columns; j += TILE_COLUMNS)
        pack_rows<TILE_COLUMNS>({b.from(0, j).data, b.column, b.row}, std::min<int64_t>(TILE_COLUMNS, columns - j),
                                depth, b_memory + j * depth);
    for (int64_t i = 0; i < rows; i += STRIPE) {
        const Stripe stripe(a.from(i, 0), std::min(STRIPE, rows - i), depth, a_memory);
        for (int64_t t = 0; t < stripe.tiles; t++) {
            float* out = c + (i + stripe.first(t)) * c_row;
            for (int64_t j = 0; j < columns; j += TILE_COLUMNS) {
                const Tile own = TILES[stripe.height(t)];
                const float *left = stripe.tile_at(t), *packed = b_memory + j * depth;
                if (j < in_place) own(depth, left, b.from(0, j).data, b.row, out + j, c_row, add);
                else if (columns - j >= TILE_COLUMNS) own(depth, left, packed, TILE_COLUMNS, out + j, c_row, add);
                else narrow_tile(stripe.height(t), columns - j, depth, left, packed, out + j, c_row, add);
            }
        }
    }
}

// c[rows, columns] = a[rows, depth] b[depth, columns]; c has rows of c_row.
void product(int64_t rows, int64_t columns, int64_t depth, const Matrix& a, const Matrix& b, float* c, int64_t c_row) {
    if (depth == 0) {
        for (int64_t i = 0; i < rows; i++) std::fill_n(c + i * c_row, columns, 0.0f);
        return;
    }
    const int64_t chunk = parts(parts(depth, parts(depth, DEPTH)), 16) * 16;  // nearly equal parts of whole vectors
    for (int64_t k = 0; k < depth; k += chunk) {
        const int64_t deep = std::min(chunk, depth - k), wide = PANEL_FLOATS / deep / TILE_COLUMNS * TILE_COLUMNS;
        for (int64_t j = 0; j < columns; j += wide)
            block(rows, std::min(wide, columns - j), deep, a.from(0, k), b.from(k, j), c + j, c_row, k > 0);
    }
}

// out[i][n] = <a_i, w_n> for ROWS rows and four columns; a_i and w_n are contiguous.
template <int ROWS>
void dot(int64_t depth, const float* a, int64_t a_row, const float* w, int64_t w_row, float* out, int64_t out_row) {
    Vector sums[ROWS][4] = {};
    const int64_t whole = depth / WIDTH * WIDTH;
    for (int64_t k = 0; k < whole; k += WIDTH)
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) {
            const Vector right = *(const Vector*)(w + n * w_row + k);
            __builtin_prefetch(w + (n + 4) * w_row + k);
#pragma GCC unroll 4
            for (int i = 0; i < ROWS; i++) sums[i][n] += *(const Vector*)(a + i * a_row + k) * right;
        }
    for (int i = 0; i < ROWS; i++)
        for (int n = 0; n < 4; n++) {
            float sum = 0;
            for (int lane = 0; lane < WIDTH; lane++) sum += sums[i][n][lane];
            for (int64_t k = whole; k < depth; k++) sum += a[i * a_row + k] * w[n * w_row + k];
            out[i * out_row + n] = sum;
        }
}

using Dot = decltype(&dot<1>);
constexpr Dot DOTS[] = {nullptr, dot<1>, dot<2>, dot<3>, dot<4>};

// Like product, for few rows and a transposed b: to read b once in place is cheaper than to pack it.
void few_rows(int64_t rows, int64_t columns, int64_t depth, const Matrix& a, const Matrix& b, float* c, int64_t c_row) {
    for (int64_t n = 0; n + 4 <= columns; n += 4)
        for (int64_t i = 0; i < rows; i += 4)
            DOTS[std::min<int64_t>(4, rows - i)](depth, a.from(i, 0).data, a.row, b.from(0, n).data, b.column,
                                                 c + i * c_row + n, c_row);
    for (int64_t n = columns / 4 * 4; n < columns; n++)
        for (int64_t i = 0; i < rows; i++) {
            float sum = 0;
            for (int64_t k = 0; k < depth; k++) sum += *a.from(i, k).data * *b.from(k, n).data;
            c[i * c_row + n] = sum;
        }
}

struct Task {
    int64_t rows, columns, depth;
    Matrix a, b;
    float* c;
    int64_t c_row;
    decltype(&product) compute;
};

// Cuts products into pieces of c.
std::vector<Task> cut(const std::vector<Task>& products, int64_t side) {
    std::vector<Task> pieces;
    for (const Task& whole : products)
        for (int64_t i = 0; i < whole.rows; i += side)
            for (int64_t j = 0; j < whole.columns; j += side)
                pieces.push_back({std::min(side, whole.rows - i), std::min(side, whole.columns - j), whole.depth,
                                  whole.a.from(i, 0), whole.b.from(0, j), whole.c + i * whole.c_row + j, whole.c_row,
                                  whole.compute});
    return pieces;
}

// Threads take the pieces in any order. The pieces are smaller if there would be fewer than four for each thread.
void compute(const std::vector<Task>& products, int threads) {
    int64_t side = LARGEST_PIECE;
    std::vector<Task> pieces = cut(products, side);
    for (; threads > 1 && pieces.size() < 4 * size_t(threads) && side > SMALLEST_PIECE; pieces = cut(products, side))
        side /= 2;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (size_t i = 0; i < pieces.size(); i++) {
        const Task& own = pieces[i];
        own.compute(own.rows, own.columns, own.depth, own.a, own.b, own.c, own.c_row);
    }
}

}  // namespace

// For each expert e: out[ends[e - 1] : ends[e]] = rows[ends[e - 1] : ends[e]] matrix_e. matrix_e [depth, columns] has the
// given strides; everything else is contiguous.
extern "C" void multiply_rows(const float* rows, const float* matrices, float* out, const int64_t* ends,
                              int64_t experts, int64_t depth, int64_t columns, int64_t row, int64_t column,
                              int threads) noexcept {
    std::vector<Task> products;
    for (int64_t e = 0; e < experts; e++) {
        const int64_t begin = e ? ends[e - 1] : 0, count = ends[e] - begin;
        if (count == 0) continue;
        const bool few = count <= FEW_ROWS && row == 1;
        products.push_back({count, columns, depth, {rows + begin * depth, depth, 1},
                            {matrices + e * depth * columns, row, column}, out + begin * columns, columns,
                            few ? few_rows : product});
    }
    compute(products, threads);
}

// For each expert e: out_e = left[ends[e - 1] : ends[e]]^T right[ends[e - 1] : ends[e]], which is zero without rows. left
// is [rows, height], right [rows, columns] and out [experts, height, columns], all contiguous.
extern "C" void sum_outer_products(const float* left, const float* right, float* out, const int64_t* ends,
                                   int64_t experts, int64_t height, int64_t columns, int threads) noexcept {
    std::vector<Task> products;
    for (int64_t e = 0; e < experts; e++) {
        const int64_t begin = e ? ends[e - 1] : 0;
        float* own = out + e * height * columns;
        if (ends[e] == begin) {
            std::fill_n(own, height * columns, 0.0f);
            continue;
        }
        products.push_back({height, columns, ends[e] - begin, {left + begin * height, 1, height},
                            {right + begin * columns, columns, 1}, own, columns, product});
    }
    compute(products, threads);
}
