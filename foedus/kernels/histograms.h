/* Histograms of rows by feature, for trees. Included by compiled.c. */

/* out (nodes, total, channels) += values (n, channels) of the rows of each node, at
   offsets[j] + bins[j][row] for every feature j. */
typedef struct {
    double *out;
    const uint8_t *bins;
    const int64_t *offsets;
    const int32_t *node;
    const double *values;
    size n, total, channels;
} Histograms;

/* Features first .. last - 1: no two of them share a place of `out`. */
static void histogram_some(void *about, size first, size last)
{
    const Histograms *h = about;
    size channels = h->channels;
    for (size j = first; j < last; j++) {
        const uint8_t *bins = h->bins + j * h->n;
        double *out = h->out + h->offsets[j] * channels;
        for (size i = 0; i < h->n; i++) {
            if (h->node[i] < 0)
                continue;
            double *to = out + (h->node[i] * h->total + bins[i]) * channels;
            const double *value = h->values + i * channels;
            for (size c = 0; c < channels; c++)
                to[c] += value[c];
        }
    }
}
