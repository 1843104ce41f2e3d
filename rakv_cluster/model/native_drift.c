/* Reused K and V that follow their repaired neighbours: rakv_cluster/model/drift.py says why.
 * A mean with exponential weights is two passes over a run's tokens, whatever is repaired of it. */
#include "native.h"

#define INLINE static inline __attribute__((always_inline))

/* Positions [low, low + count), in `runs` parts that begin at `starts` (and end at the last one). */
typedef struct {
    int64_t low, count, kv_heads, dim, half, repaired, runs;
    const int64_t *positions; /* [repaired] */
    const int64_t *starts;    /* [runs + 1], from `low` on */
    const int64_t *row;       /* [count]: which repaired one stands there, or -1 */
    const uint8_t *follows;   /* [count] */
    const float *cosines, *sines; /* [count][half] */
    const float *before;      /* [layers][2][kv_heads][repaired][dim] */
    double decay, prior, clip;
    float *space; /* for each thread rakv_following_space() of them */
    int64_t threads;
} Following;

int64_t rakv_following_space(const Following *job)
{
    int64_t longest = 0;
    for (int64_t run = 0; run < job->runs; run++) {
        int64_t length = job->starts[run + 1] - job->starts[run];
        if (length > longest) longest = length;
    }
    return job->repaired * (job->dim + 2) + longest * (job->dim + 1);
}

/* Keys at their position to position 0 (sign -1), or back. */
INLINE void turn(const Following *job, int64_t i, const float *x, float sign, float *out)
{
    int64_t half = job->half;
    const float *cosines = job->cosines + i * half, *sines = job->sines + i * half;
    for (int64_t d = 0; d < half; d++) {
        float low = x[d], high = x[d + half];
        out[d] = low * cosines[d] - sign * high * sines[d];
        out[d + half] = high * cosines[d] + sign * low * sines[d];
    }
    for (int64_t d = 2 * half; d < job->dim; d++) out[d] = x[d];
}

/* The lower median of `count` floats, which are put into another order. */
static float median(float *x, int64_t count)
{
    int64_t first = 0, last = count - 1, wanted = (count - 1) / 2;
    while (first < last) {
        float pivot = x[(first + last) / 2];
        int64_t i = first, j = last;
        while (i <= j) {
            while (x[i] < pivot) i++;
            while (pivot < x[j]) j--;
            if (i > j) break;
            float swapped = x[i];
            x[i++] = x[j], x[j--] = swapped;
        }
        if (wanted <= j) last = j;
        else if (wanted >= i) first = i;
        else break;
    }
    return x[wanted];
}

/* drift[repaired][dim] of one head, its keys turned to position 0, clipped. */
static void find_drift(const Following *job, const float *before, const float *slots, int keys,
                       float *drift, float *lengths)
{
    int64_t dim = job->dim;
    for (int64_t r = 0; r < job->repaired; r++) {
        float *x = drift + r * dim, square = 0;
        const float *now = slots + job->positions[r] * dim, *then = before + r * dim;
        for (int64_t d = 0; d < dim; d++) x[d] = now[d] - then[d];
        if (keys) turn(job, job->positions[r] - job->low, x, -1, x);
        for (int64_t d = 0; d < dim; d++) square += x[d] * x[d];
        lengths[r] = sqrtf(square);
    }
    float *ordered = lengths + job->repaired;
    memcpy(ordered, lengths, job->repaired * sizeof(float));
    float bound = job->clip * median(ordered, job->repaired);
    for (int64_t r = 0; r < job->repaired; r++)
        if (lengths[r] > bound)
            for (int64_t d = 0; d < dim; d++) drift[r * dim + d] *= bound / lengths[r];
}

/* From one token of a run to the next: older ones fade, then `added` (or NULL) counts in full. */
INLINE float fade(vec *sum, float weight, int vecs, float decay, const float *added)
{
    for (int v = 0; v < vecs; v++) sum[v] *= decay;
    if (!added) return weight * decay;
    for (int v = 0; v < vecs; v++) sum[v] += get(added + v * LANES);
    return weight * decay + 1;
}

/* Tokens [start, stop) of one run. */
INLINE void follow_run(const Following *job, int64_t start, int64_t stop, const float *drift,
                       float *slots, int keys, float *space, const int vecs)
{
    int64_t dim = vecs * LANES;
    float *weights = space + (stop - start) * dim, weight = 0, decay = job->decay;
    vec sum[16] = {0};
    for (int64_t i = stop - 1; i >= start; i--) {
        int64_t row = job->row[i];
        weight = fade(sum, weight, vecs, decay, row < 0 ? NULL : drift + row * dim);
        weights[i - start] = weight;
        for (int v = 0; v < vecs; v++) *at(space + (i - start) * dim + v * LANES) = sum[v];
    }
    weight = 0;
    memset(sum, 0, sizeof(sum));
    for (int64_t i = start; i < stop; i++) {
        int64_t row = job->row[i];
        weight = fade(sum, weight, vecs, decay, row < 0 ? NULL : drift + row * dim);
        if (!job->follows[i]) continue;
        float *mean = space + (i - start) * dim, *slot = slots + (job->low + i) * dim;
        float share = 1 / (weight + weights[i - start] + (float)job->prior);
        for (int v = 0; v < vecs; v++)
            *at(mean + v * LANES) = (get(mean + v * LANES) + sum[v]) * share;
        if (keys) turn(job, i, mean, 1, mean);
        for (int v = 0; v < vecs; v++) *at(slot + v * LANES) += get(mean + v * LANES);
    }
}

static void follow_head(const Following *job, const float *before, float *slots, int keys,
                        float *space)
{
    float *lengths = space + job->repaired * job->dim, *rest = lengths + 2 * job->repaired;
    find_drift(job, before, slots, keys, space, lengths);
    for (int64_t run = 0; run < job->runs; run++) {
        int64_t start = job->starts[run], stop = job->starts[run + 1];
        switch (job->dim / LANES) {
        case 4: follow_run(job, start, stop, space, slots, keys, rest, 4); break;
        case 8: follow_run(job, start, stop, space, slots, keys, rest, 8); break;
        default: follow_run(job, start, stop, space, slots, keys, rest, job->dim / LANES);
        }
    }
}

/* `slots` is K of `layer`, `value_stride` floats before its V; heads are `head_stride` apart. */
void rakv_follow(const Following *job, int64_t layer, float *slots, int64_t value_stride,
                 int64_t head_stride)
{
    int64_t floats = rakv_following_space(job), head_floats = job->repaired * job->dim;
    const float *before = job->before + layer * 2 * job->kv_heads * head_floats;
#pragma omp parallel for num_threads(job->threads) schedule(dynamic)
    for (int64_t unit = 0; unit < 2 * job->kv_heads; unit++) {
        int64_t values = unit / job->kv_heads, head = unit % job->kv_heads;
        follow_head(job, before + unit * head_floats,
                    slots + values * value_stride + head * head_stride, !values,
                    job->space + omp_get_thread_num() * floats);
    }
}
