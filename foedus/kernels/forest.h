/* Sums of trees. Included by compiled.c, twice: see there. */

/* Several rows at a time, without branches, so that loads from memory overlap. */
ALWAYS void WIDE(walk)(const Node *nodes, int32_t root, const float *x, size d, int32_t at[ABREAST])
{
    int32_t moved;
    for (int r = 0; r < ABREAST; r++)
        at[r] = root;
    do {
        moved = 0;
        for (int r = 0; r < ABREAST; r++) {
            const Node *node = nodes + at[r];
            int32_t next = node->child[!(x[r * d + node->feature] <= node->threshold)];
            moved |= next ^ at[r];
            at[r] = next;
        }
    } while (moved);
}

/* In double precision, where the products of two floats are exact: the same bits however it is
   compiled. */
static void WIDE(add_trees)(void *about, size first, size last)
{
    Forest *f = about;
    size d = f->d, k = f->k, block = f->block;
    float *padded = malloc((size_t)(ABREAST * d) * sizeof *padded);
    double *totals = malloc((size_t)(block * k) * sizeof *totals);
    if (totals == NULL || padded == NULL)
        f->failed = NO_MEMORY;
    for (size piece = first; piece < last && !f->failed; piece++) {
        size begin = piece * block, rows = f->n - begin < block ? f->n - begin : block,
             whole = rows - rows % ABREAST;
        if (whole < rows) { /* fill up with copies of the last row */
            for (size r = 0; r < ABREAST; r++)
                memcpy(padded + r * d,
                       f->x + (begin + (whole + r < rows ? whole + r : rows - 1)) * d,
                       (size_t)d * sizeof *padded);
        }
        memset(totals, 0, (size_t)(rows * k) * sizeof *totals);
        for (size t = 0; t < f->trees; t++) {
            double share = f->shares[t];
            for (size r = 0; r < rows; r += ABREAST) {
                int32_t at[ABREAST];
                WIDE(walk)(f->nodes, f->roots[t], r < whole ? f->x + (begin + r) * d : padded, d,
                           at);
                for (size l = 0; l < ABREAST && r + l < rows; l++) {
                    const float *value = f->values + (size)f->nodes[at[l]].leaf * k;
                    double *total = totals + (r + l) * k;
                    for (size j = 0; j < k; j++)
                        total[j] += share * value[j];
                }
            }
        }
        for (size j = 0; j < rows * k; j++)
            f->out[begin * k + j] = (float)totals[j];
    }
    free(totals);
    free(padded);
}
