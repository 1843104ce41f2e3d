/* The decoder's small steps on the CPU: all layers in one parallel region, over the weights as
 * oneDNN has packed them. Attention is in native_attention.c.
 *
 * Compiled at load by rakv_cluster/model/native.py.
 *
 * Every value is computed by the same instructions in the same order whatever rows stand beside
 * it, and products round as oneDNN's do: one chain of fused multiply-adds per block of inputs, the
 * blocks' sums added in order. So steps of few rows (here) and of many (oneDNN, with this file's
 * norms and activations between) agree bit for bit; the load-time checks compare them.
 */
#include "native.h"

#include <sys/mman.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

/* --- products */

/* Inputs that all rows pass before the next ones: PANEL x CHUNK weights stay in the first cache. */
enum { CHUNK = 64, MAX_ROWS = 64, AHEAD = 16 };

#define ALIGNED __attribute__((aligned(64)))

typedef struct {
    const float *x;
    int64_t x_stride, rows;
    const Weight *weight;
    float *y;
    int64_t y_stride;
    int add; /* to what is in y */
} Product;

#define TILE(ROWS, VECS) \
    tile(x, x_stride, w, PANEL, inputs, sums, PANEL, ahead, lines, ROWS, VECS)
#define CASE(ROWS) \
    case ROWS: whole ? TILE(ROWS, 4) : TILE(ROWS, 2); break;

/* Some inputs of at most TILE_ROWS rows and a panel, or UNIT columns of one. */
static void panel(const float *x, int64_t x_stride, const float *w, int64_t inputs, float *sums,
                  const float *ahead, int lines, int64_t rows, int whole)
{
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
}

/* Inputs [from, to), at most CHUNK, of all rows, in tiles of about equal size. The first pass reads
 * them from memory; so that it need not wait, the passes before fetch equal shares. */
static void pass_chunk(const Product *product, const float *w, int64_t from, int64_t to,
                       float sums[][PANEL], int whole)
{
    int64_t tiles = (product->rows + TILE_ROWS - 1) / TILE_ROWS;
    int lines = tiles == 1 ? 4 : tiles < 4 ? 2 : 1;
    const float *ahead = w + (from + (tiles == 1 ? AHEAD : CHUNK)) * PANEL;
    for (int64_t i = 0; i < tiles; i++) {
        int64_t row = product->rows * i / tiles, count = product->rows * (i + 1) / tiles - row;
        panel(product->x + row * product->x_stride + from, product->x_stride, w + from * PANEL,
              to - from, sums[row], ahead, whole && i * lines < 4 ? lines : 0, count, whole);
        ahead += lines * LANES * CHUNK;
    }
}

static void add_rows(float to[][PANEL], float from[][PANEL], int64_t rows)
{
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < PANEL; i += LANES) *at(to[row] + i) += get(from[row] + i);
}

/* A panel's columns from `column` on, all of them or UNIT, of all rows. */
static void columns(const Product *product, int64_t column, int whole)
{
    const Weight *weight = product->weight;
    const float *w = weight->packed + (column / PANEL) * weight->inputs * PANEL + column % PANEL;
    const float *bias = weight->bias ? weight->bias + column : NULL;
    float sums[MAX_ROWS][PANEL] ALIGNED, totals[MAX_ROWS][PANEL] ALIGNED;
    memset(totals, 0, product->rows * sizeof *totals);
    for (int64_t block = 0; block < weight->inputs; block += weight->block) {
        int64_t stop = least(block + weight->block, weight->inputs);
        memset(sums, 0, product->rows * sizeof *sums);
        for (int64_t from = block; from < stop; from += CHUNK)
            pass_chunk(product, w, from, least(from + CHUNK, stop), sums, whole);
        add_rows(totals, sums, product->rows);
    }
    for (int64_t row = 0; row < product->rows; row++)
        for (int64_t i = 0; i < (whole ? PANEL : UNIT); i += LANES) {
            float *target = product->y + row * product->y_stride + column + i;
            vec value = get(totals[row] + i);
            if (bias) value += get(bias + i);
            *at(target) = product->add ? get(target) + value : value;
        }
}

/* y[rows, start:stop] = (or +=) x W^T + b, in units of UNIT columns; at most MAX_ROWS rows. */
static void product(const float *x, int64_t x_stride, int64_t rows, const Weight *weight,
                    int64_t start, int64_t stop, float *y, int64_t y_stride, int add)
{
    const Product product = {x, x_stride, rows, weight, y, y_stride, add};
    for (int64_t column = start; column < stop;) {
        int whole = column % PANEL == 0 && column + PANEL <= stop;
        columns(&product, column, whole);
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

static ALONE void activate(const float *gate, const float *up, float *out, int64_t n)
{
    for (int64_t i = 0; i < n; i += LANES) {
        vec g = get(gate + i);
        vec bound = (vec)_mm512_min_ps(_mm512_set1_ps(88.0f), (__m512)-g); /* NaN passes */
        *at(out + i) = g / (1.0f + exponential(bound)) * get(up + i);
    }
}

/* `out` may be `x`. */
static ALONE void rotate(const float *x, const float *cosines, const float *sines, float *out,
                         int64_t dim)
{
    int64_t half = dim / 2;
#pragma GCC ivdep
    for (int64_t i = 0; i < half; i++) {
        float low = x[i], high = x[i + half];
        out[i] = low * cosines[i] - high * sines[i];
        out[i + half] = high * cosines[i + half] + low * sines[i + half];
    }
}

/* One head of a row's Q, K and V: rotated where it stands, or into its slot. */
static void place(const Shape *shape, const Step *step, int64_t layer, float *qkv, int64_t row,
                  int64_t head)
{
    int64_t dim = shape->head_dim;
    float *x = qkv + (row * (shape->heads + 2 * shape->kv_heads) + head) * dim;
    const float *cosines = step->cosines + row * dim, *sines = step->sines + row * dim;
    if (head < shape->heads) {
        rotate(x, cosines, sines, x, dim);
        return;
    }
    float *keys = (float *)step->keys[row] + layer * step->layer_stride[row];
    int64_t kv_head = (head - shape->heads) % shape->kv_heads;
    float *to = keys + kv_head * step->head_stride[row] + step->positions[row] * dim;
    if (head < shape->heads + shape->kv_heads)
        rotate(x, cosines, sines, to, dim);
    else
        memcpy(to + step->value_stride[row], x, dim * sizeof(float));
}

/* --- steps of few rows */

typedef struct {
    float *attended, *qkv, *activated, *spaces, *mine;
} Scratch;

/* Floats of a small step's scratch; without rows, of what attention alone needs. */
int64_t rakv_scratch(const Shape *shape, int64_t rows, int64_t tile_rows, int64_t threads)
{
    int64_t heads = 2 * shape->heads + 2 * shape->kv_heads;
    int64_t mine = shape->hidden + 2 * shape->inner;
    return rows * (heads * shape->head_dim + shape->inner + threads * mine) +
           threads * attention_floats(shape, tile_rows);
}

static Scratch scratch(const Shape *shape, const Step *step)
{
    int64_t rows = step->rows, q = shape->heads * shape->head_dim;
    int64_t all = q + 2 * shape->kv_heads * shape->head_dim;
    int64_t each = rows * (shape->hidden + 2 * shape->inner);
    Scratch parts;
    parts.attended = step->scratch;
    parts.qkv = parts.attended + rows * q;
    parts.activated = parts.qkv + rows * all;
    parts.spaces = parts.activated + rows * shape->inner;
    parts.mine = parts.spaces + step->threads * attention_floats(shape, step->tile_rows) +
                 omp_get_thread_num() * each;
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

/* Rotation and K/V stores of products `qkv`: this thread's part. */
static void place_part(const Shape *shape, const Step *step, int64_t layer, float *qkv)
{
    int64_t start, stop, heads = shape->heads + 2 * shape->kv_heads;
    part(step->rows * heads, &start, &stop);
    for (int64_t i = start; i < stop; i++)
        place(shape, step, layer, qkv, i / heads, i % heads);
}

static void run_layer(const Shape *shape, const Step *step, const Layer *layer, int64_t number,
                      Scratch at_)
{
    int64_t rows = step->rows, n = shape->hidden, inner = shape->inner, start, stop;
    const float *x = normed(shape, step, at_.mine, layer->input_norm);
    shared_product(x, rows, &layer->qkv, at_.qkv, 0);
#pragma omp barrier
    place_part(shape, step, number, at_.qkv);
#pragma omp barrier
    attend(shape, step, at_.qkv, number, at_.spaces, at_.attended);
    shared_product(at_.attended, rows, &layer->output, step->hidden, 1);
#pragma omp barrier
    normed(shape, step, at_.mine, layer->mlp_norm);
    float *both = at_.mine + rows * n;
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

/* Layers [first, stop) over the step's hidden rows. Its rotated queries are left in the scratch,
 * [rows][heads + 2 kv_heads][head_dim] behind rows * heads * head_dim floats. */
void rakv_layers(const Shape *shape, const Step *step, const Layer *layers, int64_t first,
                 int64_t stop)
{
#pragma omp parallel num_threads(step->threads)
    {
        Scratch at_ = scratch(shape, step);
        for (int64_t number = first; number < stop; number++)
            run_layer(shape, step, layers + number, number, at_);
    }
}

/* out[rows, outputs] = x W^T + b; at most MAX_ROWS rows */
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

/* Products `qkv`: the queries are rotated in place, K and V go into their slots. */
void rakv_place(const Shape *shape, const Step *step, float *qkv, int64_t layer)
{
#pragma omp parallel num_threads(step->threads)
    place_part(shape, step, layer, qkv);
}

/* attended[rows, heads * head_dim] of `qkv` once it is placed. */
void rakv_attend(const Shape *shape, const Step *step, const float *qkv, int64_t layer,
                 float *attended)
{
#pragma omp parallel num_threads(step->threads)
    attend(shape, step, qkv, layer, step->scratch, attended);
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
