/* Weighted sums of clients' replies, in two doubles for each number. Included by compiled.c, twice: see there. Products and sums must not be contracted
   to fused operations: each step is rounded by itself, which is what makes the rest exact. */

/* total + rest <- total + rest + p; what rounding takes from total goes to rest (Knuth's two-sum). */
#undef ADD
#define ADD(total, rest, p)                                  \
    do {                                                     \
        double old = total, sum = old + (p), grown = sum - old; \
        rest += (old - (sum - grown)) + ((p) - grown);       \
        total = sum;                                         \
    } while (0)

/* Numbers first .. last - 1, in blocks of `BLOCK`, of all clients' replies, one client after the other. */
static void WIDE(sum_some)(void *about, size first, size last)
{
    const Sum *s = about;
    for (size block = first; block < last; block++) {
        size from = block * BLOCK, many = s->n - from < BLOCK ? s->n - from : BLOCK;
        double *restrict total = s->total + from, *restrict rest = s->rest + from;
        for (size i = 0; i < s->clients; i++) {
            double weight = s->weights[i];
            if (s->wide) {
                const double *x = (const double *)s->x + i * s->n + from;
                for (size j = 0; j < many; j++) {
                    double p = weight * x[j];
                    ADD(total[j], rest[j], p);
                }
            } else {
                const float *x = (const float *)s->x + i * s->n + from;
                for (size j = 0; j < many; j++) {
                    double p = weight * (double)x[j];
                    ADD(total[j], rest[j], p);
                }
            }
        }
    }
}
