/* The inner loops that dominate the time of a round, in C: random words, permutations, training of
   linear models and of fully connected networks, sums of trees, sums of clients' replies,
   normalization by mini-batches.

   Everything here also exists in Python, which is used where this could not be compiled
   (foedus/kernels/__init__.py names the counterparts): integers and sums agree to the last bit,
   training agrees up to rounding. A client's result depends only on its own rows, not on the other
   clients in its batch or on the number of threads.

   Arguments are buffers of plain numbers in row-major order and native byte order. Sizes, rows,
   labels and nodes are checked before use; the nodes of `sum_trees` must have been checked by
   `pack_trees`. */

#define _GNU_SOURCE /* RTLD_DEFAULT */
#define PY_SSIZE_T_CLEAN
/* One build for CPython 3.11 and later: 3.11 is the first whose stable ABI has buffers. */
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef Py_ssize_t size;

#define ALWAYS static inline __attribute__((always_inline))

enum { FINE, NO_MEMORY, NO_SUCH_ROW };

/* -- threads ----------------------------------------------------------------------------------- */

typedef struct {
    void (*run)(void *, size, size);
    void *about;
    size n, grain;
    atomic_ptrdiff_t next;
} Work;

static void work_on(void *given)
{
    Work *work = given;
    for (;;) {
        size first = atomic_fetch_add(&work->next, work->grain);
        if (first >= work->n)
            return;
        size last = first + work->grain < work->n ? first + work->grain : work->n;
        work->run(work->about, first, last);
    }
}

static void *thread_on(void *given)
{
    work_on(given);
    return NULL;
}

/* The thread pool of GNU's OpenMP, if PyTorch uses it: after an operation its threads spin for
   milliseconds, waiting for the next one, and new threads would get no more than half of their
   cores. */
static void (*by_pytorch)(void (*)(void *), void *, unsigned, unsigned);

/* In a forked process the pool has no threads left, and waiting for it would never end. */
static void without_pytorch(void) { by_pytorch = NULL; }

/* run(about, first, last) for all of 0 .. n - 1, `grain` at a time, on `threads` threads; the next
   free thread takes the next piece. */
static void share(void (*run)(void *, size, size), void *about, size n, size grain, int threads)
{
    Work work = {run, about, n, grain > 0 ? grain : 1, 0};
    size pieces = (n + work.grain - 1) / work.grain;
    pthread_t others[64];
    int started = 0;
    if (threads > 1 && pieces > 1 && by_pytorch) {
        by_pytorch(work_on, &work, (unsigned)threads,
                   0); /* the whole pool: OpenMP would end the threads that are not used */
        return;
    }
    while (started < threads - 1 && started < pieces - 1 && started < 64 &&
           pthread_create(&others[started], NULL, thread_on, &work) == 0)
        started++;
    work_on(&work);
    while (started > 0)
        pthread_join(others[--started], NULL);
}

/* -- buffers ----------------------------------------------------------------------------------- */

/* Whether a buffer holds a * b * c numbers of `each` bytes. */
static int holds(const Py_buffer *buffer, size a, size b, size c, size each, const char *name)
{
    size due;
    if (a >= 0 && b >= 0 && c >= 0 && !__builtin_mul_overflow(a, b, &due) &&
        !__builtin_mul_overflow(due, c, &due) && !__builtin_mul_overflow(due, each, &due) &&
        due == buffer->len)
        return 1;
    PyErr_Format(PyExc_ValueError,
                 "%s has %zd bytes; %zd x %zd x %zd numbers of %zd bytes were due", name,
                 buffer->len, a, b, c, each);
    return 0;
}

static void release(Py_buffer *buffers, int count)
{
    while (count > 0)
        PyBuffer_Release(&buffers[--count]);
}

/* -- Philox4x32-10 ----------------------------------------------------------------------------- */

ALWAYS void philox(uint32_t c[4], uint32_t k0, uint32_t k1)
{
    for (int i = 0; i < 10; i++) {
        uint64_t p = (uint64_t)c[0] * 0xD2511F53u, q = (uint64_t)c[2] * 0xCD9E8D57u;
        uint32_t odd = c[1], last = c[3];
        c[0] = (uint32_t)(q >> 32) ^ odd ^ k0;
        c[1] = (uint32_t)q;
        c[2] = (uint32_t)(p >> 32) ^ last ^ k1;
        c[3] = (uint32_t)p;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

#if defined(__x86_64__)
#define LANES 8 /* blocks at a time, in two vectors, so that multiplications overlap */

/* The first `whole` words of a stream, a multiple of 4 * LANES. Words are in the lower halves of
   64-bit lanes. */
__attribute__((target("avx2"))) static void stream(int64_t *out, size whole, uint32_t key0,
                                                   uint32_t key1)
{
    const __m256i m0 = _mm256_set1_epi64x(0xD2511F53), m1 = _mm256_set1_epi64x(0xCD9E8D57),
                  low = _mm256_set1_epi64x(0xFFFFFFFF);
    for (size j = 0; j < whole; j += 4 * LANES) {
        __m256i a[2], b[2], c[2], d[2];
        uint32_t k0 = key0, k1 = key1;
        for (int h = 0; h < 2; h++) {
            a[h] = _mm256_add_epi64(_mm256_set1_epi64x((int64_t)(j / 4) + 4 * h),
                                    _mm256_setr_epi64x(0, 1, 2, 3));
            b[h] = c[h] = d[h] = _mm256_setzero_si256();
        }
        for (int i = 0; i < 10; i++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
            for (int h = 0; h < 2; h++) {
                __m256i p = _mm256_mul_epu32(a[h], m0), q = _mm256_mul_epu32(c[h], m1);
                a[h] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(q, 32), b[h]),
                                        _mm256_set1_epi64x(k0));
                b[h] = q;
                c[h] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p, 32), d[h]),
                                        _mm256_set1_epi64x(k1));
                d[h] = p;
            }
        for (int h = 0; h < 2; h++) { /* block by block */
            __m256i ab0 = _mm256_unpacklo_epi64(a[h], b[h]),
                    ab1 = _mm256_unpackhi_epi64(a[h], b[h]);
            __m256i cd0 = _mm256_unpacklo_epi64(c[h], d[h]),
                    cd1 = _mm256_unpackhi_epi64(c[h], d[h]);
            __m256i *to = (__m256i *)(out + j + 16 * h);
            _mm256_storeu_si256(to,
                                _mm256_and_si256(low, _mm256_permute2x128_si256(ab0, cd0, 0x20)));
            _mm256_storeu_si256(to + 1,
                                _mm256_and_si256(low, _mm256_permute2x128_si256(ab1, cd1, 0x20)));
            _mm256_storeu_si256(to + 2,
                                _mm256_and_si256(low, _mm256_permute2x128_si256(ab0, cd0, 0x31)));
            _mm256_storeu_si256(to + 3,
                                _mm256_and_si256(low, _mm256_permute2x128_si256(ab1, cd1, 0x31)));
        }
    }
}
#else
#define LANES 8
static void stream(int64_t *out, size whole, uint32_t key0, uint32_t key1) {} /* never called */
#endif

static int eight; /* whether to use vectors of eight */

/* The first words of the stream of a key, `count` of them. */
static void first_words(int64_t *out, size count, const int64_t key[2])
{
    uint32_t k0 = (uint32_t)key[0], k1 = (uint32_t)key[1];
    size whole = eight ? count - count % (4 * LANES) : 0;
    if (whole)
        stream(out, whole, k0, k1);
    for (size j = whole; j < count; j += 4) {
        uint32_t v[4] = {(uint32_t)(j / 4), 0, 0, 0};
        philox(v, k0, k1);
        for (size l = 0; l < 4 && j + l < count; l++)
            out[j + l] = v[l];
    }
}

/* words(out (c, count), keys (c, 2), c, count): the first words of the streams of c keys. */
static PyObject *words(PyObject *self, PyObject *args)
{
    Py_buffer b[2];
    size c, count;
    if (!PyArg_ParseTuple(args, "w*y*nn", &b[0], &b[1], &c, &count))
        return NULL;
    if (!holds(&b[0], c, count, 1, 8, "out") || !holds(&b[1], c, 2, 1, 8, "keys"))
        return release(b, 2), NULL;
    int64_t *out = b[0].buf;
    const int64_t *keys = b[1].buf;
    Py_BEGIN_ALLOW_THREADS
    for (size i = 0; i < c; i++)
        first_words(out + i * count, count, keys + 2 * i);
    Py_END_ALLOW_THREADS
    release(b, 2);
    Py_RETURN_NONE;
}

/* fold(out (n, 2), keys (n or 1, 2), counters (n, 4), n): the first two words of one block for each
   counter, which are new keys. */
static PyObject *fold(PyObject *self, PyObject *args)
{
    Py_buffer b[3];
    size n;
    if (!PyArg_ParseTuple(args, "w*y*y*n", &b[0], &b[1], &b[2], &n))
        return NULL;
    size many = b[1].len == 16 ? 0 : 1;
    if (!holds(&b[0], n, 2, 1, 8, "out") || !holds(&b[1], many ? n : 1, 2, 1, 8, "keys") ||
        !holds(&b[2], n, 4, 1, 8, "counters"))
        return release(b, 3), NULL;
    int64_t *out = b[0].buf;
    const int64_t *keys = b[1].buf, *counters = b[2].buf;
    for (size i = 0; i < n; i++) {
        uint32_t v[4];
        for (int l = 0; l < 4; l++)
            v[l] = (uint32_t)counters[4 * i + l];
        philox(v, (uint32_t)keys[2 * i * many], (uint32_t)keys[2 * i * many + 1]);
        out[2 * i] = v[0];
        out[2 * i + 1] = v[1];
    }
    release(b, 3);
    Py_RETURN_NONE;
}

/* -- permutations ------------------------------------------------------------------------------ */

/* Sort in ascending order; `room` holds n more numbers, to merge into. */
static void sort(uint64_t *a, uint64_t *room, size n)
{
    const size run = 16;
    for (size first = 0; first < n; first += run)
        for (size i = first + 1; i < n && i < first + run; i++) {
            uint64_t x = a[i];
            size j = i;
            for (; j > first && a[j - 1] > x; j--)
                a[j] = a[j - 1];
            a[j] = x;
        }
    uint64_t *from = a, *to = room;
    for (size width = run; width < n; width *= 2) {
        for (size first = 0; first < n; first += 2 * width) {
            size i = first, middle = first + width < n ? first + width : n, j = middle;
            size end = first + 2 * width < n ? first + 2 * width : n, at = first;
            while (i < middle && j < end) {
                uint64_t x = from[i], y = from[j];
                int second = y < x;
                to[at++] = second ? y : x;
                i += !second;
                j += second;
            }
            while (i < middle)
                to[at++] = from[i++];
            while (j < end)
                to[at++] = from[j++];
        }
        uint64_t *swap = from;
        from = to;
        to = swap;
    }
    if (from != a)
        memcpy(a, from, (size_t)n * sizeof *a);
}

typedef struct {
    int64_t *out;
    const int64_t *keys;
    const uint8_t *valid;
    size n, valid_rows;
    atomic_int failed;
} Order;

static void order_some(void *about, size first, size last)
{
    Order *o = about;
    size n = o->n;
    uint64_t *ranks = malloc((2 * (size_t)n + 1) * sizeof *ranks);
    if (ranks == NULL) {
        o->failed = NO_MEMORY;
        return;
    }
    for (size i = first; i < last; i++) {
        const uint8_t *valid =
            o->valid ? o->valid + (o->valid_rows ? i % o->valid_rows : 0) * n : NULL;
        int64_t *out = o->out + i * n;
        size real = 0;
        for (size j = 0; j < n; j += 4) {
            uint32_t v[4] = {(uint32_t)(j / 4), 0, 0, 0};
            philox(v, (uint32_t)o->keys[2 * i], (uint32_t)o->keys[2 * i + 1]);
            for (size l = 0; l < 4 && j + l < n; l++)
                if (valid == NULL || valid[j + l])
                    ranks[real++] = (uint64_t)v[l] << 30 | (uint64_t)(j + l);
        }
        sort(ranks, ranks + n, real);
        for (size j = 0; j < real; j++)
            out[j] = (int64_t)(ranks[j] & ((1u << 30) - 1));
        for (size j = 0; real < n; j++)
            if (!valid[j])
                out[real++] = j;
    }
    free(ranks);
}

/* order(out (c, n), keys (c, 2), valid (v, n) bytes or empty, c, n, v, threads): permutations of 0
   .. n - 1, sorted by the words of each key; invalid positions come last. Key i belongs to client i
   mod v. */
static PyObject *order(PyObject *self, PyObject *args)
{
    Py_buffer b[3];
    size c, n, rows;
    int threads;
    if (!PyArg_ParseTuple(args, "w*y*y*nnni", &b[0], &b[1], &b[2], &c, &n, &rows, &threads))
        return NULL;
    if (!holds(&b[0], c, n, 1, 8, "out") || !holds(&b[1], c, 2, 1, 8, "keys") ||
        !holds(&b[2], rows, n, 1, 1, "valid"))
        return release(b, 3), NULL;
    if (n >= 1 << 30) {
        PyErr_Format(PyExc_ValueError, "cannot permute %zd rows: the limit is 2^30 - 1", n);
        return release(b, 3), NULL;
    }
    Order about = {b[0].buf, b[1].buf, rows ? b[2].buf : NULL, n, rows, 0};
    Py_BEGIN_ALLOW_THREADS
    share(order_some, &about, c, 1 + 8192 / (n + 1),
          threads); /* enough work to be worth waking a thread */
    Py_END_ALLOW_THREADS
    release(b, 3);
    if (about.failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* -- wide vectors ------------------------------------------------------------------------------ */

typedef float Vec __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t Mask __attribute__((vector_size(32)));
#define LANES 8
#define COLUMNS ((Mask){0, 1, 2, 3, 4, 5, 6, 7})

enum { CROSS_ENTROPY, SQUARED, LOGISTIC, HUBER };

enum { MOST_LAYERS = 32, TILE = 16 };

/* Operations that may follow a linear layer, each at most once: normalization by the rows of a
   step, ReLU, and dropout. */
enum { NOTHING, NORMALIZE, RELU, DROPOUT, MOST_STEPS = 3 };

/* A layer of all clients: W (clients, out, in), an optional bias (clients, out), and optional terms
   that are added to their gradients; then the operations that follow it.

   Normalization has a running mean and a running variance (clients, out), and an optional scale and
   shift with optional terms for their gradients. If it is `fixed`, it uses the running statistics,
   which do not change. Dropout has keys (most, clients, 2) of masks: a number whose 16 random bits
   are less than `dropped` becomes 0, others are multiplied by `kept`. */
typedef struct {
    float *weight, *bias;
    const float *more_weight, *more_bias;
    size in, out;
    int steps[MOST_STEPS], fixed;
    float *scale, *shift, *mean, *var;
    const float *more_scale, *more_shift;
    float eps, momentum, kept;
    unsigned dropped;
    const int64_t *keys;
} Layer;

/* The vectors of a normalization. */
enum {
    SCALE, SHIFT, MEAN, VAR, MORE_SCALE, MORE_SHIFT, OWN_MEAN, OWN_VAR, INVERSE, NEW_MEAN, NEW_VAR,
    SLOPE_SCALE, SLOPE_SHIFT, NORM_VECTORS
};

/* A layer of one client during training: weights in tiles of sixteen outputs, its outputs on the
   rows of a step, the normalized outputs, the mask of dropout, and the gradient with respect to the
   outputs. `rows` point to the inputs of the next layer. */
typedef struct {
    float *weight, *more, *bias, *more_bias, *said, *slope, *normal, *mask, *norm[NORM_VECTORS];
    const float **rows;
    size tiles;
} Sheet;

static int has_step(const Layer *layer, int step)
{
    return layer->steps[0] == step || layer->steps[1] == step || layer->steps[2] == step;
}

typedef struct {
    Layer layer[MOST_LAYERS];
    int layers, loss;
    const float *x, *targets, *shares;
    const int64_t *labels, *used, *steps;
    size rows, d, k, most, clients, b;
    float lr, keep, delta;
    atomic_int failed;
} Training;

/* Zeroed memory for the layers of one client, to be freed; NULL if allocation fails. */
static void *sheets_for(const Training *m, Sheet *sheets)
{
    size_t floats = 0;
    for (int l = 0; l < m->layers; l++) {
        const Layer *layer = &m->layer[l];
        size_t width = (size_t)(sheets[l].tiles = (layer->out + TILE - 1) / TILE) * TILE;
        size_t batches = 2 + has_step(layer, NORMALIZE) + has_step(layer, DROPOUT);
        floats += width * ((size_t)layer->in * (layer->more_weight ? 2 : 1) + 2 +
                           batches * (size_t)m->b);
        floats += has_step(layer, NORMALIZE) ? width * NORM_VECTORS : 0;
    }
    size_t pointers = (size_t)m->layers * (size_t)m->b;
    char *room = NULL;
    if (posix_memalign((void **)&room, 64, floats * sizeof(float) + pointers * sizeof(float *)) !=
        0)
        return NULL;
    memset(room, 0, floats * sizeof(float));
    float *at = (float *)room;
    const float **rows = (const float **)(room + floats * sizeof(float));
    for (int l = 0; l < m->layers; l++) {
        Sheet *sheet = &sheets[l];
        const Layer *layer = &m->layer[l];
        size width = sheet->tiles * TILE;
        sheet->weight = at, at += width * layer->in;
        sheet->more = layer->more_weight ? at : NULL,
        at += layer->more_weight ? width * layer->in : 0;
        sheet->bias = at, at += width;
        sheet->more_bias = at, at += width;
        sheet->said = at, at += width * m->b;
        sheet->slope = at, at += width * m->b;
        sheet->normal = sheet->said, sheet->mask = NULL;
        if (has_step(layer, NORMALIZE)) {
            sheet->normal = at, at += width * m->b;
            for (int v = 0; v < NORM_VECTORS; v++, at += width)
                sheet->norm[v] = at;
        }
        if (has_step(layer, DROPOUT))
            sheet->mask = at, at += width * m->b;
        sheet->rows = rows + l * m->b;
        for (size r = 0; r < m->b; r++)
            sheet->rows[r] = sheet->normal + r * width;
    }
    return room;
}

/* A row goes to child[0] if its feature is at most the threshold, otherwise to child[1]. A leaf has
   itself as both children, and holds its number in place of a threshold. */
typedef struct {
    union {
        float threshold;
        int32_t leaf;
    };
    int32_t feature, child[2];
} Node;

typedef struct {
    float *out;
    const float *x, *shares, *values;
    const Node *nodes;
    const int32_t *roots;
    size n, d, k, trees, block;
    atomic_int failed;
} Forest;

/* total + rest (n) += sum_i weights[i] x[i], x (clients, n) in single or (wide) double
   precision. */
typedef struct {
    double *total, *rest;
    const void *x;
    const double *weights;
    size clients, n;
    int wide;
} Sum;

/* Numbers x (clients, b, channels, n). Only rows with `real` (clients, b) not 0 count, or all if it
   is NULL; `several` is the number of values of a channel. If that is at most one, the given mean
   and var are used. new_mean and new_var are `momentum` of the way from mean and var to the
   statistics of the mini-batch, or equal to the latter if mean and var are absent. All of these,
   and the optional weight and bias, are (clients, channels). With a slope, the derivative is
   computed. */
typedef struct {
    float *out, *own_mean, *own_var, *inverse, *new_mean, *new_var, *slope_weight, *slope_bias;
    const float *x, *slope, *weight, *bias, *mean, *var;
    const uint8_t *real;
    const int64_t *several;
    size clients, b, channels, n;
    float eps, momentum;
} Norm;

enum { ROWS = 128, ABREAST = 10, FEW = 1 << 17, BLOCK = 1024, SIDE_BY_SIDE = 64 };
/* Block sizes: rows added to weights together; rows sent down a tree together; the least number of
   multiplications that is worth another thread; numbers of a reply added together, which stay in
   cache; channels normalized together if each row has one number of a channel. */

/* The number of pieces into which the channels of a client are cut. */
static size pieces_of(const Norm *m)
{
    return m->n == 1 ? (m->channels + SIDE_BY_SIDE - 1) / SIDE_BY_SIDE : m->channels;
}

/* Code that gains from wide vectors is compiled twice, for any processor and for processors with
   vectors of eight numbers; WIDE(name) distinguishes the two. (One function with target_clones
   would not do: vectors that some targets lack are split before the function is cloned.) */
#define WIDE(name) name##_plain
#include "norms.h"
#include "descent.h"
#include "forest.h"
#undef WIDE

#if defined(__x86_64__)
#define WIDE(name) name##_eight
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#include "norms.h"
#include "descent.h"
#include "forest.h"
#pragma clang attribute pop
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#include "norms.h"
#include "descent.h"
#include "forest.h"
#pragma GCC pop_options
#endif
#undef WIDE
#define HAS_EIGHT (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#define BEST(name) (eight ? name##_eight : name##_plain)
#else
#define HAS_EIGHT 0
#define BEST(name) name##_plain
#endif

/* Sums, without fused operations (GCC ignores the standard's pragma, and clang GCC's). */
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#endif
#define WIDE(name) name##_plain
#include "sums.h"
#undef WIDE

static void scatter(double *total, double *rest, const int64_t *indices, const void *values,
                    const double *weights, size c, size k, int wide)
{
    for (size i = 0; i < c; i++)
        for (size j = i * k; j < (i + 1) * k; j++) {
            double p = weights[i] *
                       (wide ? ((const double *)values)[j] : (double)((const float *)values)[j]);
            ADD(total[indices[j]], rest[indices[j]], p);
        }
}

#if defined(__x86_64__)
#define WIDE(name) name##_eight
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#include "sums.h"
#pragma clang attribute pop
#else
#pragma GCC target("avx2")
#include "sums.h"
#endif
#undef WIDE
#endif
#ifndef __clang__
#pragma GCC pop_options
#endif

/* choose(whether to use vectors of eight, whether to use PyTorch's threads) -> what is used from
   now on. By default both are used where they are available. */
static PyObject *choose(PyObject *self, PyObject *args)
{
    int wide, pytorch;
    if (!PyArg_ParseTuple(args, "pp", &wide, &pytorch))
        return NULL;
    eight = wide && HAS_EIGHT;
    *(void **)&by_pytorch = pytorch ? dlsym(RTLD_DEFAULT, "GOMP_parallel") : NULL;
    return Py_BuildValue("NN", PyBool_FromLong(eight), PyBool_FromLong(by_pytorch != NULL));
}

/* -- training ---------------------------------------------------------------------------------- */

/* The buffers of a tuple's objects; returns their number, or -1. */
static int buffers_of(PyObject *tuple, Py_buffer *buffers, int flags)
{
    size count = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : MOST_LAYERS + 1;
    if (count > MOST_LAYERS) {
        PyErr_SetString(PyExc_ValueError, "layers must be a tuple of at most 32 buffers");
        return -1;
    }
    for (int i = 0; i < count; i++)
        if (PyObject_GetBuffer(PyTuple_GetItem(tuple, i), &buffers[i], flags) != 0)
            return release(buffers, i), -1;
    return (int)count;
}

enum { BETWEEN_BUFFERS = 7 };

/* Read the operations after a layer from (three operations, fixed, eps, momentum, dropped, kept,
   scale, shift, mean, var, more_scale, more_shift (c, out), keys (most, c, 2)). Returns 0 with an
   exception if they are invalid. If `taken` is set, the buffers must be released. */
static int read_between(PyObject *given, Layer *layer, size most, size c, int last, Py_buffer *b,
                        int *taken)
{
    static const char *names[] = {"scale", "shift", "mean", "var", "more_scale", "more_shift"};
    if (!PyTuple_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "the operations after a layer must be a tuple");
        return 0;
    }
    if (!PyArg_ParseTuple(given, "iiipffIfw*w*w*w*y*y*y*", &layer->steps[0], &layer->steps[1],
                          &layer->steps[2], &layer->fixed, &layer->eps, &layer->momentum,
                          &layer->dropped, &layer->kept, &b[0], &b[1], &b[2], &b[3], &b[4], &b[5],
                          &b[6]))
        return 0;
    *taken = 1;
    for (int i = 0; i < 6; i++)
        if (b[i].len && !holds(&b[i], c, layer->out, 1, 4, names[i]))
            return 0;
    int seen[MOST_STEPS + 1] = {0}, sound = 1;
    for (int i = 0; i < MOST_STEPS && sound; i++) {
        int step = layer->steps[i];
        sound = step >= NOTHING && step <= DROPOUT &&
                (step == NOTHING || (!last && !seen[step]++));
    }
    sound = sound && (!seen[NORMALIZE] || (b[2].len && b[3].len && layer->eps > 0));
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "invalid operations after a layer");
        return 0;
    }
    if (seen[DROPOUT] && !holds(&b[6], most, c, 2, 8, "keys"))
        return 0;
    layer->scale = b[0].len ? b[0].buf : NULL, layer->shift = b[1].len ? b[1].buf : NULL;
    layer->mean = b[2].buf, layer->var = b[3].buf, layer->keys = b[6].buf;
    layer->more_scale = b[4].len ? b[4].buf : NULL, layer->more_shift = b[5].len ? b[5].buf : NULL;
    return 1;
}

/* train(weights ((c, out, in), ...), biases ((c, out) or None, ...), more_weights, more_biases
   (like them, or None), operations after each layer (see read_between), sizes (d, ..., k), x (rows,
   d), labels (rows) or targets (rows, k), used (most, c, b), shares (most, c, b), steps (c), (rows,
   most, c, b), whether labels, loss, lr, keep, delta, threads): descent in place, w <- keep w - lr
   (mean gradient + more). */
static PyObject *train(PyObject *self, PyObject *args)
{
    Py_buffer b[5], layers[4][MOST_LAYERS], between[MOST_LAYERS][BETWEEN_BUFFERS];
    PyObject *given[4], *follows, *sizes;
    Training m = {0};
    int by_label, threads, sound, taken = 0, counts[4] = {0}, followed[MOST_LAYERS] = {0};
    PyObject *answer = NULL;
    if (!PyArg_ParseTuple(args, "OOOOO!O!y*y*y*y*y*(nnnn)pifffi", &given[0], &given[1], &given[2],
                          &given[3], &PyTuple_Type, &follows, &PyTuple_Type, &sizes, &b[0], &b[1],
                          &b[2], &b[3], &b[4], &m.rows, &m.most, &m.clients, &m.b, &by_label,
                          &m.loss, &m.lr, &m.keep, &m.delta, &threads))
        return NULL;
    for (; taken < 4; taken++)
        if ((counts[taken] = buffers_of(given[taken], layers[taken],
                                        taken < 2 ? PyBUF_WRITABLE : PyBUF_SIMPLE)) < 0)
            goto done;
    m.layers = counts[0];
    if (m.layers < 1 || counts[1] != m.layers || counts[2] != m.layers || counts[3] != m.layers ||
        PyTuple_Size(follows) != m.layers || PyTuple_Size(sizes) != m.layers + 1) {
        PyErr_SetString(PyExc_ValueError, "weights, biases, terms and operations must be as many "
                                          "as layers, sizes one more");
        goto done;
    }
    size c = m.clients;
    for (int l = 0; l < m.layers; l++) {
        Layer *layer = &m.layer[l];
        layer->in = PyLong_AsSsize_t(PyTuple_GetItem(sizes, l)),
        layer->out = PyLong_AsSsize_t(PyTuple_GetItem(sizes, l + 1));
        if (PyErr_Occurred() || !holds(&layers[0][l], c, layer->out, layer->in, 4, "weight"))
            goto done;
        if ((layers[1][l].len && !holds(&layers[1][l], c, layer->out, 1, 4, "bias")) ||
            (layers[2][l].len &&
             !holds(&layers[2][l], c, layer->out, layer->in, 4, "more_weight")) ||
            (layers[3][l].len && !holds(&layers[3][l], c, layer->out, 1, 4, "more_bias")))
            goto done;
        layer->weight = layers[0][l].buf, layer->bias = layers[1][l].len ? layers[1][l].buf : NULL;
        layer->more_weight = layers[2][l].len ? layers[2][l].buf : NULL,
        layer->more_bias = layers[3][l].len ? layers[3][l].buf : NULL;
        if (!read_between(PyTuple_GetItem(follows, l), layer, m.most, c, l == m.layers - 1,
                          between[l], &followed[l]))
            goto done;
    }
    m.d = m.layer[0].in, m.k = m.layer[m.layers - 1].out;
    if (!holds(&b[0], m.rows, m.d, 1, 4, "x") ||
        !holds(&b[1], m.rows, by_label ? 1 : m.k, 1, by_label ? 8 : 4, "y") ||
        !holds(&b[2], m.most, c, m.b, 8, "used") || !holds(&b[3], m.most, c, m.b, 4, "shares") ||
        !holds(&b[4], c, 1, 1, 8, "steps"))
        goto done;
    m.x = b[0].buf, m.labels = by_label ? b[1].buf : NULL, m.targets = by_label ? NULL : b[1].buf;
    m.used = b[2].buf, m.shares = b[3].buf, m.steps = b[4].buf;
    sound = m.loss >= CROSS_ENTROPY && m.loss <= HUBER && (by_label || m.loss != CROSS_ENTROPY);
    for (int l = 0; l < m.layers; l++)
        sound &= m.layer[l].out > 0;
    for (size i = 0; i < c; i++)
        sound &= m.steps[i] > 0 && m.steps[i] <= m.most;
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "invalid number of steps or outputs, or unknown loss");
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    share(BEST(train_some), &m, c, c > 64 * threads ? 16 : 1,
          c * m.b * m.most * m.d * m.layer[0].out < FEW ? 1 : threads);
    Py_END_ALLOW_THREADS
    if (m.failed == NO_SUCH_ROW)
        PyErr_SetString(PyExc_IndexError, "a row index or a label is out of range");
    else if (m.failed)
        PyErr_NoMemory();
    else
        answer = Py_NewRef(Py_None);
done:
    while (taken > 0) {
        taken--;
        release(layers[taken], counts[taken]);
    }
    for (int l = 0; l < MOST_LAYERS; l++)
        release(between[l], followed[l] ? BETWEEN_BUFFERS : 0);
    release(b, 5);
    return answer;
}

/* -- trees ------------------------------------------------------------------------------------- */

/* pack_trees(nodes (n, 16 bytes), feature, threshold, left, right (n), roots (trees), n, trees,
   features) -> number of leaves, or -1 if a node has an invalid feature, or a child that does not
   come after it within its tree. The nodes of a tree are contiguous and begin with its root. */
static PyObject *pack_trees(PyObject *self, PyObject *args)
{
    Py_buffer b[6];
    size n, trees, features, leaves = 0, i = 0, t = 0;
    if (!PyArg_ParseTuple(args, "w*y*y*y*y*y*nnn", &b[0], &b[1], &b[2], &b[3], &b[4], &b[5], &n,
                          &trees, &features))
        return NULL;
    if (!holds(&b[0], n, 1, 1, sizeof(Node), "nodes") || !holds(&b[1], n, 1, 1, 4, "feature") ||
        !holds(&b[2], n, 1, 1, 4, "threshold") || !holds(&b[3], n, 1, 1, 4, "left") ||
        !holds(&b[4], n, 1, 1, 4, "right") || !holds(&b[5], trees, 1, 1, 4, "roots"))
        return release(b, 6), NULL;
    Node *nodes = b[0].buf;
    const int32_t *feature = b[1].buf, *left = b[3].buf, *right = b[4].buf, *roots = b[5].buf;
    const float *threshold = b[2].buf;
    for (; t < trees && n <= INT32_MAX; t++) {
        size end = t + 1 < trees ? roots[t + 1] : n;
        if (roots[t] != i || end <= i || end > n)
            break;
        for (; i < end; i++) {
            if (feature[i] < 0) {
                nodes[i] = (Node){
                    .leaf = (int32_t)leaves++, .feature = 0, .child = {(int32_t)i, (int32_t)i}};
                continue;
            }
            if (feature[i] >= features || left[i] <= i || left[i] >= end || right[i] <= i ||
                right[i] >= end)
                goto done;
            nodes[i] = (Node){
                .threshold = threshold[i], .feature = feature[i], .child = {left[i], right[i]}};
        }
    }
done:
    release(b, 6);
    return PyLong_FromSsize_t(n > 0 && i == n && t == trees ? leaves : -1);
}

/* sum_trees(out (n, k), x (n, d), nodes, roots (trees), shares (trees), values (leaves, k), (n, d,
   k, trees, nodes, leaves), threads): the weighted sum of the outputs of trees; nodes and leaves
   are those of `pack_trees` with as many features. */
static PyObject *sum_trees(PyObject *self, PyObject *args)
{
    Py_buffer b[6];
    Forest f = {0};
    size nodes, leaves;
    int threads, sound;
    if (!PyArg_ParseTuple(args, "w*y*y*y*y*y*(nnnnnn)i", &b[0], &b[1], &b[2], &b[3], &b[4], &b[5],
                          &f.n, &f.d, &f.k, &f.trees, &nodes, &leaves, &threads))
        return NULL;
    if (!holds(&b[0], f.n, f.k, 1, 4, "out") || !holds(&b[1], f.n, f.d, 1, 4, "x") ||
        !holds(&b[2], nodes, 1, 1, sizeof(Node), "nodes") ||
        !holds(&b[3], f.trees, 1, 1, 4, "roots") || !holds(&b[4], f.trees, 1, 1, 4, "shares") ||
        !holds(&b[5], leaves, f.k, 1, 4, "values"))
        return release(b, 6), NULL;
    f.out = b[0].buf, f.x = b[1].buf, f.nodes = b[2].buf, f.roots = b[3].buf, f.shares = b[4].buf,
    f.values = b[5].buf;
    sound = f.d > 0;
    for (size t = 0; t < f.trees; t++)
        sound &= f.roots[t] >= 0 && f.roots[t] < nodes;
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "a root is not a node, or rows have no features");
        return release(b, 6), NULL;
    }
    /* As many rows at a time as fit into the cache beside a tree, so that each tree is fetched
       once for all of them; at least a few for each thread. */
    f.block = (1 << 19) / (8 * f.k + 4 * f.d) + 1;
    if (threads > 1 && f.block > f.n / (4 * threads) + 1)
        f.block = f.n / (4 * threads) + 1;
    f.block += ABREAST - 1 - (f.block - 1) % ABREAST;
    Py_BEGIN_ALLOW_THREADS
    share(BEST(add_trees), &f, (f.n + f.block - 1) / f.block, 1, threads);
    Py_END_ALLOW_THREADS
    release(b, 6);
    if (f.failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* -- histograms -------------------------------------------------------------------------------- */

#include "histograms.h"

/* sum_histograms(out (nodes, total, channels), bins (d, n), offsets (d + 1), node (n), values (n,
   channels), (n, d, total, nodes, channels), threads): sums of values by node, feature and bin;
   rows of node -1 do not count. Feature j has the places offsets[j] .. offsets[j + 1] - 1. */
static PyObject *sum_histograms(PyObject *self, PyObject *args)
{
    Py_buffer b[5];
    Histograms h = {0};
    size d, nodes;
    int threads, sound;
    if (!PyArg_ParseTuple(args, "w*y*y*y*y*(nnnnn)i", &b[0], &b[1], &b[2], &b[3], &b[4], &h.n, &d,
                          &h.total, &nodes, &h.channels, &threads))
        return NULL;
    if (!holds(&b[0], nodes, h.total, h.channels, 8, "out") ||
        !holds(&b[1], d, h.n, 1, 1, "bins") || !holds(&b[2], d + 1, 1, 1, 8, "offsets") ||
        !holds(&b[3], h.n, 1, 1, 4, "node") || !holds(&b[4], h.n, h.channels, 1, 8, "values"))
        return release(b, 5), NULL;
    h.out = b[0].buf, h.bins = b[1].buf, h.offsets = b[2].buf, h.node = b[3].buf;
    h.values = b[4].buf;
    sound = h.offsets[0] == 0 && h.offsets[d] == h.total;
    for (size j = 0; j < d && sound; j++) {
        int64_t wide = h.offsets[j + 1] - h.offsets[j];
        sound = wide > 0;
        for (size i = 0; i < h.n && sound && wide < 256; i++)
            sound = h.bins[j * h.n + i] < wide;
    }
    for (size i = 0; i < h.n; i++)
        sound &= h.node[i] >= -1 && h.node[i] < nodes;
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "a bin or a node is out of range");
        return release(b, 5), NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    share(histogram_some, &h, d, 1, h.n * d < FEW ? 1 : threads);
    Py_END_ALLOW_THREADS
    release(b, 5);
    Py_RETURN_NONE;
}

/* -- sums of replies --------------------------------------------------------------------------- */

/* sum_replies(total (n), rest (n), x (c, n), weights (c), c, n, whether x is in double
   precision, threads): add sum_i weights[i] x[i] to total + rest. */
static PyObject *sum_replies(PyObject *self, PyObject *args)
{
    Py_buffer b[4];
    Sum s = {0};
    int threads;
    if (!PyArg_ParseTuple(args, "w*w*y*y*nnpi", &b[0], &b[1], &b[2], &b[3], &s.clients, &s.n,
                          &s.wide, &threads))
        return NULL;
    if (!holds(&b[0], s.n, 1, 1, 8, "total") || !holds(&b[1], s.n, 1, 1, 8, "rest") ||
        !holds(&b[2], s.clients, s.n, 1, s.wide ? 8 : 4, "x") ||
        !holds(&b[3], s.clients, 1, 1, 8, "weights"))
        return release(b, 4), NULL;
    s.total = b[0].buf, s.rest = b[1].buf, s.x = b[2].buf, s.weights = b[3].buf;
    size blocks = (s.n + BLOCK - 1) / BLOCK;
    Py_BEGIN_ALLOW_THREADS
    share(BEST(sum_some), &s, blocks, 4, s.clients * s.n < FEW ? 1 : threads);
    Py_END_ALLOW_THREADS
    release(b, 4);
    Py_RETURN_NONE;
}

/* sum_sparse(total (n), rest (n), indices (c, k), values (c, k), weights (c), c, k, n, whether
   values are in double precision): add sum_i weights[i] v_i, where v_i is values[i] at indices[i]
   and zero elsewhere. */
static PyObject *sum_sparse(PyObject *self, PyObject *args)
{
    Py_buffer b[5];
    size c, k, n;
    int wide, sound = 1;
    if (!PyArg_ParseTuple(args, "w*w*y*y*y*nnnp", &b[0], &b[1], &b[2], &b[3], &b[4], &c, &k, &n,
                          &wide))
        return NULL;
    if (!holds(&b[0], n, 1, 1, 8, "total") || !holds(&b[1], n, 1, 1, 8, "rest") ||
        !holds(&b[2], c, k, 1, 8, "indices") || !holds(&b[3], c, k, 1, wide ? 8 : 4, "values") ||
        !holds(&b[4], c, 1, 1, 8, "weights"))
        return release(b, 5), NULL;
    const int64_t *indices = b[2].buf;
    for (size i = 0; i < c * k; i++)
        sound &= indices[i] >= 0 && indices[i] < n;
    if (sound) {
        Py_BEGIN_ALLOW_THREADS
        scatter(b[0].buf, b[1].buf, indices, b[3].buf, b[4].buf, c, k, wide);
        Py_END_ALLOW_THREADS
    }
    release(b, 5);
    if (!sound)
        return PyErr_SetString(PyExc_IndexError, "an index is out of range"), NULL;
    Py_RETURN_NONE;
}

/* -- normalization ----------------------------------------------------------------------------- */

/* Whether a buffer is absent (empty) or holds a * b numbers of four bytes; *at is set to its
   start. */
static int given(const Py_buffer *buffer, size a, size b, const char *name, const float **at)
{
    *at = buffer->len ? buffer->buf : NULL;
    return buffer->len == 0 || holds(buffer, a, b, 1, 4, name);
}

/* normalize((c, b, channels, n), eps, momentum, threads, out, x (c, b, channels, n), optional slope
   (like x), optional weight, bias, mean, var (c, channels), optional real (c, b), several (c), made
   (5, c, channels), optional slopes (2, c, channels)). Without a slope, out is x normalized, and
   `made` receives means, unbiased variances, inverse standard deviations, and running means and
   variances after the step. With a slope (the gradient in the output), `made` is what the forward
   call wrote, out is the gradient in x, and `slopes` receives the gradients in weight and bias. */
static PyObject *normalize(PyObject *self, PyObject *args)
{
    Py_buffer b[11];
    Norm m = {0};
    int threads, sound = 1;
    const float *slopes;
    if (!PyArg_ParseTuple(args, "(nnnn)ffiw*y*y*y*y*y*y*y*y*w*y*", &m.clients, &m.b, &m.channels,
                          &m.n, &m.eps, &m.momentum, &threads, &b[0], &b[1], &b[2], &b[3], &b[4],
                          &b[5], &b[6], &b[7], &b[8], &b[9], &b[10]))
        return NULL;
    size each, rows;
    if (__builtin_mul_overflow(m.channels, m.n, &each) ||
        __builtin_mul_overflow(m.clients, m.b, &rows))
        rows = each = -1;
    if (!holds(&b[0], rows, each, 1, 4, "out") || !holds(&b[1], rows, each, 1, 4, "x") ||
        !given(&b[2], rows, each, "slope", &m.slope) ||
        !given(&b[3], m.clients, m.channels, "weight", &m.weight) ||
        !given(&b[4], m.clients, m.channels, "bias", &m.bias) ||
        !given(&b[5], m.clients, m.channels, "mean", &m.mean) ||
        !given(&b[6], m.clients, m.channels, "var", &m.var) ||
        (b[7].len && !holds(&b[7], m.clients, m.b, 1, 1, "real")) ||
        !holds(&b[8], m.clients, 1, 1, 8, "several") ||
        !holds(&b[9], 5, m.clients, m.channels, 4, "made") ||
        !given(&b[10], 2 * m.clients, m.channels, "slopes", &slopes))
        return release(b, 11), NULL;
    size many = m.clients * m.channels;
    m.out = b[0].buf, m.x = b[1].buf, m.real = b[7].len ? b[7].buf : NULL, m.several = b[8].buf;
    m.own_mean = b[9].buf, m.own_var = m.own_mean + many, m.inverse = m.own_var + many,
    m.new_mean = m.inverse + many, m.new_var = m.new_mean + many;
    m.slope_weight = (float *)slopes, m.slope_bias = slopes ? m.slope_weight + many : NULL;
    for (size i = 0; i < m.clients; i++) {
        size there = m.b;
        for (size r = 0; m.real && r < m.b; r++)
            there -= !m.real[i * m.b + r];
        sound &= m.several[i] > 1 ? there > 0 : m.slope || (m.mean && m.var);
    }
    if (!sound || (m.slope && !slopes)) {
        PyErr_SetString(PyExc_ValueError, "no rows to take statistics of, and no statistics given");
        return release(b, 11), NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    share(BEST(normalize_some), &m, m.clients * pieces_of(&m), 1, rows * each < FEW ? 1 : threads);
    Py_END_ALLOW_THREADS
    release(b, 11);
    Py_RETURN_NONE;
}

/* -- the module -------------------------------------------------------------------------------- */

/* version() -> version of the functions' arguments; foedus/kernels/__init__.py requires the one
   that it knows. */
static PyObject *version(PyObject *self, PyObject *args) { return PyLong_FromLong(6); }

static PyMethodDef methods[] = {
    {"version", version, METH_NOARGS, NULL},
    {"choose", choose, METH_VARARGS, NULL},
    {"words", words, METH_VARARGS, NULL},
    {"fold", fold, METH_VARARGS, NULL},
    {"order", order, METH_VARARGS, NULL},
    {"train", train, METH_VARARGS, NULL},
    {"pack_trees", pack_trees, METH_VARARGS, NULL},
    {"sum_trees", sum_trees, METH_VARARGS, NULL},
    {"sum_histograms", sum_histograms, METH_VARARGS, NULL},
    {"sum_replies", sum_replies, METH_VARARGS, NULL},
    {"sum_sparse", sum_sparse, METH_VARARGS, NULL},
    {"normalize", normalize, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_compiled", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__compiled(void)
{
    eight = HAS_EIGHT;
    if (pthread_atfork(NULL, NULL, without_pytorch) == 0)
        *(void **)&by_pytorch = dlsym(RTLD_DEFAULT, "GOMP_parallel");
    return PyModuleDef_Init(&module);
}
