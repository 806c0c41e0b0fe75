/* Weighted sums of clients' replies, in two doubles for each number. Included by compiled.c, twice:
   see there. Products and sums must not be contracted to fused operations: each step is rounded
   separately, which makes the remainder exact. */

/* total + rest <- total + rest + p; the rounding error of total is added to rest (Knuth's
   two-sum). */
#undef ADD
#define ADD(total, rest, p)                                     \
    do {                                                        \
        double old = total, sum = old + (p), grown = sum - old; \
        rest += (old - (sum - grown)) + ((p) - grown);          \
        total = sum;                                            \
    } while (0)

/* `many` numbers of the replies of all clients, whose rows are n apart, one client after the other:
   four numbers at a time, with the sums in registers. */
#undef SUM
#define SUM(type)                                                                                 \
    do {                                                                                          \
        const type *x = (const type *)s->x + from;                                                \
        size i = 0;                                                                               \
        for (; i + 4 <= s->clients; i += 4) {                                                     \
            const type *a = x + i * s->n, *b = a + s->n, *c = b + s->n, *d = c + s->n;            \
            double wa = s->weights[i], wb = s->weights[i + 1], wc = s->weights[i + 2],            \
                   wd = s->weights[i + 3];                                                        \
            for (size j = 0; j < many; j++) {                                                     \
                double t = total[j], r = rest[j], pa = wa * a[j], pb = wb * b[j], pc = wc * c[j], \
                       pd = wd * d[j];                                                            \
                ADD(t, r, pa);                                                                    \
                ADD(t, r, pb);                                                                    \
                ADD(t, r, pc);                                                                    \
                ADD(t, r, pd);                                                                    \
                total[j] = t, rest[j] = r;                                                        \
            }                                                                                     \
        }                                                                                         \
        for (; i < s->clients; i++)                                                               \
            for (size j = 0; j < many; j++) {                                                     \
                double p = s->weights[i] * x[i * s->n + j];                                       \
                ADD(total[j], rest[j], p);                                                        \
            }                                                                                     \
    } while (0)

/* Numbers first .. last - 1 of all clients' replies, in blocks of `BLOCK`. */
static void WIDE(sum_some)(void *about, size first, size last)
{
    const Sum *s = about;
    for (size block = first; block < last; block++) {
        size from = block * BLOCK, many = s->n - from < BLOCK ? s->n - from : BLOCK;
        double *restrict total = s->total + from, *restrict rest = s->rest + from;
        if (s->wide)
            SUM(double);
        else
            SUM(float);
    }
}
