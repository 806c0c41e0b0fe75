/* The few inner loops that decide how long a round takes, in C: random words, orders of rows, training of linear models, sums of trees.

   Everything here also exists in Python (foedus/kernels/__init__.py says where), which is used where this could not be compiled: integers and sums
   of trees are the same to the last bit, training is up to rounding. What a client gets depends on its own rows alone, not on who shares its batch nor on threads.

   Arguments are buffers of plain numbers, row after row, in the processor's own byte order. Sizes and indices are checked before use. */

#define _GNU_SOURCE /* RTLD_DEFAULT */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

typedef Py_ssize_t size;

#define ALWAYS static inline __attribute__((always_inline))

enum { FINE, NO_MEMORY, NO_SUCH_ROW };

/* -- threads -------------------------------------------------------------------------------------------------------------------------- */

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

/* PyTorch's own threads, if they are those of GNU's OpenMP: after an operation they spin for milliseconds, waiting for the next, and others
   would get no more than half of their cores. */
static void (*by_pytorch)(void (*)(void *), void *, unsigned, unsigned);

/* run(about, first, last) for all of 0 .. n - 1, `grain` at a time, by so many threads; whoever is free takes the next. */
static void share(void (*run)(void *, size, size), void *about, size n, size grain, int threads)
{
    Work work = {run, about, n, grain > 0 ? grain : 1, 0};
    pthread_t others[64];
    int started = 0;
    size pieces = (n + work.grain - 1) / work.grain;
    if (threads > 64)
        threads = 64;
    if (threads > pieces)
        threads = (int)pieces;
    if (threads > 1 && by_pytorch) {
        by_pytorch(work_on, &work, (unsigned)threads, 0);
        return;
    }
    while (started < threads - 1 && pthread_create(&others[started], NULL, thread_on, &work) == 0)
        started++;
    work_on(&work);
    while (started > 0)
        pthread_join(others[--started], NULL);
}

/* -- buffers -------------------------------------------------------------------------------------------------------------------------- */

static int holds(const Py_buffer *buffer, size numbers, size each, const char *name)
{
    if (numbers >= 0 && buffer->len == numbers * each)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes; %zd numbers of %zd bytes were due", name, buffer->len, numbers, each);
    return 0;
}

static void release(Py_buffer *buffers, int count)
{
    while (count > 0)
        PyBuffer_Release(&buffers[--count]);
}

/* -- Philox4x32-10 -------------------------------------------------------------------------------------------------------------------- */

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

/* words(out (c, count), keys (c, 2), c, count): the first words of the streams of c keys. */
static PyObject *words(PyObject *self, PyObject *args)
{
    Py_buffer b[2];
    size c, count;
    if (!PyArg_ParseTuple(args, "w*y*nn", &b[0], &b[1], &c, &count))
        return NULL;
    if (!holds(&b[0], c * count, 8, "out") || !holds(&b[1], 2 * c, 8, "keys"))
        return release(b, 2), NULL;
    int64_t *out = b[0].buf;
    const int64_t *keys = b[1].buf;
    Py_BEGIN_ALLOW_THREADS
    for (size i = 0; i < c; i++)
        for (size j = 0; j < count; j += 4) {
            uint32_t v[4] = {(uint32_t)(j / 4), 0, 0, 0};
            philox(v, (uint32_t)keys[2 * i], (uint32_t)keys[2 * i + 1]);
            for (size l = 0; l < 4 && j + l < count; l++)
                out[i * count + j + l] = v[l];
        }
    Py_END_ALLOW_THREADS
    release(b, 2);
    Py_RETURN_NONE;
}

/* fold(out (n, 2), keys (n or 1, 2), counters (n, 4), n): the first two words of one block each, for new keys. */
static PyObject *fold(PyObject *self, PyObject *args)
{
    Py_buffer b[3];
    size n;
    if (!PyArg_ParseTuple(args, "w*y*y*n", &b[0], &b[1], &b[2], &n))
        return NULL;
    size many = b[1].len == 16 ? 0 : 1;
    if (!holds(&b[0], 2 * n, 8, "out") || !holds(&b[1], many ? 2 * n : 2, 8, "keys") || !holds(&b[2], 4 * n, 8, "counters"))
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

/* -- orders --------------------------------------------------------------------------------------------------------------------------- */

/* Ascending, with as much room again to merge in. */
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
        const uint8_t *valid = o->valid ? o->valid + (o->valid_rows ? i % o->valid_rows : 0) * n : NULL;
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

/* order(out (c, n), keys (c, 2), valid (v, n) bytes or none, c, n, v, threads): permutations of 0 .. n - 1 by the words of keys, what is not
   valid last; keys are v clients' again and again. */
static PyObject *order(PyObject *self, PyObject *args)
{
    Py_buffer b[3];
    size c, n, rows;
    int threads;
    if (!PyArg_ParseTuple(args, "w*y*y*nnni", &b[0], &b[1], &b[2], &c, &n, &rows, &threads))
        return NULL;
    if (!holds(&b[0], c * n, 8, "out") || !holds(&b[1], 2 * c, 8, "keys") || !holds(&b[2], rows * n, 1, "valid"))
        return release(b, 3), NULL;
    if (n >= 1 << 30) {
        PyErr_Format(PyExc_ValueError, "cannot permute %zd things", n);
        return release(b, 3), NULL;
    }
    Order about = {b[0].buf, b[1].buf, rows ? b[2].buf : NULL, n, rows, 0};
    size grain = 1 + 8192 / (n + 1);
    Py_BEGIN_ALLOW_THREADS
    share(order_some, &about, c, grain, threads);
    Py_END_ALLOW_THREADS
    release(b, 3);
    if (about.failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* -- wide vectors --------------------------------------------------------------------------------------------------------------------- */

typedef float Vec __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t Mask __attribute__((vector_size(32)));
#define LANES 8
#define COLUMNS ((Mask){0, 1, 2, 3, 4, 5, 6, 7})

enum { CROSS_ENTROPY, SQUARED, LOGISTIC, HUBER };

typedef struct {
    const float *x, *targets, *shares, *more_weight, *more_bias;
    const int64_t *labels, *used, *steps;
    float *weight, *bias;
    size rows, d, k, most, clients, b;
    int loss;
    float lr, keep, delta;
    atomic_int failed;
} Linear;

/* A row goes to child[0] if its feature is at most the threshold, else to child[1]; a leaf is its own child, twice, and knows its number instead. */
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

enum { ROWS = 128, ABREAST = 10 };

#define WIDE(name) name##_plain
#include "wide.h"
#undef WIDE

#if defined(__x86_64__)
#define WIDE(name) name##_eight
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#include "wide.h"
#pragma clang attribute pop
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#include "wide.h"
#pragma GCC pop_options
#endif
#undef WIDE
#define HAS_EIGHT (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#define BEST(name) (eight ? name##_eight : name##_plain)
#else
#define HAS_EIGHT 0
#define BEST(name) name##_plain
#endif

static int eight; /* whether to use vectors of eight */

/* wide(whether) -> whether vectors of eight numbers are used from now on: they are unless told otherwise, where the processor has them. */
static PyObject *wide(PyObject *self, PyObject *args)
{
    int whether;
    if (!PyArg_ParseTuple(args, "p", &whether))
        return NULL;
    eight = whether && HAS_EIGHT;
    return PyBool_FromLong(eight);
}

/* -- linear models -------------------------------------------------------------------------------------------------------------------- */

/* train_linear(weight (c, k, d), bias (c, k) or none, more_weight, more_bias (like them, or none), x (rows, d), labels (rows) or targets (rows, k),
   used (most, c, b), shares (most, c, b), steps (c), (rows, d, k, most, c, b), whether labels, loss, lr, keep, delta, threads): descent in place,
   w <- keep w - lr (mean slope + more). */
static PyObject *train_linear(PyObject *self, PyObject *args)
{
    Py_buffer b[9];
    Linear m = {0};
    int by_label, threads, sound;
    if (!PyArg_ParseTuple(args, "w*w*y*y*y*y*y*y*y*(nnnnnn)pifffi", &b[0], &b[1], &b[2], &b[3], &b[4], &b[5], &b[6], &b[7], &b[8], &m.rows, &m.d,
                          &m.k, &m.most, &m.clients, &m.b, &by_label, &m.loss, &m.lr, &m.keep, &m.delta, &threads))
        return NULL;
    size c = m.clients, all = m.most * c * m.b;
    if (!holds(&b[0], c * m.k * m.d, 4, "weight") || !holds(&b[1], b[1].len ? c * m.k : 0, 4, "bias") ||
        !holds(&b[2], b[2].len ? c * m.k * m.d : 0, 4, "more_weight") || !holds(&b[3], b[3].len ? c * m.k : 0, 4, "more_bias") ||
        !holds(&b[4], m.rows * m.d, 4, "x") || !holds(&b[5], by_label ? m.rows : m.rows * m.k, by_label ? 8 : 4, "y") ||
        !holds(&b[6], all, 8, "used") || !holds(&b[7], all, 4, "shares") || !holds(&b[8], c, 8, "steps"))
        return release(b, 9), NULL;
    m.weight = b[0].buf, m.bias = b[1].len ? b[1].buf : NULL;
    m.more_weight = b[2].len ? b[2].buf : NULL, m.more_bias = b[3].len ? b[3].buf : NULL;
    m.x = b[4].buf, m.labels = by_label ? b[5].buf : NULL, m.targets = by_label ? NULL : b[5].buf;
    m.used = b[6].buf, m.shares = b[7].buf, m.steps = b[8].buf;
    sound = m.k > 0 && m.loss >= CROSS_ENTROPY && m.loss <= HUBER && (by_label || m.loss != CROSS_ENTROPY);
    for (size i = 0; i < c; i++)
        sound &= m.steps[i] > 0 && m.steps[i] <= m.most;
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "a number of steps, of outputs or a loss that cannot be");
        return release(b, 9), NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    share(BEST(train_some), &m, c, c > 64 * threads ? 16 : 1, threads);
    Py_END_ALLOW_THREADS
    release(b, 9);
    if (m.failed == NO_SUCH_ROW) {
        PyErr_SetString(PyExc_IndexError, "a row or a label that there is not");
        return NULL;
    }
    if (m.failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* -- trees ---------------------------------------------------------------------------------------------------------------------------- */

/* pack_trees(nodes (n, 16 bytes), feature, threshold, left, right (n), roots (trees), n, trees, features) -> number of leaves, or -1 where a
   node has no such feature or a child that does not come after it, within its tree. Trees lie side by side, each from its root on. */
static PyObject *pack_trees(PyObject *self, PyObject *args)
{
    Py_buffer b[6];
    size n, trees, features, leaves = 0, i = 0;
    if (!PyArg_ParseTuple(args, "w*y*y*y*y*y*nnn", &b[0], &b[1], &b[2], &b[3], &b[4], &b[5], &n, &trees, &features))
        return NULL;
    if (!holds(&b[0], n, sizeof(Node), "nodes") || !holds(&b[1], n, 4, "feature") || !holds(&b[2], n, 4, "threshold") ||
        !holds(&b[3], n, 4, "left") || !holds(&b[4], n, 4, "right") || !holds(&b[5], trees, 4, "roots"))
        return release(b, 6), NULL;
    Node *nodes = b[0].buf;
    const int32_t *feature = b[1].buf, *left = b[3].buf, *right = b[4].buf, *roots = b[5].buf;
    const float *threshold = b[2].buf;
    for (size t = 0; t < trees && n <= INT32_MAX; t++) {
        size end = t + 1 < trees ? roots[t + 1] : n;
        if (roots[t] != i || end <= i || end > n)
            break;
        for (; i < end; i++) {
            if (feature[i] < 0) {
                nodes[i] = (Node){.leaf = (int32_t)leaves++, .feature = 0, .child = {(int32_t)i, (int32_t)i}};
                continue;
            }
            if (feature[i] >= features || left[i] <= i || left[i] >= end || right[i] <= i || right[i] >= end)
                goto done;
            nodes[i] = (Node){.threshold = threshold[i], .feature = feature[i], .child = {left[i], right[i]}};
        }
    }
done:
    release(b, 6);
    return PyLong_FromSsize_t(n > 0 && i == n ? leaves : -1);
}

/* sum_trees(out (n, k), x (n, d), nodes, roots (trees), shares (trees), values (leaves, k), (n, d, k, trees, nodes, leaves), threads): the
   weighted sum of what the trees of `pack_trees` say of rows. */
static PyObject *sum_trees(PyObject *self, PyObject *args)
{
    Py_buffer b[6];
    Forest f = {0};
    size nodes, leaves;
    int threads, sound;
    if (!PyArg_ParseTuple(args, "w*y*y*y*y*y*(nnnnnn)i", &b[0], &b[1], &b[2], &b[3], &b[4], &b[5], &f.n, &f.d, &f.k, &f.trees, &nodes, &leaves,
                          &threads))
        return NULL;
    if (!holds(&b[0], f.n * f.k, 4, "out") || !holds(&b[1], f.n * f.d, 4, "x") || !holds(&b[2], nodes, sizeof(Node), "nodes") ||
        !holds(&b[3], f.trees, 4, "roots") || !holds(&b[4], f.trees, 4, "shares") || !holds(&b[5], leaves * f.k, 4, "values"))
        return release(b, 6), NULL;
    f.out = b[0].buf, f.x = b[1].buf, f.nodes = b[2].buf, f.roots = b[3].buf, f.shares = b[4].buf, f.values = b[5].buf;
    sound = f.d > 0;
    for (size t = 0; t < f.trees; t++)
        sound &= f.roots[t] >= 0 && f.roots[t] < nodes;
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "a root that is no node, or rows without features");
        return release(b, 6), NULL;
    }
    /* As many rows at a time as the cache holds beside a tree, so that each tree is fetched once for all of them; and some for every thread. */
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

/* -- the module ----------------------------------------------------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"wide", wide, METH_VARARGS, NULL},
    {"words", words, METH_VARARGS, NULL},
    {"fold", fold, METH_VARARGS, NULL},
    {"order", order, METH_VARARGS, NULL},
    {"train_linear", train_linear, METH_VARARGS, NULL},
    {"pack_trees", pack_trees, METH_VARARGS, NULL},
    {"sum_trees", sum_trees, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_compiled", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__compiled(void)
{
    eight = HAS_EIGHT;
    *(void **)&by_pytorch = dlsym(RTLD_DEFAULT, "GOMP_parallel");
    return PyModuleDef_Init(&module);
}
