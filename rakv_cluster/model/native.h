/* What native.c and native_attention.c share: structures, as rakv_cluster/model/native.py declares
 * them too, vectors, and the one inner loop of all products. */
#ifndef RAKV_NATIVE_H
#define RAKV_NATIVE_H

#if !defined(__GNUC__) || defined(__clang__)
#error "GCC is wanted: its OpenMP runtime is the one that PyTorch has loaded already"
#endif
#ifndef __AVX512F__
#error "written for vectors of 512 bits"
#endif

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 16, PANEL = 64, UNIT = 32, TILE_ROWS = 6 };

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
    double eps, scale; /* `scale` is that of the products of queries and keys */
} Shape;

/* Rows of a step. Strides are in floats; `keys` holds addresses. */
typedef struct {
    int64_t rows;
    float *hidden;                /* [rows][hidden] */
    const float *cosines, *sines; /* [rows][head_dim] */
    const int64_t *positions;
    const int64_t *keys; /* slot 0 of a row's sequence: K of the first layer and head */
    const int64_t *layer_stride, *value_stride, *head_stride;
    int64_t tiles, tile_rows; /* rows that attend together, at most `tile_rows` */
    const int64_t *tile_start; /* [tiles + 1] */
    float *scratch;
    int64_t threads;
} Step;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline vec *at(float *p) { return (vec *)p; }

static inline vec get(const float *p) { return *(const vec *)p; }

static inline vec every(float x) { return (vec){0} + x; }

/* This thread's part of `count`. */
static inline void part(int64_t count, int64_t *start, int64_t *stop)
{
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    *start = count * thread / threads;
    *stop = count * (thread + 1) / threads;
}

/* y[rows, vecs * LANES] += x w, as one chain of multiply-adds per sum; `rows` and `vecs` are
 * constants where it is inlined. TILE_ROWS x PANEL are as many sums as the registers hold. With
 * each input it fetches `lines` lines more from `ahead`, for whoever comes next. */
static inline __attribute__((always_inline)) void tile(const float *x, int64_t x_stride,
                                                       const float *w, int64_t w_stride,
                                                       int64_t inputs, float *y, int64_t y_stride,
                                                       const float *ahead, int lines,
                                                       const int rows, const int vecs)
{
    vec sum[TILE_ROWS][PANEL / LANES];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) sum[r][v] = get(y + r * y_stride + v * LANES);
    for (int64_t k = 0; k < inputs; k++) {
        vec column[PANEL / LANES];
        for (int line = 0; line < lines; line++, ahead += LANES) __builtin_prefetch(ahead);
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) column[v] = get(w + k * w_stride + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++) sum[r][v] += column[v] * x[r * x_stride + k];
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) *at(y + r * y_stride + v * LANES) = sum[r][v];
}

/* e^x to about an ulp, for x <= 88: 2^n times a polynomial on |r| <= ln(2) / 2. What is below
 * e^-87 stays there; NaN stays NaN. */
static inline vec exponential(vec x)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    x = (vec)_mm512_max_ps(_mm512_set1_ps(-87.0f), (__m512)x);
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
    ivec exponent = (ivec)shifted - (ivec)every(shift);
    return (vec)((ivec)p + (exponent << 23));
}

/* native_attention.c */
int64_t attention_floats(const Shape *shape, int64_t tile_rows);
void attend(const Shape *shape, const Step *step, const float *qkv, int64_t layer, float *spaces,
            float *attended);

#endif
