/* The decoder's small steps on the CPU: products, norms, rotation and activation in one parallel
 * region per layer, over the weights as oneDNN has packed them.
 *
 * Compiled at load by rakv_cluster/model/native.py, which also declares the structures. Attention
 * stays with PyTorch: a layer is cut there, so a call finishes one layer and begins the next.
 *
 * Every value is computed by the same instructions in the same order whatever rows stand beside
 * it, and products round as oneDNN's do: one chain of fused multiply-adds per block of inputs, the
 * blocks' sums added in order. So steps of few rows (here) and of many (oneDNN, with this file's
 * norms and activations between) agree bit for bit; the load-time checks compare them.
 */
#if !defined(__GNUC__) || defined(__clang__)
#error "GCC is wanted: its OpenMP runtime is the one that PyTorch has loaded already"
#endif

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

enum { LANES = 16, PANEL = 64, UNIT = 32, TILE_ROWS = 6, AHEAD = 16 };

typedef float vec __attribute__((vector_size(64), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(64), aligned(4)));

typedef struct {
    const float *packed; /* [outputs / PANEL][inputs][PANEL] */
    const float *bias;   /* or NULL */
    int64_t outputs, inputs;
    int64_t block; /* inputs per chain of multiply-adds */
} Weight;

typedef struct {
    const float *input_norm, *mlp_norm;
    Weight qkv, output, gate_up, down;
} Layer;

typedef struct {
    int64_t hidden, heads, kv_heads, head_dim, inner;
    double eps;
} Shape;

/* Rows of a step. Strides are in floats; `slots`, `queries` and `attended` hold addresses. */
typedef struct {
    int64_t rows;
    float *hidden;                /* [rows][hidden] */
    const float *cosines, *sines; /* [rows][head_dim] */
    const int64_t *slots;         /* of a row's K in the first layer */
    const int64_t *layer_stride, *value_stride, *head_stride;
    const int64_t *queries, *query_stride; /* where its queries go, and from KV head to KV head */
    const int64_t *group, *index;          /* its group, and its number in there */
    const int64_t *attended;               /* by group, laid out as its queries */
    float *scratch;                        /* rakv_scratch() floats */
    int64_t threads;
} Step;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline vec *at(float *p) { return (vec *)p; }

static inline vec get(const float *p) { return *(const vec *)p; }

/* This thread's part of `count`. */
static inline void part(int64_t count, int64_t *start, int64_t *stop)
{
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    *start = count * thread / threads;
    *stop = count * (thread + 1) / threads;
}

/* --- products */

/* `rows` x (`vecs` * LANES) outputs; both are constants where it is inlined. TILE_ROWS x PANEL are
 * as many sums as the registers hold. */
static inline __attribute__((always_inline)) void tile(
    const float *x, int64_t x_stride, const Weight *weight, int64_t column, float *y,
    int64_t y_stride, int add, const int rows, const int vecs)
{
    const float *w = weight->packed + (column / PANEL) * weight->inputs * PANEL + column % PANEL;
    vec total[TILE_ROWS][PANEL / LANES] = {0};
    for (int64_t from = 0; from < weight->inputs; from += weight->block) {
        int64_t to = least(from + weight->block, weight->inputs);
        vec sum[TILE_ROWS][PANEL / LANES] = {0};
        for (int64_t k = from; k < to; k++) {
            vec column_k[PANEL / LANES];
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++) {
                __builtin_prefetch(w + (k + AHEAD) * PANEL + v * LANES);
                column_k[v] = get(w + k * PANEL + v * LANES);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int v = 0; v < vecs; v++) sum[r][v] += column_k[v] * x[r * x_stride + k];
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++) total[r][v] += sum[r][v];
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++) {
            vec value = total[r][v];
            float *target = y + r * y_stride + column + v * LANES;
            if (weight->bias) value += get(weight->bias + column + v * LANES);
            *at(target) = add ? get(target) + value : value;
        }
}

#define TILE(ROWS, VECS) tile(x, x_stride, weight, column, y, y_stride, add, ROWS, VECS)
#define CASE(ROWS) \
    case ROWS: whole ? TILE(ROWS, 4) : TILE(ROWS, 2); break;

/* At most TILE_ROWS rows of a panel, or of UNIT columns of one. */
static void panel(const float *x, int64_t x_stride, const Weight *weight, int64_t column, float *y,
                  int64_t y_stride, int add, int64_t rows, int whole)
{
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
}

/* y[rows, start:stop] = x W^T + b, or added to what is there; in units of UNIT columns. Panel by
 * panel: all rows pass while it is in the cache, in tiles of about equal size. */
static void product(const float *x, int64_t x_stride, int64_t rows, const Weight *weight,
                    int64_t start, int64_t stop, float *y, int64_t y_stride, int add)
{
    int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t column = start; column < stop;) {
        int whole = column % PANEL == 0 && column + PANEL <= stop;
        for (int64_t i = 0; i < tiles; i++) {
            int64_t row = rows * i / tiles, count = rows * (i + 1) / tiles - row;
            panel(x + row * x_stride, x_stride, weight, column, y + row * y_stride, y_stride, add,
                  count, whole);
        }
        column += whole ? PANEL : UNIT;
    }
}

/* This thread's columns of it. */
static void shared_product(const float *x, int64_t rows, const Weight *weight, float *y, int add)
{
    int64_t start, stop;
    part(weight->outputs / UNIT, &start, &stop);
    product(x, weight->inputs, rows, weight, start * UNIT, stop * UNIT, y, weight->outputs, add);
}

/* Move packed weights to huge pages: a step reads all of them, and walking the page table for every
 * 4 KiB costs a third of that. Where the kernel declines, they stay where they are. */
void rakv_collapse(const Weight *weight)
{
    const uintptr_t huge = 2 << 20;
    uintptr_t start = (uintptr_t)weight->packed, bytes = weight->outputs * weight->inputs * 4;
    for (uintptr_t page = start / huge * huge; page < start + bytes; page += huge)
        madvise((void *)page, huge, MADV_COLLAPSE);
}

/* --- one row, or a part of one: every caller gets the same instructions */

#define ALONE __attribute__((noinline, noclone))

static ALONE void norm(const float *x, const float *weight, float *out, int64_t n, double eps)
{
    vec squares = {0};
    for (int64_t i = 0; i < n; i += LANES) squares += get(x + i) * get(x + i);
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += squares[lane];
    float scale = (float)(1.0 / sqrt((double)sum / n + eps));
    for (int64_t i = 0; i < n; i += LANES) *at(out + i) = get(x + i) * scale * get(weight + i);
}

static inline vec bounded(vec x, float low, float high)
{
    ivec below = x < low, above = x > high;
    vec lows = (vec){0} + low, highs = (vec){0} + high;
    return (vec)(((ivec)x & ~below & ~above) | ((ivec)lows & below) | ((ivec)highs & above));
}

/* e^x to about an ulp: 2^n times a polynomial on |r| <= ln(2) / 2. */
static inline vec exponential(vec x)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    x = bounded(x, -87.0f, 88.0f);
    vec shifted = x * 1.44269504f + shift;
    vec n = shifted - shift;
    vec r = x - n * 0.693145752f;
    r = r - n * 1.42860677e-6f;
    vec p = r * (1.0f / 720) + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    ivec exponent = (ivec)shifted - (ivec)((vec){0} + shift);
    return (vec)((ivec)p + (exponent << 23));
}

static ALONE void activate(const float *gate, const float *up, float *out, int64_t n)
{
    for (int64_t i = 0; i < n; i += LANES) {
        vec g = get(gate + i);
        *at(out + i) = g / (1.0f + exponential(-g)) * get(up + i);
    }
}

static ALONE void rotate(const float *x, const float *cosines, const float *sines, float *out,
                         int64_t dim)
{
    int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float low = x[i], high = x[i + half];
        out[i] = low * cosines[i] - high * sines[i];
        out[i + half] = high * cosines[i + half] + low * sines[i + half];
    }
}

/* One head of a row's Q, K and V: to its group's queries, or to its slot. */
static void place(const Shape *shape, const Step *step, int64_t layer, const float *qkv,
                  int64_t row, int64_t head)
{
    int64_t dim = shape->head_dim, group = shape->heads / shape->kv_heads;
    const float *x = qkv + (row * (shape->heads + 2 * shape->kv_heads) + head) * dim;
    const float *cosines = step->cosines + row * dim, *sines = step->sines + row * dim;
    if (head < shape->heads) {
        float *to = (float *)step->queries[row] + head / group * step->query_stride[row];
        rotate(x, cosines, sines, to + head % group * dim, dim);
        return;
    }
    float *slot = (float *)step->slots[row] + layer * step->layer_stride[row];
    int64_t kv_head = (head - shape->heads) % shape->kv_heads;
    float *to = slot + kv_head * step->head_stride[row];
    if (head < shape->heads + shape->kv_heads)
        rotate(x, cosines, sines, to, dim);
    else
        memcpy(to + step->value_stride[row], x, dim * sizeof(float));
}

/* A row's attention, with its heads in the order in which the output product wants them. */
static void gather(const Shape *shape, const Step *step, int64_t row, float *out)
{
    int64_t dim = shape->head_dim, group = shape->heads / shape->kv_heads;
    const float *from = (const float *)step->attended[step->group[row]];
    from += step->index[row] * group * dim;
    for (int64_t head = 0; head < shape->heads; head++)
        memcpy(out + head * dim, from + head / group * step->query_stride[row] + head % group * dim,
               dim * sizeof(float));
}

/* --- steps of few rows */

typedef struct {
    float *attended, *qkv, *activated, *mine;
} Scratch;

int64_t rakv_scratch(const Shape *shape, int64_t rows, int64_t threads)
{
    int64_t heads = 2 * shape->heads + 2 * shape->kv_heads;
    int64_t mine = shape->hidden + 2 * shape->inner;
    return rows * (heads * shape->head_dim + shape->inner + threads * mine);
}

static Scratch scratch(const Shape *shape, const Step *step)
{
    int64_t rows = step->rows, q = shape->heads * shape->head_dim;
    int64_t all = q + 2 * shape->kv_heads * shape->head_dim;
    Scratch parts;
    parts.attended = step->scratch;
    parts.qkv = parts.attended + rows * q;
    parts.activated = parts.qkv + rows * all;
    parts.mine = parts.activated + rows * shape->inner;
    return parts;
}

/* Every thread norms all rows for itself: cheaper than waiting for another. */
static float *normed(const Shape *shape, const Step *step, float *mine, const float *weight)
{
    int64_t n = shape->hidden;
    for (int64_t row = 0; row < step->rows; row++)
        norm(step->hidden + row * n, weight, mine + row * n, n, shape->eps);
    return mine;
}

static void begin_layer(const Shape *shape, const Step *step, const Layer *layer, int64_t number,
                        Scratch at_, float *mine)
{
    shared_product(normed(shape, step, mine, layer->input_norm), step->rows, &layer->qkv, at_.qkv,
                   0);
#pragma omp barrier
    int64_t start, stop, heads = shape->heads + 2 * shape->kv_heads;
    part(step->rows * heads, &start, &stop);
    for (int64_t i = start; i < stop; i++)
        place(shape, step, number, at_.qkv, i / heads, i % heads);
}

static void finish_layer(const Shape *shape, const Step *step, const Layer *layer, Scratch at_,
                         float *mine)
{
    int64_t rows = step->rows, n = shape->hidden, inner = shape->inner;
    int64_t start, stop;
    part(rows, &start, &stop);
    for (int64_t row = start; row < stop; row++)
        gather(shape, step, row, at_.attended + row * shape->heads * shape->head_dim);
#pragma omp barrier
    shared_product(at_.attended, rows, &layer->output, step->hidden, 1);
#pragma omp barrier
    const float *x = normed(shape, step, mine, layer->mlp_norm);
    float *both = mine + rows * n;
    part(inner / UNIT, &start, &stop);
    start *= UNIT, stop *= UNIT;
    product(x, n, rows, &layer->gate_up, start, stop, both, 2 * inner, 0);
    product(x, n, rows, &layer->gate_up, inner + start, inner + stop, both, 2 * inner, 0);
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = both + row * 2 * inner + start;
        activate(gate, gate + inner, at_.activated + row * inner + start, stop - start);
    }
#pragma omp barrier
    shared_product(at_.activated, rows, &layer->down, step->hidden, 1);
#pragma omp barrier
}

/* The layer `number` after its attention (or nothing: NULL), then the next one before its. */
void rakv_layer(const Shape *shape, const Step *step, const Layer *layer, const Layer *next,
                int64_t number)
{
    Scratch at_ = scratch(shape, step);
#pragma omp parallel num_threads(step->threads)
    {
        int64_t each = step->rows * (shape->hidden + 2 * shape->inner);
        float *mine = at_.mine + omp_get_thread_num() * each;
        if (layer) finish_layer(shape, step, layer, at_, mine);
        if (next) begin_layer(shape, step, next, number + 1, at_, mine);
    }
}

/* out[rows, outputs] = norm(x) W^T, the x by address. */
void rakv_head(const Shape *shape, const int64_t *x, int64_t rows, const float *weight_norm,
               const Weight *head, float *scratch, float *out, int64_t threads)
{
    for (int64_t row = 0; row < rows; row++)
        norm((const float *)x[row], weight_norm, scratch + row * shape->hidden, shape->hidden,
             shape->eps);
#pragma omp parallel num_threads(threads)
    shared_product(scratch, rows, head, out, 0);
}

/* x[rows, inputs] W^T + b */
void rakv_product(const Weight *weight, const float *x, int64_t rows, float *out, int64_t threads)
{
#pragma omp parallel num_threads(threads)
    shared_product(x, rows, weight, out, 0);
}

/* --- what stands between the products in steps of many rows */

/* hidden += update (unless NULL), then out = norm(hidden) (unless weight is NULL). */
void rakv_add_norm(const Shape *shape, float *hidden, const float *update, const float *weight,
                   float *out, int64_t rows, int64_t threads)
{
    int64_t n = shape->hidden;
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        float *x = hidden + row * n;
        if (update)
            for (int64_t i = 0; i < n; i++) x[i] += update[row * n + i];
        if (weight) norm(x, weight, out + row * n, n, shape->eps);
    }
}

void rakv_place(const Shape *shape, const Step *step, const float *qkv, int64_t layer)
{
    int64_t heads = shape->heads + 2 * shape->kv_heads;
#pragma omp parallel for num_threads(step->threads)
    for (int64_t row = 0; row < step->rows; row++)
        for (int64_t head = 0; head < heads; head++) place(shape, step, layer, qkv, row, head);
}

void rakv_gather(const Shape *shape, const Step *step, float *out)
{
    int64_t n = shape->heads * shape->head_dim;
#pragma omp parallel for num_threads(step->threads)
    for (int64_t row = 0; row < step->rows; row++) gather(shape, step, row, out + row * n);
}

/* out[rows, inner] from gate and up side by side. */
void rakv_activate(const Shape *shape, const float *gate_up, float *out, int64_t rows,
                   int64_t threads)
{
    int64_t inner = shape->inner;
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = gate_up + row * 2 * inner;
        activate(gate, gate + inner, out + row * inner, inner);
    }
}
