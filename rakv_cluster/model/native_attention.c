/* Attention of a step's rows over their sequences' own slots, causal by position.
 *
 * One kernel for every step, decode to prefill, so that a row has the same bits in each: its keys
 * pass in cells of CELL from slot 0 to its own, with a running peak and sum (online softmax:
 * Milakov and Gimelshein 2018; the blocks are those of flash attention, Dao et al. 2022). Rows of a
 * tile share the reading of K and V and nothing else; slots behind a row weigh exactly 0.
 */
#include "native.h"

enum { CELL = PANEL };

/* A thread's own. Query heads that share a KV head are folded into rows. */
typedef struct {
    float *queries; /* [folded][dim], times the scale */
    float *sums;    /* [folded][dim] */
    float *peaks;   /* [folded] */
    float *totals;  /* [folded][LANES]: sums of weights */
    float *keys;    /* [dim][CELL] */
    float *weights; /* [TILE_ROWS][CELL] */
} Space;

/* Rows of one sequence that attend together, and one KV head. */
typedef struct {
    const int64_t *positions;
    const float *keys, *values; /* [slots][dim] */
    int64_t group, folded, dim;
} Job;

int64_t attention_floats(const Shape *shape, int64_t tile_rows)
{
    int64_t folded = tile_rows * (shape->heads / shape->kv_heads), dim = shape->head_dim;
    int64_t peaks = (folded + LANES - 1) / LANES * LANES; /* the next thread's begin on a line */
    return folded * (2 * dim + LANES) + dim * CELL + TILE_ROWS * CELL + peaks;
}

static Space space_at(float *floats, int64_t folded, int64_t dim)
{
    Space space;
    space.queries = floats;
    space.sums = space.queries + folded * dim;
    space.totals = space.sums + folded * dim;
    space.keys = space.totals + folded * LANES;
    space.weights = space.keys + dim * CELL;
    space.peaks = space.weights + TILE_ROWS * CELL;
    return space;
}

#define TILE(ROWS, VECS) \
    tile(x, x_stride, w, w_stride, inputs, y, y_stride, ahead, lines, ROWS, VECS)
#define CASE(ROWS) \
    case ROWS: whole ? TILE(ROWS, 4) : TILE(ROWS, 1); break;

/* y[rows, PANEL or LANES] += x w */
static void small_product(const float *x, int64_t x_stride, const float *w, int64_t w_stride,
                          int64_t inputs, float *y, int64_t y_stride, const float *ahead,
                          int lines, int64_t rows, int whole)
{
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
}

/* LANES keys x LANES floats to their transpose; keys from `count` on are zeros. Laying two halves
 * of the rows into each other four times transposes 16 of them. The same part of `ahead` is fetched. */
static inline void transpose(const float *from, int64_t stride, int64_t count, const float *ahead,
                             float *to)
{
    const ivec low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    vec a[LANES], b[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        a[i] = i < count ? get(from + i * stride) : every(0);
        __builtin_prefetch(ahead + i * stride);
    }
#pragma GCC unroll 4
    for (int stage = 0; stage < 4; stage++) {
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            b[2 * i] = __builtin_shuffle(a[i], a[i + LANES / 2], low);
            b[2 * i + 1] = __builtin_shuffle(a[i], a[i + LANES / 2], low + 8);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) a[i] = b[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) *at(to + i * CELL) = a[i];
}

/* A cell's first `count` keys, transposed; what stands behind them in `out` is never weighed. Their
 * values come next, and are fetched meanwhile. */
static void turn_keys(const float *keys, const float *values, int64_t count, int64_t dim, float *out)
{
    for (int64_t key = 0; key < count; key += LANES)
        for (int64_t d = 0; d < dim; d += LANES) {
            int64_t at_ = key * dim + d, left = count - key;
            float *to = out + d * CELL + key;
            if (left >= LANES)
                transpose(keys + at_, dim, LANES, values + at_, to);
            else
                transpose(keys + at_, dim, left, values + at_, to);
        }
}

/* A row's scores of a cell, the first `visible` of them, to weights relative to its peak; a higher
 * peak shrinks what was summed before. */
static void weigh(float *scores, int64_t visible, int64_t dim, float *peak, float *total,
                  float *sums)
{
    const __m512 lowest = _mm512_set1_ps(-INFINITY);
    __mmask16 seen[CELL / LANES];
    __m512 highest = lowest;
#pragma GCC unroll 4
    for (int v = 0; v < CELL / LANES; v++) {
        int64_t left = visible - v * LANES;
        seen[v] = left >= LANES ? 0xffff : left > 0 ? (1 << left) - 1 : 0;
        __m512 score = _mm512_mask_loadu_ps(lowest, seen[v], scores + v * LANES);
        highest = _mm512_max_ps(highest, score);
    }
    float found = _mm512_reduce_max_ps(highest);
    if (found > *peak) {
        vec shrink = every(exponential(every(*peak - found))[0]);
        for (int64_t d = 0; d < dim; d += LANES) *at(sums + d) = get(sums + d) * shrink;
        *at(total) = get(total) * shrink;
        *peak = found;
    }
    vec weight, all = get(total);
#pragma GCC unroll 4
    for (int v = 0; v < CELL / LANES; v++) {
        weight = exponential(get(scores + v * LANES) - *peak);
        weight = (vec)_mm512_maskz_mov_ps(seen[v], (__m512)weight);
        *at(scores + v * LANES) = weight;
        all += weight;
    }
    *at(total) = all;
}

/* The job's rows against the cell of keys from `cell` on; the first rows fetch the next cell's. */
static void pass_cell(const Job *job, int64_t cell, Space space)
{
    int64_t dim = job->dim, group = job->group, last = job->folded / group - 1;
    int64_t present = job->positions[last] + 1 - cell;
    const float *keys = job->keys + cell * dim, *values = job->values + cell * dim;
    turn_keys(keys, values, least(CELL, present), dim, space.keys);
    for (int64_t start = 0; start < job->folded; start += TILE_ROWS) {
        int64_t rows = least(TILE_ROWS, job->folded - start);
        int64_t furthest = job->positions[(start + rows - 1) / group] + 1 - cell;
        if (furthest <= 0) continue;
        memset(space.weights, 0, rows * CELL * sizeof(float));
        small_product(space.queries + start * dim, dim, space.keys, CELL, dim, space.weights, CELL,
                      keys, 0, rows, 1);
        for (int64_t r = 0; r < rows; r++) {
            int64_t row = start + r;
            weigh(space.weights + r * CELL, job->positions[row / group] + 1 - cell, dim,
                  space.peaks + row, space.totals + row * LANES, space.sums + row * dim);
        }
        for (int64_t d = 0; d < dim;) {
            int whole = dim - d >= PANEL, width = whole ? PANEL : LANES;
            int lines = start == 0 && present > CELL ? width / LANES : 0;
            small_product(space.weights, CELL, values + d, dim, least(CELL, furthest),
                          space.sums + start * dim + d, dim, keys + CELL * (dim + d), lines,
                          rows, whole);
            d += width;
        }
    }
}

static void attend_job(const Job *job, Space space)
{
    for (int64_t row = 0; row < job->folded; row++) space.peaks[row] = -INFINITY;
    memset(space.sums, 0, job->folded * job->dim * sizeof(float));
    memset(space.totals, 0, job->folded * LANES * sizeof(float));
    int64_t last = job->positions[job->folded / job->group - 1];
    for (int64_t cell = 0; cell <= last; cell += CELL) pass_cell(job, cell, space);
}

/* `attended[rows][heads][dim]` of rotated `qkv[rows][heads + 2 kv_heads][dim]`, once the rows' K and
 * V are in their slots. For all threads of a parallel region; waits for them. */
void attend(const Shape *shape, const Step *step, const float *qkv, int64_t layer, float *spaces,
            float *attended)
{
    int64_t dim = shape->head_dim, group = shape->heads / shape->kv_heads;
    int64_t stride = (shape->heads + 2 * shape->kv_heads) * dim;
    float *mine = spaces + omp_get_thread_num() * attention_floats(shape, step->tile_rows);
#pragma omp for schedule(dynamic)
    for (int64_t unit = 0; unit < step->tiles * shape->kv_heads; unit++) {
        int64_t kv_head = unit % shape->kv_heads;
        int64_t start = step->tile_start[unit / shape->kv_heads];
        int64_t stop = step->tile_start[unit / shape->kv_heads + 1];
        const float *keys = (const float *)step->keys[start] + layer * step->layer_stride[start] +
                            kv_head * step->head_stride[start];
        Job job = {step->positions + start, keys, keys + step->value_stride[start],
                   group, (stop - start) * group, dim};
        Space space = space_at(mine, step->tile_rows * group, dim);
        for (int64_t row = 0; row < job.folded; row++) {
            int64_t head = kv_head * group + row % group;
            const float *query = qkv + (start + row / group) * stride + head * dim;
            for (int64_t d = 0; d < dim; d += LANES)
                *at(space.queries + row * dim + d) = get(query + d) * (float)shape->scale;
        }
        attend_job(&job, space);
        for (int64_t row = 0; row < job.folded; row++) {
            int64_t head = kv_head * group + row % group;
            float *out = attended + ((start + row / group) * shape->heads + head) * dim;
            float total = 0;
            for (int lane = 0; lane < LANES; lane++) total += space.totals[row * LANES + lane];
            for (int64_t d = 0; d < dim; d += LANES)
                *at(out + d) = get(space.sums + row * dim + d) / total;
        }
    }
}
